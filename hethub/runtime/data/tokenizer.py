"""Tokenizers, and the stream of tokens that packed text becomes."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hethub.runtime.data.chat import CONFIG, Conversation, special_token, tokenizer_config
from hethub.runtime.data.sources import Piece
from hethub.spec.documents import check_regular
from hethub.spec.errors import BadInput

END_OF_DOCUMENT_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
BYTES_END = "<|endoftext|>"  # what ends a document of `bytes` is called in an exported folder
_BATCH_BYTES = 8 * 2**20  # a tokenizer needs some thirty times as much memory while it works
_BATCH_PIECES = 4096
_MOST_FILE_BYTES = 2**28  # a vocabulary of 256,000 takes some 35 MB


Text = TypeVar("Text", Piece, Conversation)


@dataclass(frozen=True)
class Tokenizer:
    """Turns texts into token ids."""

    name: str
    identity: str  # equal for tokenizers whose ids mean the same: of the vocabulary
    file: str  # of the whole file, by which earlier versions knew tokenizers
    vocab: int
    end_of_document: int | None
    encode: Callable[[Sequence[str]], list[NDArray[Any]]]
    beginning: tuple[int, ...] = ()  # what it puts in front of a text, for `encode` does not
    # The same with the character where each token begins; None where there are no characters (bytes).
    encode_placed: Callable[[Sequence[str]], list[tuple[NDArray[Any], NDArray[Any]]]] | None = None
    decode: Callable[[Sequence[int]], str] = lambda ids: bytes(i for i in ids if i < 256).decode(errors="replace")

    def is_called(self, identity: str) -> bool:
        """Whether tokens that bear `identity`, perhaps one of an earlier version, are this tokenizer's: those of `bytes` are
        that of an exported folder's, too."""
        is_bytes = identity == "bytes" and self.identity == _identity(_byte_vocabulary())
        return is_bytes or identity in (self.identity, self.file)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest type that holds every id, little-endian as in token files."""
        return np.dtype("<u2" if self.vocab <= 2**16 else "<u4")


class TokenBatch(NamedTuple):
    """A part of the token stream, where documents end in it, and what it was made of."""

    tokens: NDArray[Any]
    ends: NDArray[np.int64]  # of each document that ends here, the number of tokens in this part up to its end
    num_bytes: int  # of text
    trained: NDArray[Any] | None = None  # of conversations: 1 where a token is to be learnt


def load_tokenizer(reference: str, base: Path, *, bos: bool = True) -> Tokenizer:
    """`bytes` (ids 0-255, 256 ends a document) or a tokenizer.json, relative to `base`, whose end of document is the
    eos_token of the tokenizer_config.json beside it, or else the first there is of END_OF_DOCUMENT_TOKENS; `bos`: it puts
    in front of a text what it has for that. Raises BadInput."""
    if reference == "bytes":
        return Tokenizer(
            name="bytes", identity="bytes", file="bytes", vocab=257, end_of_document=256, encode=_encode_bytes
        )
    found = _from_file(base / reference)
    return found if bos else replace(found, beginning=())


def byte_tokenizer() -> str:
    """The tokenizer `bytes` as a tokenizer.json, for who loads an exported folder: every byte a token, 256 the end."""
    import tokenizers

    names = {name: token for name, token in _byte_vocabulary().items() if name != BYTES_END}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(names, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([BYTES_END])
    return str(made.to_str())


def _byte_vocabulary() -> dict[str, int]:
    """Its vocabulary, which names bytes by characters as GPT-2's does (Radford et al. 2019): printable ones by
    themselves, the others by those from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    names = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    return {**names, BYTES_END: 256}


def _identity(vocabulary: dict[str, int]) -> str:
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


def encode_stream(texts: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[TokenBatch]:
    """The token stream of all pieces, each document behind the tokenizer's beginning and followed by the
    end-of-document token.

    Raises BadInput where a second document comes and the tokenizer has no token to mark where the first one ended.
    """
    ended, begins = 0, True
    for batch in _batches(texts):
        follows_another = ended > 0 or any(piece.ends_document for piece in batch[:-1])
        if follows_another and tokenizer.end_of_document is None:
            raise BadInput(
                f"{tokenizer.name}: several documents are packed one after the other, which needs an end-of-document token, and the "
                f"tokenizer has none: neither does {CONFIG} beside it name an eos_token, nor has it one of "
                f"{', '.join(END_OF_DOCUMENT_TOKENS)}. Name one there, or choose another tokenizer."
            )
        ended += sum(piece.ends_document for piece in batch)
        yield _pack(batch, tokenizer, begins)
        begins = batch[-1].ends_document


def encode_conversations(chats: Iterable[Conversation], tokenizer: Tokenizer) -> Iterator[TokenBatch]:
    """The token stream of all conversations, each followed by the end-of-document token where there is one.

    Learnt are the tokens that begin inside the assistant's turns.
    """
    assert tokenizer.encode_placed is not None, "a tokenizer with a chat template is a tokenizer.json"
    end = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
    for batch in _batches(chats):
        tokens: list[NDArray[Any]] = []
        trained: list[NDArray[Any]] = []
        sizes: list[int] = []
        encoded = tokenizer.encode_placed([chat.text for chat in batch])
        for chat, (ids, starts) in zip(batch, encoded, strict=True):
            learnt = np.zeros(len(ids), dtype=np.uint8)
            for start, stop in chat.learnt:
                learnt |= (starts >= start) & (starts < stop)
            tokens += [ids, np.array(end, dtype=tokenizer.dtype)]
            trained += [learnt, np.zeros(len(end), dtype=np.uint8)]
            sizes.append(len(ids) + len(end))
        joined = np.concatenate(tokens, dtype=tokenizer.dtype, casting="unsafe")
        num_bytes = sum(chat.num_bytes for chat in batch)
        yield TokenBatch(joined, np.cumsum(sizes), num_bytes, np.concatenate(trained))


def _batches(texts: Iterable[Text]) -> Iterator[list[Text]]:
    """Texts in groups worth one call of the tokenizer, which works on a group with all cores."""
    batch: list[Text] = []
    size = 0
    for piece in texts:
        batch.append(piece)
        size += piece.num_bytes
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pack(batch: list[Piece], tokenizer: Tokenizer, begins: bool) -> TokenBatch:
    """The tokens of pieces, of which the first one `begins` a document or goes on with the last one before it."""
    end = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
    beginning, ending = (np.array(ids, dtype=tokenizer.dtype) for ids in (tokenizer.beginning, end))
    parts: list[NDArray[Any]] = []
    ends: list[int] = []
    size = 0
    for piece, tokens in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
        own = [*([beginning] if begins else []), tokens, *([ending] if piece.ends_document else [])]
        parts += own
        size += sum(map(len, own))
        if begins := piece.ends_document:
            ends.append(size)
    joined = np.concatenate(parts, dtype=tokenizer.dtype, casting="unsafe")
    return TokenBatch(joined, np.array(ends, dtype=np.int64), sum(piece.num_bytes for piece in batch))


def _encode_bytes(texts: Sequence[str]) -> list[NDArray[Any]]:
    return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


def _loaded(path: Path) -> tuple[Any, str]:
    """A tokenizer.json as the package tokenizers has it, and the hash of the file. Raises BadInput."""
    try:
        check_regular(path, "a tokenizer")
        with path.open("rb") as file:
            content = file.read(_MOST_FILE_BYTES + 1)
    except OSError as error:
        raise BadInput(
            f"{path}: the tokenizer cannot be read ({error.strerror}). Give `bytes` or the path of a tokenizer.json "
            "(in a job, relative to the job file)."
        ) from None
    if len(content) > _MOST_FILE_BYTES:
        raise BadInput(f"{path}: is longer than {_MOST_FILE_BYTES:,} bytes; that is no tokenizer.json. Check the path.")
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise BadInput(
            f"{path}: a tokenizer.json needs the package tokenizers: pip install 'hethub[train]'. `bytes` needs nothing."
        ) from None
    try:
        loaded = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # noqa: BLE001  the Rust binding raises plain Exception for every malformed file
        raise BadInput(f"{path}: this is no tokenizer.json that the package tokenizers can read: {error}.") from None
    # What a file says about padding and truncation is meant for single prompts; here it would cut or fill documents.
    loaded.no_padding()
    loaded.no_truncation()
    return loaded, hashlib.sha256(content).hexdigest()


def _from_file(path: Path) -> Tokenizer:
    loaded, file_hash = _loaded(path)

    def encodings(texts: Sequence[str], *, special: bool = False) -> list[Any]:
        try:
            return list(loaded.encode_batch(list(texts), add_special_tokens=special))
        except Exception as error:  # noqa: BLE001  of the Rust binding; a vocabulary without its own unknown token, say
            raise BadInput(f"{path}: this tokenizer cannot encode the text: {error}. Choose another.") from None

    def encode(texts: Sequence[str]) -> list[NDArray[Any]]:
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings(texts)]

    def encode_placed(texts: Sequence[str]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        return [
            (np.array(found.ids, dtype=np.uint32), np.array([start for start, _ in found.offsets], dtype=np.int64))
            for found in encodings(texts)
        ]

    beginning: tuple[int, ...] = ()
    if loaded.num_special_tokens_to_add(False):
        (any_text,) = encodings(["a"], special=True)
        added = takewhile(lambda pair: pair[1], zip(any_text.ids, any_text.special_tokens_mask, strict=True))
        beginning = tuple(token for token, _ in added)
    named = special_token(tokenizer_config(path.parent), "eos_token")
    ends = (loaded.token_to_id(token) for token in (named, *END_OF_DOCUMENT_TOKENS))
    vocabulary = loaded.get_vocab(with_added_tokens=True)
    return Tokenizer(
        name=str(path),
        identity=_identity(vocabulary),
        file=file_hash,
        vocab=1 + max(vocabulary.values(), default=0),
        end_of_document=next((end for end in ends if end is not None), None),
        encode=encode,
        beginning=beginning,
        encode_placed=encode_placed,
        decode=lambda ids: str(loaded.decode(list(ids))),
    )
