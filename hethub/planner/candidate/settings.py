"""What the search enumerates: TP degrees, micro-batches and recompute by device type, and the lines of units that they
form."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod

from hethub.planner.problem.problem import Problem, Unit

MOST_DEGREES = 1024  # choices of a TP degree for every device type


@dataclass(frozen=True)
class Line:
    """How units line up into stages of `replicas` each: device type after device type in `order`, or side by side, where every stage
    holds the same mixture of device types."""

    order: tuple[int, ...]
    replicas: int
    side_by_side: bool = False

    def units(self, problem: Problem, degrees: tuple[int, ...]) -> tuple[Unit, ...]:
        """The units from the first stage to the last."""
        own = [problem.units(device_type, degrees[device_type]) for device_type in self.order]
        if not self.side_by_side:
            return tuple(unit for units in own for unit in units)
        stages = sum(map(len, own)) // self.replicas
        runs = [len(units) // stages for units in own]
        return tuple(
            unit
            for s in range(stages)
            for units, run in zip(own, runs, strict=True)
            for unit in units[s * run : (s + 1) * run]
        )


def orders(problem: Problem) -> list[tuple[int, ...]]:
    """Orders of the device types along the pipeline: by speed and by memory, both ways."""
    device_types = range(len(problem.device_types))
    precision = problem.batch.precision
    by_speed = sorted(device_types, key=lambda k: problem.device_types[k].accelerator.peak_flops(precision))
    by_memory = sorted(device_types, key=lambda k: problem.device_types[k].memory_bytes)
    return list(dict.fromkeys(tuple(o) for one in (by_speed, by_memory) for o in (one, one[::-1])))


def degrees_by_device_type(problem: Problem) -> list[list[int]]:
    """The TP degrees to choose from for each device type, powers of two that its machines can hold."""
    fixed = problem.constraints.tp
    return [[fixed] if fixed else problem.degrees_of(device_type) for device_type in range(len(problem.device_types))]


def degree_choices(problem: Problem) -> list[tuple[int, ...]]:
    """TP degrees per device type: every choice, or of very many those of one degree for all and one device type with another."""
    own = degrees_by_device_type(problem)
    if prod(map(len, own)) <= MOST_DEGREES:
        return list(product(*own))
    alike = [
        tuple(max(d for d in some if d <= most) for some in own) for most in sorted({d for some in own for d in some})
    ]
    others = (
        (*base[:device_type], degree, *base[device_type + 1 :])
        for base in alike
        for device_type, some in enumerate(own)
        for degree in some
    )
    return list(dict.fromkeys((*alike, *others)))


MOST_UNLIKE = 16  # accelerators: beyond, all device types start with one micro-batch and differ by local search only
MOST_UNLIKE_KINDS = 7  # the same


def micro_batch_choices(problem: Problem) -> list[tuple[int, ...]]:
    """Micro-batches per device type, none larger than its ranks measured to fit. On small clusters device types may have unlike ones,
    up to four times apart."""
    device_types, sizes = len(problem.device_types), problem.micro_batches
    if device_types == 1 or device_types > MOST_UNLIKE_KINDS or problem.size > MOST_UNLIKE:
        return _fitting(problem, ((size,) * device_types for size in sizes))
    parts = (1, 2, 4) if device_types == 2 or problem.size <= 4 else (1, 2)
    unlike = (
        tuple(size // part for part in chosen) for size in sizes for chosen in product(parts, repeat=device_types)
    )
    return _fitting(problem, (choice for choice in unlike if set(choice) <= set(sizes)))


def _fitting(problem: Problem, choices: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(tuple(problem.at_most(k, b) for k, b in enumerate(choice)) for choice in choices))
