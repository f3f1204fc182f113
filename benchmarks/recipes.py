"""What `auto` plans beside what people ran: the published layouts of measured steps, by the same predictor.

    python benchmarks/recipes.py [DATA] [--most ACCELERATORS] [--only TEXT]

DATA holds `measured_steps.csv` and `measured_steps_2.csv` (default ../shared/data). A question is a cluster, a model, a
batch, a sequence length and a precision; its recipes are the rows that answer it. Both sides are plans of hethub's
runtime, priced by the mean over the planner's scenarios (J): `auto` should be below every recipe that fits. A line for
each question; then counts, the questions that `auto` loses, and how much `auto` claims to win. Where it claims more than
a fifth, it is asked again with the recipe's recompute: programs before fused attention had no room without.

Left out, and counted: rows with context parallelism, which no plan has; recipes that do not bind or do not fit in
memory under hethub's runtime. Products in fp8 and fp4 are asked for in bf16, which is what a plan has.
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hethub.planner import PlanResult, plan  # noqa: E402
from hethub.planner.evaluate.outlook import Outlooks  # noqa: E402
from hethub.planner.problem.pose import pose  # noqa: E402
from hethub.planner.problem.problem import Batch, Problem  # noqa: E402
from hethub.predictor import rank_memory  # noqa: E402
from hethub.predictor.calibration.sources.training_steps import Case, read_table  # noqa: E402
from hethub.predictor.memory.ranks import all_fit  # noqa: E402
from hethub.spec.errors import BadInput  # noqa: E402
from hethub.spec.job import ConstraintsSpec  # noqa: E402
from hethub.spec.layout.bind import bind  # noqa: E402
from hethub.spec.plan import PlanSpec  # noqa: E402

TABLES = ("measured_steps.csv", "measured_steps_2.csv")
SAME = 1e-3  # J that differs by less is equal
MUCH = 0.2  # of the recipe's step
Key = tuple[str, int, str, int, int, str]


class Recipe(NamedTuple):
    """A published layout as a plan, and its J."""

    plan: PlanSpec
    seconds: float


class Answer(NamedTuple):
    """J of `auto` and of the best recipe of a question; of `auto` with that recipe's recompute, where it won by much."""

    key: Key
    auto: float
    recipe: float
    alike: float | None

    @property
    def gain(self) -> float:
        """By which part of the recipe's step `auto` is faster."""
        return 1.0 - self.auto / self.recipe

    @property
    def gain_alike(self) -> float:
        """The same, with the recipe's recompute where the gain is large."""
        return self.gain if self.alike is None else 1.0 - self.alike / self.recipe


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--most", type=int, default=100_000, help="leave larger clusters out")
    parser.add_argument("--only", default="", help="questions whose line holds this text")
    options = parser.parse_args()
    left_out, answers = Counter[str](), list[Answer]()
    for key, cases in questions(options.data, left_out).items():
        if key[1] <= options.most and options.only in str(key):
            answers += answered(key, cases, left_out)
    return report(answers, left_out)


def questions(data: Path, left_out: Counter[str]) -> dict[Key, list[Case]]:
    """The rows by what they answer, those without context parallelism."""
    found = defaultdict[Key, list[Case]](list)
    for case in (case for name in TABLES for case in read_table(data / name)[0] if not case.suspect):
        if case.software.context_parallel > 1:
            left_out["rows with context parallelism"] += 1
            continue
        layout, given = case.layouts[0], case.layouts[0].plan
        name = layout.cluster.places[0].accelerator.name
        size = len(layout.cluster.places)
        found[name, size, layout.model.name, given.global_batch, given.seq_len, given.precision].append(case)
    return dict(found)


def answered(key: Key, cases: list[Case], left_out: Counter[str]) -> Iterator[Answer]:
    """The question's answer, unless no recipe of its can be a plan here."""
    layout = cases[0].layouts[0]
    model, cluster, batch = layout.model, layout.cluster, Batch(key[3], key[4], layout.plan.precision)
    problem = pose(model, cluster, batch)
    recipes = [recipe for case in cases for recipe in priced(case, problem, left_out)]
    if not recipes:
        left_out["questions without a recipe that is a plan here"] += 1
        return
    best = min(recipes, key=lambda recipe: recipe.seconds)
    found = best_plan(problem)
    auto, alike = found.outlook.objective_seconds if found else float("inf"), None
    if auto < (1 - MUCH) * best.seconds:
        again = best_plan(problem, recompute=best.plan.stages[0].recompute)
        alike = again.outlook.objective_seconds if again else float("inf")
    answer = Answer(key, auto, best.seconds, alike)
    same = "" if alike is None else f", {100 * answer.gain_alike:+.1f} % with its recompute"
    print(f"{' '.join(map(str, key))}: auto {auto:.4g} s, best of {len(recipes)} recipes {best.seconds:.4g} s, "
          f"{100 * answer.gain:+.1f} %{same} | {described(found.plan) if found else ''} | {described(best.plan)}", flush=True)  # fmt: skip
    yield answer


def best_plan(problem: Problem, **constraints: Any) -> PlanResult | None:
    """The answer of `auto`; None where nothing fits."""
    try:
        given = ConstraintsSpec(**constraints)
        return plan(problem.model, problem.cluster, problem.batch, given, with_bounds=False, top=0)
    except BadInput:
        return None


def described(given: PlanSpec) -> str:
    """A plan by its first stage and their number."""
    stage = given.stages[0]
    replica = stage.replicas[0]
    modes = "/".join((f"zero {stage.zero}", stage.recompute, *stage.offload))
    return f"{given.schedule} pp {len(given.stages)} dp {len(stage.replicas)} tp {replica.tp} mb {replica.micro_batch} {modes}"


def priced(case: Case, problem: Problem, left_out: Counter[str]) -> Iterator[Recipe]:
    """A row's plans that bind and fit."""
    outlooks = Outlooks(problem)
    for layout in case.layouts:
        try:
            given = bind(interleaved(layout.plan, case.software.interleave), problem.model, problem.cluster)
            used = rank_memory(given)
        except (BadInput, ValueError):
            left_out["recipes that do not bind"] += 1
            continue
        if not all_fit(given, used, problem.constraints.reserve):
            left_out["recipes that do not fit in memory"] += 1
            continue
        yield Recipe(given.plan, outlooks.of(given.plan).objective_seconds)


def interleaved(given: PlanSpec, chunks: int) -> PlanSpec:
    """The plan with so many chunks of layers on every stage, in turns, if it has equally large ones."""
    layers, stages = given.num_layers, len(given.stages)
    size = layers // (chunks * stages)
    whole = PlanSpec.model_validate(given.model_dump())
    if chunks == 1 or stages == 1 or size * chunks * stages != layers:
        return whole
    starts = [[size * (chunk * stages + stage) for chunk in range(chunks)] for stage in range(stages)]
    split = [
        stage.replace(layers=tuple((start, start + size) for start in own))
        for stage, own in zip(whole.stages, starts, strict=True)
    ]
    return whole.replace(stages=tuple(split), schedule="interleaved")


def report(answers: list[Answer], left_out: Counter[str]) -> int:
    """Prints what came of all questions; 1 where `auto` loses one."""
    lost = sorted((answer for answer in answers if answer.gain < -SAME), key=lambda answer: answer.gain)
    print(f"{len(answers)} questions, auto slower than a recipe in {len(lost)}")
    for answer in lost:
        print(f"  {' '.join(map(str, answer.key))}: {-100 * answer.gain:.1f} % of the recipe's step slower")
    if answers:
        for what, gains in (
            ("gain over the best recipe", [answer.gain for answer in answers]),
            ("with the recipe's recompute where it is above 20 %", [answer.gain_alike for answer in answers]),
        ):
            print(f"{what}: median {100 * median(gains):.1f} %, above 20 % in {sum(gain > MUCH for gain in gains)}")
    print("left out: " + "; ".join(f"{count} {what}" for what, count in left_out.items()))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
