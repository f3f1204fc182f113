"""What bytes occupy on their way, and ways between two ranks."""

from typing import NamedTuple

OUT, IN = "out", "in"
OF_RANKS = ("port", "staging")  # resources that the ranks of a machine do not share


class Resource(NamedTuple):
    """What bytes occupy, in one direction: kind, and which of them."""

    kind: str  # port, staging (of a rank); host, cards, bridge (of a machine); rack (by name); regions (from, to)
    owner: object
    way: str = OUT


class Link(NamedTuple):
    """A way between two ranks: seconds of an empty message and of each byte, one direction."""

    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_seconds + num_bytes * self.seconds_per_byte if num_bytes else 0.0


class Path(NamedTuple):
    """A way between two ranks that nobody else uses, and the resources on it."""

    alone: Link
    resources: tuple[Resource, ...]


def ends(kind: str, source: int, target: int) -> tuple[Resource, Resource]:
    """What a message leaves and what it enters."""
    return Resource(kind, source, OUT), Resource(kind, target, IN)
