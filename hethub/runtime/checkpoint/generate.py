"""Text from a checkpoint, in one process: the layers of training over a cache of keys and values."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from hethub.kernels.bodies import uncompiled
from hethub.kernels.device import choose_device
from hethub.runtime.checkpoint.export import Trained, iterate_weights, with_newest
from hethub.runtime.data.tokenizer import Tokenizer, load_tokenizer
from hethub.runtime.model.layers import KeyValues, TokenLayout, rms_norm
from hethub.runtime.model.rope import rope_table
from hethub.runtime.model.stage import llama_layer
from hethub.runtime.model.tensor_parallel import TensorGroup, column_parallel, embed
from hethub.runtime.state.parameter import Parameter
from hethub.runtime.state.storage import DTYPES
from hethub.spec.errors import BadInput
from hethub.spec.hugging_face import end_tokens
from hethub.spec.layout.tensors import EMBEDDING, FINAL_NORM, HEAD


class Generator:
    """A trained model that goes on with token ids, in the precision it was trained in."""

    def __init__(self, trained: Trained, device: torch.device) -> None:
        self.model = trained.record.model
        dtype, group = DTYPES[trained.record.precision], TensorGroup(None)
        self._parameters = {
            info.name: Parameter(info.name, values.view(info.stored_shape).to(device, dtype), torch.empty(0))
            for info, values in iterate_weights(trained.checkpoint, self.model)
        }
        self._group = group
        self._layers = [
            llama_layer(self.model, n, self._parameters.__getitem__, group) for n in range(self.model.layers)
        ]
        self._head = self._parameters[EMBEDDING if self.model.tied_head else HEAD]
        self._cos, self._sin = rope_table(self.model, self.model.max_seq_len, dtype, device)
        self._device = device

    @torch.no_grad()
    def logits(self, ids: list[int], start: int, past: KeyValues) -> Tensor:
        """Return the logits (vocab,) of the token that follows `ids`. `ids` begin at position `start`; `past` holds the keys and values
        of all tokens before them."""
        places = slice(start, start + len(ids))
        tokens = TokenLayout(batch=1, seq_len=len(ids), cos=self._cos[places], sin=self._sin[places], past=past)
        with uncompiled():  # every prompt has another length
            x = embed(torch.tensor(ids, device=self._device), 0, self._group, self._parameters[EMBEDDING])
            for layer in self._layers:
                x = layer(x, tokens)
            x = rms_norm(x[-1:], self._parameters[FINAL_NORM], self.model.norm_eps)
            return column_parallel(x, self._group, (self._head,))[0][0]

    def tokens(self, ids: list[int], count: int, ends: set[int], temperature: float, seed: int) -> Iterator[int]:
        """Up to `count` tokens that follow `ids`, the likeliest each time, or at a `temperature` above 0 drawn from
        `seed`; an end of text is the last."""
        random = torch.Generator().manual_seed(seed)
        past, start = KeyValues(), 0
        for _ in range(count):
            logits = self.logits(ids, start, past).double().cpu()
            start += len(ids)
            if temperature:
                chances = torch.softmax((logits - logits.max()) / temperature, 0)  # a tiny one makes no infinity
                token = int(torch.multinomial(chances, 1, generator=random))
            else:
                token = int(logits.argmax())
            yield token
            if token in ends:
                return
            ids = [token]


def generate(run: Path, prompt: str, *, tokens: int, temperature: float, seed: int) -> Iterator[str]:
    """What the newest whole checkpoint of a run, or the one that `run` names, goes on with, piece by piece. Raises BadInput,
    and as `with_newest`."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise BadInput("the prompt is no UTF-8; write it in the terminal's encoding, or set that to UTF-8.") from None
    return with_newest(run, lambda trained: _generate(trained, prompt, tokens, temperature, seed))


def _generate(trained: Trained, prompt: str, tokens: int, temperature: float, seed: int) -> Iterator[str]:
    if trained.tokenizer is None:
        raise BadInput(
            f"{trained.run}: the run was trained on tokens whose tokenizer it does not know; set data.tokenizer in "
            f"{trained.run / 'job.yaml'}."
        )
    tokenizer = load_tokenizer(trained.tokenizer, Path(), bos=trained.bos)
    ids = _prompt_ids(prompt, tokenizer, trained, tokens)
    device = choose_device(0, 1)
    device.activate()
    ends = {trained.end_of_document} if trained.end_of_document is not None else set()
    if trained.folder is not None:
        ends |= end_tokens(trained.folder)
    generator = Generator(trained, device.torch_device)
    return _pieces(ids, generator.tokens(ids, tokens, ends, temperature, seed), ends, tokenizer)


def _prompt_ids(prompt: str, tokenizer: Tokenizer, trained: Trained, tokens: int) -> list[int]:
    model = trained.record.model
    ids = [*tokenizer.beginning, *(int(token) for token in tokenizer.encode([prompt])[0])]
    if not ids:
        raise BadInput("the prompt is empty; give at least one character to go on from.")
    if strange := next((token for token in ids if token >= model.vocab), None):
        raise BadInput(
            f"the prompt has token id {strange}, but the model's vocabulary ends at {model.vocab}; write it otherwise."
        )
    if len(ids) + tokens > model.max_seq_len:
        raise BadInput(
            f"the prompt has {len(ids)} tokens; with --tokens {tokens} that is more than the {model.max_seq_len} that the model takes. "
            "Shorten one of them."
        )
    return ids


def _pieces(prompt: list[int], found: Iterator[int], ends: set[int], tokenizer: Tokenizer) -> Iterator[str]:
    """The text of the tokens behind the prompt's as it grows; a character whose bytes are not all there waits for them."""
    ids, shown = list(prompt), len(tokenizer.decode(prompt))
    text = ""
    for token in found:
        if token not in ends:
            ids.append(token)
            text = tokenizer.decode(ids)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[shown:]
                shown = len(text)
    yield text[shown:]
