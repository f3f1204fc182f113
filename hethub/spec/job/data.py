"""The job file's `data` and `eval`: where tokens come from, and on which of them the loss is taken."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_serializer, model_validator

from hethub.spec.base import Spec
from hethub.spec.errors import BrokenRule
from hethub.spec.model import Count

SourceName = Literal["python-stdlib", "text", "jsonl", "tokens", "parquet", "hf", "chat"]


class SourceSpec(Spec):
    """One source of tokens. `path` is relative to the job file; `python-stdlib` needs none."""

    source: SourceName = "python-stdlib"  # see docs/data.md
    path: str | None = None  # a file or a folder
    # The column of parquet and hf, or the key of jsonl, that holds the text (None: text); of chat the messages.
    text: str | None = None

    @model_validator(mode="after")
    def _path_where_needed(self) -> Self:
        if (self.path is None) != (self.source == "python-stdlib"):
            raise BrokenRule(
                f"source {self.source} needs one, the file or folder to read."
                if self.path is None
                else "source python-stdlib reads the interpreter's own files; remove it, or choose another source.",
                "path",
            )
        if self.text is not None and self.source not in ("jsonl", "parquet", "hf", "chat"):
            raise ValueError(f"source {self.source} has no columns or keys; remove `text`, or choose another source.")
        return self

    @property
    def column(self) -> str:
        return self.text or ("messages" if self.source == "chat" else "text")


class WeightedSourceSpec(SourceSpec):
    """A source among others, and its share of the samples beside theirs."""

    weight: float = 1.0  # The source's share of the samples beside the others' weights; only ratios count.

    @field_validator("weight")
    @classmethod
    def _gives_samples(cls, weight: float) -> float:
        if weight <= 0:
            raise ValueError(
                f"weight {weight:g} gives no samples of this source; take the source out, or give it a weight above 0."
            )
        return weight


class DataSpec(SourceSpec):
    """Where tokens come from: one source, or several weighted ones with one tokenizer."""

    # Several sources mixed by weight, in place of `source`, `path` and `text`; null: that one source.
    sources: Annotated[tuple[WeightedSourceSpec, ...], Field(min_length=1)] | None = None
    tokenizer: str = "bytes"  # bytes, or a tokenizer.json; of a model given as hf: its folder's
    document_mask: bool = False  # attention stays inside each document
    bos: bool = True  # documents of text begin with the tokenizer's begin-of-text token, if it has one

    @model_validator(mode="before")
    @classmethod
    def _one_or_several(cls, data: Any) -> Any:
        has_several = isinstance(data, Mapping) and data.get("sources") is not None
        if has_several and (given := [key for key in SourceSpec.model_fields if key in data]):
            names, them = " and ".join(f"`{key}`" for key in given), "them" if given[1:] else "it"
            text = f"{names} cannot stand beside `sources`. Take {them} out, or into an entry of `sources`; or take `sources` out."
            raise BrokenRule(text, given[0])
        return data

    @model_validator(mode="after")
    def _each_once(self) -> "DataSpec":
        named = [(each.source, each.path and Path(each.path), each.column) for each in self.weighted]
        if doubled := next((name for name in named if named.count(name) > 1), None):
            raise ValueError(
                f"sources names {doubled[0]} {doubled[1] or ''} twice; name it once with the sum of its weights."
            )
        return self

    @model_serializer(mode="wrap")
    def _without_defaults_beside_sources(self, dump: Callable[[Self], dict[str, Any]]) -> dict[str, Any]:
        """What can be read again: the default source stands beside no others."""
        own = {} if self.sources is None else SourceSpec.model_fields
        return {key: value for key, value in dump(self).items() if key not in own}

    @property
    def weighted(self) -> tuple[WeightedSourceSpec, ...]:
        """Every source with its weight."""
        if self.sources is not None:
            return self.sources
        return (WeightedSourceSpec(source=self.source, path=self.path, text=self.text),)


class EvalSpec(Spec):
    """When the loss on held-out samples is taken, on how many batches, and of what data."""

    every_steps: Count = 100  # and behind the last step
    batches: Count = 8  # global batches that an evaluation takes
    data: DataSpec  # held-out samples; tokenizer, bos and document_mask are the job's
