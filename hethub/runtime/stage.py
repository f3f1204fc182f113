"""One rank's part of the model: its stage's layers on its shards, with embedding and head where they belong."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hethub.runtime.layers import LlamaLayer, TokenLayout, document_mask, rms_norm
from hethub.runtime.loss import head_loss
from hethub.runtime.parameter import Parameter
from hethub.runtime.rope import rope_table
from hethub.runtime.storage import FlatStorage
from hethub.runtime.tensor_parallel import TensorGroup, column_parallel, embed
from hethub.spec.layout import Layout, Seat
from hethub.spec.tensors import EMBEDDING, FINAL_NORM, HEAD, RankShares


@dataclass(frozen=True, kw_only=True)
class TileInput:
    """What a tile brings from the data: token ids and targets (batch, seq), documents where they are masked."""

    batch: int
    tokens: Tensor | None = None
    targets: Tensor | None = None
    segments: Tensor | None = None


class Stage:
    """The layers of this rank's stage, ready to run tiles forward.

    `forward` takes the hidden states (batch * seq, hidden) of the stage before, or embeds tokens where this is the
    first; it gives hidden states, or the loss where this is the last.
    """

    def __init__(self, layout: Layout, seat: Seat, storage: FlatStorage, group: TensorGroup) -> None:
        model = layout.model
        self.layout, self.group, self.storage = layout, group, storage
        self.hidden, self.eps, self.seq_len = model.hidden, model.norm_eps, layout.plan.seq_len
        self.is_first, self.is_last = seat.stage == 0, seat.stage == layout.num_stages - 1
        self.shares: RankShares = layout.shares(seat.stage, seat.replica)[seat.position]
        spec = layout.stages[seat.stage]
        self.layers = [self._layer(layer, spec.recompute) for chunk in spec.chunks for layer in range(*chunk)]
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

    def _layer(self, layer: int, recompute: str) -> LlamaLayer:
        def use(name: str) -> Parameter:
            return self._use(f"model.layers.{layer}.{name}.weight")

        return LlamaLayer(
            head_dim=self.layout.model.head_size, eps=self.eps, group=self.group, recompute=recompute,  # type: ignore[arg-type]
            query=use("self_attn.q_proj"), key=use("self_attn.k_proj"), value=use("self_attn.v_proj"),
            output=use("self_attn.o_proj"), gate=use("mlp.gate_proj"), up=use("mlp.up_proj"), down=use("mlp.down_proj"),
            attention_norm=use("input_layernorm"), mlp_norm=use("post_attention_layernorm"),
        )  # fmt: skip

    def run_layers(self, x: Tensor | None, data: TileInput) -> Tensor:
        """Hidden states (batch * seq, hidden) behind this stage's last layer."""
        if self.embedding is not None:
            assert data.tokens is not None
            x = embed(data.tokens.reshape(-1), self.shares.vocab.start, self.group, self.embedding)
        assert x is not None
        mask = None if data.segments is None else document_mask(data.segments)
        tokens = TokenLayout(batch=data.batch, seq_len=self.seq_len, cos=self.cos, sin=self.sin, mask=mask)
        for layer in self.layers:
            x = layer(x, tokens)
        return x

    def forward(self, x: Tensor | None, data: TileInput, loss_scale: float) -> Tensor:
        """Hidden states for the next stage, or, on the last, the summed token losses times `loss_scale` (0-d)."""
        x = self.run_layers(x, data)
        if self.norm is None or self.head is None:
            return x
        assert data.targets is not None
        x = rms_norm(x, self.norm, self.eps)
        return head_loss(x, data.targets.reshape(-1), self.shares.vocab.start, loss_scale, self.group, self.head)

    @torch.no_grad()
    def logits(self, x: Tensor | None, data: TileInput) -> Tensor:
        """The rank's columns of the logits, (batch * seq, vocab_local), without gradients; the last stage only."""
        x = self.run_layers(x, data)
        assert self.norm is not None
        assert self.head is not None
        return column_parallel(rms_norm(x, self.norm, self.eps), self.group, (self.head,))[0]
