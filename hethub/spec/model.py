"""Models: the shape of a transformer, read from our YAML or from a Hugging Face folder."""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from hethub.spec.accelerator import Positive
from hethub.spec.base import Spec
from hethub.spec.documents import Source
from hethub.spec.errors import BadInput, BrokenRule

FamilyName = Literal["llama", "gpt", "bert", "opt", "mpt"]
TRAINED: FamilyName = "llama"  # the family of which hethub has the code


class Family(NamedTuple):
    """What the models of a family have in common beside their shape."""

    gated: bool = False  # SwiGLU in the MLP, where the model file does not say
    rms_norm: bool = False  # else LayerNorm
    rotary: bool = False  # RoPE on queries and keys
    learned_positions: bool = False  # a row of the embedding for every place in a sequence
    biased: bool = True  # products and norms have biases
    causal: bool = True  # a token sees those before it alone


FAMILIES: dict[FamilyName, Family] = {
    "llama": Family(gated=True, rms_norm=True, rotary=True, biased=False),
    "gpt": Family(learned_positions=True),
    "bert": Family(learned_positions=True, causal=False),
    "opt": Family(learned_positions=True),
    "mpt": Family(biased=False),
}
Count = Annotated[int, Field(ge=1)]
# Of a model's shape: a hundred times what has been built; beyond it a figure is a slip, and degrees are tried one by
# one.
Dimension = Annotated[int, Field(ge=1, le=100_000_000)]
Number = Annotated[int, Field(ge=1, le=100_000)]


class Llama3Rope(Spec):
    """Llama 3.1's stretching of RoPE wavelengths (Hugging Face's rope_type `llama3`)."""

    type: Literal["llama3"] = "llama3"  # the only kind that is known
    factor: Positive  # by which the longest wavelengths are stretched (8 in Llama 3.1)
    low_freq_factor: Positive  # wavelengths above original_max_seq_len over this are stretched whole
    high_freq_factor: Positive  # wavelengths below original_max_seq_len over this stay; between, interpolated
    original_max_seq_len: Dimension  # tokens that the model was first trained on

    @model_validator(mode="after")
    def _bands_apart(self) -> "Llama3Rope":
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor must exceed low_freq_factor.")
        return self


class ModelSpec(Spec):
    """The shape of a decoder (or encoder) stack. The runtime trains `llama`; the predictor knows all families."""

    name: str  # how plans and answers call it
    family: FamilyName = "llama"  # llama trains; all can be planned and predicted
    layers: Number  # transformer layers
    hidden: Dimension  # width of the residual stream
    heads: Number  # of attention's queries; a multiple of kv_heads
    kv_heads: Number | None = None  # None: as many as heads
    head_dim: Dimension | None = None  # None: hidden / heads
    ffn: Dimension  # width of the MLP
    gated: bool | None = None  # None: SwiGLU for llama, plain MLP for the others
    vocab: Dimension  # tokens that the model knows: at least as many as the tokenizer has
    max_seq_len: Dimension  # longest sequence
    sliding_window: Dimension | None = None  # last tokens that attention sees, a token itself among them; null: all
    tied_head: bool = False  # the output matrix is the embedding
    norm_eps: Positive = 1.0e-5  # added to the mean square (variance) in norms
    rope_theta: Positive = 10000.0  # base of the rotary wavelengths (500000 in Llama 3)
    rope_scaling: Llama3Rope | None = None  # stretched wavelengths of Llama 3.1 and later; null: none
    init_std: Positive = 0.02  # of initial weights

    @model_validator(mode="after")
    def _shape_fits(self) -> "ModelSpec":
        if self.head_dim is None and self.hidden % self.heads:
            raise BrokenRule(
                f"hidden {self.hidden} is not a multiple of heads {self.heads}; change one or give head_dim.", "heads"
            )
        if self.heads % self.num_kv_heads:
            raise BrokenRule(
                f"heads {self.heads} is not a multiple of kv_heads {self.num_kv_heads}; every KV head serves equally many heads.",
                "kv_heads",
            )
        if self.of_family.rotary and self.head_size % 2:
            raise BrokenRule(f"head_dim {self.head_size} is odd; RoPE turns pairs.", "head_dim")
        return self

    def check_trained(self, job: Source, *, in_program: bool = False) -> None:
        """Raises BadInput, which says where the job names the model, where hethub has no code for the model;
        `in_program`: for strategy hap, which takes other code too."""
        if self.is_trained:
            return
        if self.family == TRAINED:
            raise BadInput(
                f"{job.at(('model',))} '{self.name}' has gated: false; hethub plans and predicts it, but the MLP that it trains is gated. "
                "Leave gated out."
            )
        said = (
            f"strategy 'hap' knows the code of {TRAINED} only. Give other models as python:package.module:factory."
            if in_program
            else f"hethub plans and predicts it, but trains only {TRAINED}. Choose a model of that family."
        )
        raise BadInput(f"{job.at(('model',))} '{self.name}' is of family {self.family}; {said}")

    @property
    def of_family(self) -> Family:
        return FAMILIES[self.family]

    @property
    def is_trained(self) -> bool:
        """Whether hethub has the code of such models."""
        return self.family == TRAINED and self.is_gated

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def is_gated(self) -> bool:
        return self.of_family.gated if self.gated is None else self.gated

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: attention, MLP and norms (biases counted for the families that have them)."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.num_kv_heads)
        mlp = (3 if self.is_gated else 2) * self.hidden * self.ffn
        if not self.of_family.biased:
            return attention + mlp + 2 * self.hidden
        biases = self.head_size * (self.heads + 2 * self.num_kv_heads) + self.ffn + 2 * self.hidden
        return attention + mlp + biases + 4 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Token embedding, and learned positions where the family has them."""
        positions = self.max_seq_len * self.hidden if self.of_family.learned_positions else 0
        return self.vocab * self.hidden + positions

    @property
    def head_parameters(self) -> int:
        """Final norm and, unless it is tied to the embedding, the output matrix."""
        norm = 2 * self.hidden if self.of_family.biased else self.hidden
        return norm + (0 if self.tied_head else self.vocab * self.hidden)

    @property
    def parameters(self) -> int:
        """All trained parameters; a tied head counts once."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.head_parameters
