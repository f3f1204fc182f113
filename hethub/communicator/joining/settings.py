"""How the ranks of a world are to communicate: what each was told, which must be the same on all."""

from collections.abc import Mapping, Sequence

from hethub.spec.errors import BadInput

_VARIABLES = {
    "islands": "HETHUB_ISLANDS",
    "relay": "HETHUB_RELAY",
    "wire": "HETHUB_WIRE",
    "debug": "HETHUB_DEBUG",
    "staged_ranks": "HETHUB_STAGED_RANKS",
}
"""What a program that only calls `init_process_group` sets in the environment."""


def is_on(variable: str, environment: Mapping[str, str]) -> bool:
    """Whether the variable is 1; 0 or empty, or none, is off. Raises BadInput on anything else, `yes` for one."""
    value = environment.get(variable, "")
    if value not in ("", "0", "1"):
        raise BadInput(f"{variable} is {value!r}; set it to 1 (on) or 0 (off).")
    return value == "1"


def as_told(
    *,
    islands: Sequence[Sequence[int]] | None,
    relay: str,
    wire: str,
    timeout_seconds: float,
    debug: bool,
    num_lanes: int,
    staged_ranks: Sequence[int],
) -> dict[str, str]:
    """Each setting as a text that is equal where it means the same."""
    return {
        "islands": "none given" if islands is None else "|".join(",".join(map(str, sorted(one))) for one in islands),
        "relay": relay,
        "wire": wire,
        "timeout": f"{timeout_seconds:g} s",
        "debug": "1" if debug else "0",
        "lanes": str(num_lanes),
        "staged_ranks": ",".join(map(str, sorted(staged_ranks))) or "none",
    }


def first_difference(ranks: Sequence[tuple[str, dict[str, str]]]) -> str | None:
    """A sentence naming two ranks that were told otherwise, each given as where it is and what it was told.

    Their messages would not fit: ranks wait for one another without end, or read numbers in a format that they are not in.
    """
    (first_place, first), *others = ranks
    for place, other in others:
        for setting, told in first.items():
            if other[setting] != told:
                variable = _VARIABLES.get(setting)
                where = f" ({variable}, where the environment says it)" if variable else ""
                return (
                    f"{setting} differs: {first_place} has {told}, {place} has {other[setting]}. Set it alike on all"
                    f" ranks{where}."
                )
    return None
