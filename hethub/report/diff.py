"""What differs between two plans, and what it costs: found, and shown on the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from hethub.predictor import predict
from hethub.predictor.cost.profile import ProfileSpec, assumed_speeds
from hethub.predictor.cost.software import hethub_software
from hethub.predictor.memory.ranks import shortage
from hethub.report.program import NO_ROOM
from hethub.report.tables import assumed_sentence
from hethub.runtime.console import make_console, make_table
from hethub.spec.base import Spec, show_gib
from hethub.spec.layout.bind import Layout
from hethub.spec.plan import PlanSpec, ReplicaSpec, StageSpec
from hethub.spec.program import ProgramFor, ProgramPlanSpec, module_rows, prediction_of, show_ratios
from hethub.spec.ranges import show_ranks


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One key of the plans with both values, `stages[1].recompute` for example; None where a plan has no such stage."""

    key: str
    first: str | None
    second: str | None


@dataclass(frozen=True, kw_only=True)
class PlanDiff:
    """Differences of two plans and what is predicted of each. `slower_percent` is the second's time over the first's,
    for a step or, where their batches differ, for a token; None between unlike models."""

    differences: tuple[Difference, ...]
    step_seconds: tuple[float, float]
    breakdowns: tuple[Mapping[str, float], Mapping[str, float]]
    memory_bytes: tuple[int, int]  # of the fullest rank
    short: tuple[str | None, str | None]  # why a plan does not fit
    tokens_per_second: tuple[float, float]
    assumed_speeds: tuple[str, ...]
    """The accelerators of either whose speed the catalogue assumes."""

    @property
    def unlike_models(self) -> bool:
        """Whether tokens of the two cost unlike work, so that neither is faster. Of programs the name alone is known."""
        by_key = {difference.key: difference for difference in self.differences}
        width = by_key.get("job.model.hidden")  # every model that is described has one
        if width is not None and None in (width.first, width.second):
            return "model" in by_key
        return "model" in by_key or any(key.startswith("job.model.") for key in by_key)

    @property
    def unlike_batches(self) -> bool:
        return any(difference.key in ("global_batch", "seq_len") for difference in self.differences)

    @property
    def slower_percent(self) -> float | None:
        if self.unlike_models:
            return None
        first, second = self.tokens_per_second
        return 100.0 * (first / second - 1.0)

    def parts(self) -> dict[str, float]:
        """Seconds that each part of the step takes longer in the second plan."""
        first, second = self.breakdowns
        return {part: second.get(part, 0.0) - first.get(part, 0.0) for part in {**first, **second}}

    def to_dict(self) -> dict[str, Any]:
        return {
            "differences": [vars(difference) for difference in self.differences],
            "step_seconds": list(self.step_seconds),
            "slower_percent": self.slower_percent,
            "parts": self.parts(),
            "memory_bytes": list(self.memory_bytes),
            "fits": [short is None for short in self.short],
            "shortage": list(self.short),
            "tokens_per_second": list(self.tokens_per_second),
            "assumed_speeds": list(self.assumed_speeds),
        }


class Side(NamedTuple):
    """A plan as it is compared: every key with its value and how it is shown, and what is predicted of the plan."""

    keys: Mapping[str, tuple[object, str]]
    step_seconds: float
    breakdown: Mapping[str, float]
    memory_bytes: int
    short: str | None
    tokens_per_second: float
    assumed_speeds: tuple[str, ...]


def diff(one: Side, two: Side) -> PlanDiff:
    """What differs between two plans. A plan of strategy hap shares batch and cluster with a plan of layers."""
    differences = []
    for key in {**one.keys, **two.keys}:
        (a, a_text), (b, b_text) = one.keys.get(key, _ABSENT), two.keys.get(key, _ABSENT)
        if a != b:
            texts = (a_text, b_text) if a_text != b_text else (str(a), str(b))  # alike where only digits differ
            differences.append(Difference(key=key, first=texts[0], second=texts[1]))
    return PlanDiff(
        differences=tuple(differences),
        step_seconds=(one.step_seconds, two.step_seconds),
        breakdowns=(one.breakdown, two.breakdown),
        memory_bytes=(one.memory_bytes, two.memory_bytes),
        short=(one.short, two.short),
        tokens_per_second=(one.tokens_per_second, two.tokens_per_second),
        assumed_speeds=tuple(dict.fromkeys((*one.assumed_speeds, *two.assumed_speeds))),
    )


_ABSENT = (None, None)


def print_diff(result: PlanDiff) -> None:
    """What differs between two plans, and the seconds that it costs."""
    console = make_console()
    table = make_table("key", "first", "second")
    for difference in result.differences:
        table.add_row(difference.key, difference.first or "", difference.second or "")
    console.print(table if result.differences else "the plans are equal")
    console.print(_speeds(result))
    first = result.step_seconds[0]
    parts = {part: seconds for part, seconds in result.parts().items() if abs(seconds) > 1e-6 * first}
    if parts and not result.unlike_models:
        console.print(f"of which {', '.join(f'{part} {seconds:+.4g} s' for part, seconds in parts.items())}")
    console.print(f"the fullest rank needs {' and '.join(map(show_gib, result.memory_bytes))} GiB")
    for which, short in zip(("first", "second"), result.short, strict=True):
        if short is not None:
            console.print(f"the {which} does not fit: {short}")
    if result.assumed_speeds:
        console.print(assumed_sentence(result.assumed_speeds))


def _speeds(result: PlanDiff) -> str:
    """Both steps, and which plan is the faster one where that can be said."""
    first, second = result.step_seconds
    rates, slower = result.tokens_per_second, result.slower_percent
    asked = f"step {first:.4g} s and {second:.4g} s"
    if slower is None:
        return f"{asked} of unlike models: neither is called faster"
    if result.unlike_batches:
        asked += f" of unlike batches, {rates[0]:,.0f} and {rates[1]:,.0f} tokens/s"
    faster = 100.0 * (1.0 / (1.0 + slower / 100.0) - 1.0)  # as a rate, as `plan --explain` says it
    beside = f"the second is {slower:.1f} % slower" if slower > 0 else f"the second is {faster:.1f} % faster"
    return f"{asked}: {beside if abs(slower) >= 0.05 else 'both are as fast'}"


def side_of_layout(layout: Layout, compiles: bool | None, reserve: float, profile: ProfileSpec | None = None) -> Side:
    """Every key of a plan, its model and its cluster; `compiles` and `reserve` are its job's, `profile` counts instead of
    estimates. Raises BadInput as `predict` does."""
    keys = _plain(layout.plan, set(PlanSpec.model_fields) - {"version", "stages", "job"})
    for index, stage in enumerate(layout.plan.stages):
        texts = describe_stage(stage)
        keys |= {f"stages[{index}].{key}": (getattr(stage, key), texts[key]) for key in StageSpec.model_fields}
    model = layout.model  # as it is, whether its file says so or leaves it to a default
    model = model.replace(kv_heads=model.num_kv_heads, head_dim=model.head_size, gated=model.is_gated)
    keys |= _described("model", model) | _described("cluster", layout.cluster)
    keys |= {"job.compile": (compiles, str(compiles)), "job.reserve": (reserve, str(reserve))}
    found = predict(layout, reserve=reserve, profile=profile, software=hethub_software(compiles))
    most, short = max(entry.bytes for entry in found.memory), shortage(layout, found.memory, reserve)
    assumed = assumed_speeds(layout.cluster, layout.plan.precision, profile, layout.plan.ranks)
    return Side(keys, found.step_seconds, found.breakdown, most, short, found.tokens_per_second, tuple(assumed))


def side_of_program(plan: ProgramPlanSpec, made_for: ProgramFor) -> Side:
    """A program: its ratios, how each module is cut and what it exchanges, how each parameter is kept."""
    program, found = plan.program, prediction_of(plan, made_for)
    keys = _plain(plan, {"strategy", "model", "cluster", "global_batch", "seq_len", "precision"})
    keys["program.fingerprint"] = (program.fingerprint, program.fingerprint)
    keys |= {f"program.ratios.{name}": (parts, show_ratios(parts)) for name, parts in program.ratios.items()}
    for row in module_rows(program):
        exchanged = ", ".join(f"{count} {kind}" for kind, count in row.collectives.items()) or "nothing"
        text = f"cut by {', '.join(row.cuts) or 'nothing'}; exchanges {exchanged}"
        keys[f"program[{row.module or 'the model itself'}, {row.direction}]"] = (text, text)
    keys |= {f"program.parameters.{name}": (state, state) for name, state in program.parameters.items()}
    keys |= _described("cluster", made_for.cluster)
    keys["job.reserve"] = (made_for.reserve, str(made_for.reserve))
    tokens = plan.global_batch * plan.seq_len / found["step_seconds"]
    most, assumed = max(program.memory_bytes), assumed_speeds(made_for.cluster, plan.precision, None)
    short = None if found["fits"] else NO_ROOM
    return Side(keys, found["step_seconds"], found["breakdown"], most, short, tokens, tuple(assumed))


def _plain(spec: Spec, names: set[str]) -> dict[str, tuple[object, str]]:
    """Those of a spec's own fields, in its order."""
    return {
        name: (value, str(value))
        for name in type(spec).model_fields
        if name in names
        for value in [getattr(spec, name)]
    }


def _described(name: str, spec: Spec) -> dict[str, tuple[object, str]]:
    """The leaves of a model or cluster but for its name, which the plan has too."""
    flat = _flat(spec.to_dict(), f"job.{name}")
    return {key: (leaf, str(leaf)) for key, leaf in flat.items() if key != f"job.{name}.name"}


def _flat(value: Any, key: str) -> dict[str, Any]:
    """The leaves of nested data by their dotted keys."""
    if isinstance(value, Mapping):
        return {inner: leaf for name, each in value.items() for inner, leaf in _flat(each, f"{key}.{name}").items()}
    if isinstance(value, list):
        return {inner: leaf for i, each in enumerate(value) for inner, leaf in _flat(each, f"{key}[{i}]").items()}
    return {key: value}


def describe_stage(stage: StageSpec) -> dict[str, str]:
    """A stage's keys as short text."""
    shares = ", ".join(f"{rank}: {share:.4g}" for rank, share in stage.state_shares.items())
    return {key: str(getattr(stage, key)) for key in StageSpec.model_fields} | {
        "layers": stage.layers_text,
        "replicas": describe_replicas(stage),
        "state_shares": shares or "equal",
        "offload": ", ".join(stage.offload) or "none",
    }


def describe_replicas(stage: StageSpec) -> str:
    """Replicas with equal ones together: `8 x TP 2 (ranks 0-15), 4 x 64 samples`."""
    alike = groupby(stage.replicas, key=lambda r: (r.tp, r.micro_batch, r.samples, r.in_flight, r.tensor_shares))
    return "; ".join(_run(list(own)) for _, own in alike)


def _run(replicas: Sequence[ReplicaSpec]) -> str:
    first, ranks = replicas[0], [rank for replica in replicas for rank in replica.ranks]
    held = "" if first.in_flight is None else f", {first.in_flight} in flight"
    cut = "" if first.tensor_shares is None else f", cut {':'.join(f'{share:g}' for share in first.tensor_shares)}"
    given = f"{first.samples} samples in micro-batches of {first.micro_batch}"
    span = f"rank{'s' * (len(ranks) > 1)} {show_ranks(ranks)}"
    return f"{len(replicas)} x TP {first.tp} ({span}) with {given}{held}{cut}"
