"""One thing that was checked on a device, as a row of a table."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["pass", "fail", "note", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was checked and where, how it went, what was found, and of a row that did not pass the reason.

    A note was measured and has nothing to be held against, or differs in a way that is allowed.
    """

    what: str
    where: str
    state: State
    found: str = ""
    reason: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
