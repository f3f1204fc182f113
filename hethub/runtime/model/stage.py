"""One rank's part of the model: its stage's layers on its shards, with embedding and head where they belong."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hethub.runtime.model.layers import Documents, LlamaLayer, TokenLayout, rms_norm
from hethub.runtime.model.loss import head_loss, summed_loss
from hethub.runtime.model.rope import rope_table
from hethub.runtime.model.tensor_parallel import TensorGroup, embed
from hethub.runtime.state.parameter import Parameter
from hethub.runtime.state.storage import FlatStorage
from hethub.spec.layout.bind import Assignment, Layout
from hethub.spec.layout.tensors import EMBEDDING, FINAL_NORM, HEAD, RankShares
from hethub.spec.model import ModelSpec
from hethub.spec.plan import Recompute


@dataclass(frozen=True, kw_only=True)
class MicrobatchInput:
    """What a microbatch brings from the data: token ids and targets (batch, seq), documents where attention stays
    inside them."""

    batch: int
    tokens: Tensor | None = None
    targets: Tensor | None = None
    documents: Documents | None = None


class Stage:
    """The layers of this rank's stage in model order, with `embed` and `loss` at the ends of the model.

    Each of them is a graph of its own when a microbatch passes (hethub.runtime.pipeline.passes).
    """

    def __init__(self, layout: Layout, assignment: Assignment, storage: FlatStorage, group: TensorGroup) -> None:
        model = layout.model
        self.layout, self.group, self.storage = layout, group, storage
        self.hidden, self.eps, self.seq_len = model.hidden, model.norm_eps, layout.plan.seq_len
        self.is_first, self.is_last = assignment.stage == 0, assignment.stage == layout.num_stages - 1
        self.shares: RankShares = layout.shares(assignment.stage, assignment.replica)[assignment.position]
        spec = layout.stages[assignment.stage]
        self.recompute = spec.recompute
        self.layers = [
            llama_layer(model, layer, self._use, group, spec.recompute)
            for chunk in spec.chunks
            for layer in range(*chunk)
        ]
        self.embedding = self._use(EMBEDDING) if self.is_first else None
        self.norm = self._use(FINAL_NORM) if self.is_last else None
        self.head = self._use(EMBEDDING if model.tied_head else HEAD) if self.is_last else None
        weights = storage.weights
        self.cos, self.sin = rope_table(model, self.seq_len, weights.dtype, weights.device)

    def _use(self, name: str) -> Parameter:
        """The parameter, noting that one more place adds to its gradient (a tied head makes two)."""
        parameter = self.storage.parameters[name]
        parameter.uses += 1
        return parameter

    def is_end(self, layer: int) -> bool:
        """Whether the head follows this layer of the stage."""
        return self.is_last and layer == len(self.layers) - 1

    def embed(self, data: MicrobatchInput) -> Tensor:
        """Hidden states (batch * seq, hidden) of the microbatch's tokens; the first stage only."""
        assert self.embedding is not None
        assert data.tokens is not None
        return embed(data.tokens.reshape(-1), self.shares.vocab.start, self.group, self.embedding)

    def token_layout(self, data: MicrobatchInput) -> TokenLayout:
        """What every layer must know of the microbatch's tokens."""
        return TokenLayout(batch=data.batch, seq_len=self.seq_len, cos=self.cos, sin=self.sin, documents=data.documents)

    def loss(self, x: Tensor, data: MicrobatchInput, scale: float) -> Tensor:
        """The summed token losses times `scale` (0-d) of the last layer's hidden states; the last stage only."""
        assert self.head is not None
        assert data.targets is not None
        first = self.shares.vocab.start
        return head_loss(self._normed(x), data.targets.reshape(-1), first, scale, self.group, self.head)

    def held_out_loss(self, x: Tensor, data: MicrobatchInput) -> Tensor:
        """The summed token losses (0-d) as `loss` has them, nothing noted for a backward."""
        assert self.head is not None
        assert data.targets is not None
        return summed_loss(self._normed(x), data.targets.reshape(-1), self.shares.vocab.start, self.group, self.head)

    def _normed(self, x: Tensor) -> Tensor:
        assert self.norm is not None
        return rms_norm(x, self.norm, self.eps)


def llama_layer(
    model: ModelSpec, layer: int, use: Callable[[str], Parameter], group: TensorGroup, recompute: Recompute = "none"
) -> LlamaLayer:
    """A layer on the parameters that `use` gives by name."""

    def own(name: str) -> Parameter:
        return use(f"model.layers.{layer}.{name}.weight")

    return LlamaLayer(
        head_dim=model.head_size, window=model.sliding_window, eps=model.norm_eps, group=group, recompute=recompute,
        query=own("self_attn.q_proj"), key=own("self_attn.k_proj"), value=own("self_attn.v_proj"),
        output=own("self_attn.o_proj"), gate=own("mlp.gate_proj"), up=own("mlp.up_proj"), down=own("mlp.down_proj"),
        attention_norm=own("input_layernorm"), mlp_norm=own("post_attention_layernorm"),
    )  # fmt: skip
