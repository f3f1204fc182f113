"""The two ways a command ends badly, and nothing between them."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class BadInput(ValueError):
    """The user's input breaks a rule: one paragraph says what was given, which rule it broke and what to change.

    The command line prints the message and exits with 2; nothing has been written.
    """

    agreed = False  # raised on every rank of a job at the same point
    quiet = False  # another rank prints it
    key: tuple[str | int, ...] = ()  # that the message begins with, of a file which who raises it does not know

    @classmethod
    def about(cls, message: str, *key: str | int) -> "BadInput":
        error = cls(message)
        error.key = key
        return error


@contextmanager
def asked_by(path: Path | str, place: Callable[[tuple[str | int, ...]], str] | None = None) -> Iterator[None]:
    """BadInput about a question names the file that asks it, or the place in it, which who answers does not know; and the
    place of the key at fault, where `place` says that."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{place(error.key) if place is not None and error.key else path}: {error}") from None


class BrokenRule(ValueError):
    """What a spec's validator raises where keys do not go together: `key` is the path, in that spec, of the one to look
    at."""

    def __init__(self, text: str, *key: str | int) -> None:
        super().__init__(text)
        self.key = key


class RunFailed(RuntimeError):
    """Something outside the input failed (a peer, a link, a device): the message names rank, operation and peer.

    The command line prints the message and exits with 1.
    """

    agreed = False
    quiet = False
    again = False  # the same command would go on where this one has ended: exit code 75

    @classmethod
    def everywhere(cls, rank: int, message: str, *, speaker: int = 0) -> "RunFailed":
        """The failure that every rank finds alike at the same point; the rank `speaker` prints it."""
        error = cls(message)
        error.agreed, error.quiet = True, rank != speaker
        return error


@contextmanager
def after_writing() -> Iterator[None]:
    """Around work after files have been written: bad input that is found only there counts as a failure."""
    try:
        yield
    except BadInput as error:
        failed = RunFailed(str(error))
        failed.agreed, failed.quiet = error.agreed, error.quiet
        raise failed from error


def nearest(word: str, candidates: list[str] | tuple[str, ...]) -> str | None:
    """The shortest candidate that `word` begins, else the one that looks most like it, or None when none is close: long
    words share most letters by chance, so below 0.7 a part of one must begin a part of the other."""
    import difflib

    begun = [candidate for candidate in candidates if len(word) > 1 and candidate.lower().startswith(word.lower())]
    if begun:
        return min(begun, key=len)
    alike = difflib.get_close_matches(word, candidates, n=len(candidates) or 1, cutoff=0.6)
    surely = difflib.get_close_matches(word, alike, n=len(alike) or 1, cutoff=0.7)
    return next((each for each in alike if each in surely or _begin_alike(each, word)), None)


def suggest(word: str, candidates: list[str] | tuple[str, ...]) -> str:
    """The end of an error's sentence about an unknown `word`: the nearest candidate, else all of them."""
    close = nearest(word, candidates)
    return f"did you mean '{close}'?" if close else f"known: {', '.join(sorted(candidates))}."


def suggest_some(word: str, candidates: list[str] | tuple[str, ...]) -> str:
    """Do what `suggest` does, but with up to four candidates, for names that differ in details: first those that begin with
    `word`, then those that begin alike up to a hyphen, or share most of its words ("NVIDIA H100 80GB HBM3")."""
    import difflib

    folded, given = {candidate.lower(): candidate for candidate in candidates}, word.lower()
    begun = [name for name in sorted(folded, key=len) if len(word) > 1 and name.startswith(given)]
    headed = [name for name in folded if "-" in name and given.startswith(name.split("-")[0])]
    shared = {name: len(_words(name) & _words(given)) for name in folded}
    closest = max([1, *shared.values()])
    headed += [name for name in folded if shared[name] == closest and name not in headed]
    headed.sort(key=lambda name: -difflib.SequenceMatcher(None, given, name).ratio())
    alike = difflib.get_close_matches(given, list(folded), n=4, cutoff=0.6)
    near = [f"'{folded[name]}'" for name in dict.fromkeys([*begun, *headed, *alike])][:4]
    if not near:
        return f"known: {', '.join(sorted(candidates))}."
    return f"did you mean {either(near)}?"


def either(words: Sequence[str]) -> str:
    """One word or several, of which one is meant: "a, b or c"."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _begin_alike(one: str, other: str) -> bool:
    """Whether a word of one, of two letters and more, begins a word of the other."""
    pairs = [(a, b) for a in _words(one.lower()) for b in _words(other.lower()) if min(len(a), len(b)) > 1]
    return any(a.startswith(b) or b.startswith(a) for a, b in pairs)


def _words(name: str) -> set[str]:
    return {*re.split(r"[^a-z0-9]+", name)} - {""}
