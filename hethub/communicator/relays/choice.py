"""Which relay carries a message: by whether its two ranks share a host, and by its size.

`auto` takes shared memory inside a host. Between hosts it takes Gloo's TCP, and where mpirun has started all ranks it
times both at start and gives MPI the sizes at which it is clearly faster. A choice is data: it is stored with a run
and taken up again when the run is resumed, so that a resumed run communicates as the first one did.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from hethub.communicator.relays.relay import Relay
from hethub.spec.errors import BadInput
from hethub.spec.network import RelayName

RELAYS = ("auto", *get_args(RelayName))
PROBED_BYTES = (64 << 10, 4 << 20)
CLEARLY_FASTER = 1.2

Thresholds = tuple[tuple[int, str], ...]
"""(bytes, relay) in ascending order: the relay carries messages from that size on; the first begins at 0."""


@dataclass(frozen=True, kw_only=True)
class RelayChoice:
    """The relay by size, inside a host and between hosts."""

    near: Thresholds
    far: Thresholds

    @classmethod
    def always(cls, near: str, far: str) -> "RelayChoice":
        return cls(near=((0, near),), far=((0, far),))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RelayChoice":
        """The choice of `to_dict`. Raises BadInput where it is not one."""
        levels = {}
        for level in ("near", "far"):
            rows = tuple((int(start), str(name)) for start, name in data[level])
            known = all(name in RELAYS[1:] for _, name in rows)
            if not rows or rows[0][0] != 0 or list(rows) != sorted(rows) or not known:
                raise BadInput(
                    f"the relays {data[level]} are no list of [bytes, relay] in ascending order from 0 on, with relays"
                    f" out of {', '.join(RELAYS[1:])}."
                )
            levels[level] = rows
        return cls(**levels)

    def to_dict(self) -> dict[str, Any]:
        return {"near": [list(row) for row in self.near], "far": [list(row) for row in self.far]}

    def names(self, *, far: bool) -> set[str]:
        return {name for _, name in (self.far if far else self.near)}


def check_relay(name: str) -> str:
    """The name. Raises BadInput if there is no such relay."""
    if name not in RELAYS:
        raise BadInput(
            f"communicator.relay (in a program HETHUB_RELAY) is {name!r}; choose one of {', '.join(RELAYS)}."
        )
    return name


def faster_by_size(seconds: Mapping[str, Sequence[float]]) -> Thresholds:
    """Gloo, and MPI from the smallest probed size on from which it is clearly faster at all larger ones too.

    `seconds` gives each relay's times of `PROBED_BYTES`.
    """
    start = None
    for size, gloo, mpi in reversed(list(zip(PROBED_BYTES, seconds["gloo"], seconds["mpi"], strict=True))):
        if mpi * CLEARLY_FASTER > gloo:
            break
        start = size
    if start is None:
        return ((0, "gloo"),)
    return ((0, "mpi"),) if start == PROBED_BYTES[0] else ((0, "gloo"), (start, "mpi"))


class Carriers:
    """The relays to one peer, by size. Both ranks know a message's size, so they take the same one."""

    def __init__(self, thresholds: Thresholds, relays: Mapping[str, Relay]) -> None:
        self._relays = [(start, relays[name]) for start, name in reversed(thresholds)]
        self._only = self._relays[0][1] if len(self._relays) == 1 else None

    def carrier(self, num_bytes: int) -> Relay:
        """The relay for a message of that size."""
        return self._only or next(relay for start, relay in self._relays if num_bytes >= start)

    @property
    def names(self) -> set[str]:
        return {relay.name for _, relay in self._relays}

    def __iter__(self) -> Iterator[Relay]:
        return (relay for _, relay in self._relays)
