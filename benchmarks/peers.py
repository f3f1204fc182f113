"""What `auto` plans beside what four other planners would, by hethub's predictor and by a judge that belongs to nobody.

    python benchmarks/peers.py [--only TEXT]

Peers: Metis and Sailor, their searches and cost formulas re-derived from their papers (tests/oracle/peers); Cephalo and
Zorse, which are families of hethub's planner. Questions: the mixed clusters x models of `planner.py`. A peer's plan is the
cheapest by its own formula that binds and fits in memory under hethub's runtime; where none of its KEPT_PLANS cheapest does,
it has none. Of each plan:

mean  the step's mean over the planner's scenarios, by which `auto` chooses; it must be no larger than a peer's
step  the predicted step; likewise
form  textbook formulas (tests/oracle/peers/closed_form.py); `auto` may be 5 % slower there, though it was made for another judge
rated the same formulas with the parts of data sheets that the predictor's fit gives accelerators and links in place of one half
      and all: no judge, but it tells whether a plan that is worse by `form` is so by rates alone

A line for every plan: the peer's seconds over `auto`'s, so above 1 `auto` is faster. Exits with 1 where something is missed;
the parts of the formula are printed there. Nothing here runs on an accelerator.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.planner import CASES, verdict  # noqa: E402
from benchmarks.recipes import described  # noqa: E402
from benchmarks.search_times import cluster_named, model_named  # noqa: E402
from hethub.planner import plan  # noqa: E402
from hethub.planner.estimate.estimator import Estimator  # noqa: E402
from hethub.planner.evaluate.outlook import Outlooks  # noqa: E402
from hethub.planner.problem.pose import pose  # noqa: E402
from hethub.planner.problem.problem import Batch, Problem  # noqa: E402
from hethub.predictor import predict, rank_memory  # noqa: E402
from hethub.predictor.cost.links import Network  # noqa: E402
from hethub.predictor.memory.ranks import all_fit  # noqa: E402
from hethub.spec.errors import BadInput  # noqa: E402
from hethub.spec.layout.bind import bind  # noqa: E402
from hethub.spec.plan import PlanSpec  # noqa: E402
from tests.oracle.peers import closed_form  # noqa: E402
from tests.oracle.peers.metis import metis  # noqa: E402
from tests.oracle.peers.questions import Draft, Question  # noqa: E402
from tests.oracle.peers.sailor import sailor  # noqa: E402

# Of a peer's seconds over auto's: what differs by less than a thousandth is equal, and the closed form may say 5 % more.
LEAST = {"mean": 0.999, "step": 0.999, "form": 1 / 1.05}
Search = Callable[[Question], Iterator[tuple[float, Draft]]]
SEARCHES: dict[str, Search] = {"metis": metis, "sailor": sailor}
FAMILIES = ("cephalo", "zorse")


class Judged(NamedTuple):
    """A plan's seconds by the three judges, and by the third with fitted rates."""

    plan: PlanSpec
    mean: float
    step: float
    form: closed_form.Step
    rated: float

    def __str__(self) -> str:
        form = self.form
        return (
            f"{form.seconds:.4g} s = max(pipeline {form.pipeline:.4g}, links {form.links:.4g}) + behind {form.behind:.4g}: "
            f"{described(self.plan)}, layers {[stage.num_layers for stage in self.plan.stages]}"
        )


class Pair(NamedTuple):
    """A peer's plan beside `auto`'s."""

    question: str
    peer: str
    own: Judged
    auto: Judged

    @property
    def ratios(self) -> tuple[float, float, float, float]:
        """The peer's seconds over auto's: mean, step, form, rated."""
        own, auto = self.own, self.auto
        return own.mean / auto.mean, own.step / auto.step, own.form.seconds / auto.form.seconds, own.rated / auto.rated


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="questions whose name holds this text")
    only = parser.parse_args().only
    pairs: list[Pair] = []
    for name, model, global_batch, seq_len, precision in CASES:
        if only in f"{name} {model}":
            problem = pose(model_named(model), cluster_named(name), Batch(global_batch, seq_len, precision))  # type: ignore[arg-type]
            pairs += compared(f"{name} {model}", problem)
    return report(pairs)


def compared(question: str, problem: Problem) -> Iterator[Pair]:
    """All peers beside `auto` on a question."""
    outlooks, rates = Outlooks(problem), fitted(problem)
    found = plan(problem.model, problem.cluster, problem.batch, with_bounds=False, top=0)
    auto = judged(found.plan, problem, outlooks, rates)
    print(f"{question}: auto {auto.mean:.4g} s mean, {auto.step:.4g} s step, form {auto}", flush=True)
    for peer in (*SEARCHES, *FAMILIES):
        began = time.process_time()
        own = first_fitting(SEARCHES[peer], problem) if peer in SEARCHES else planned(problem, peer)
        took = f"{time.process_time() - began:.1f} CPU s"
        if own is None:
            print(f"  {peer:8s} no plan that fits, {took}", flush=True)
            continue
        pair = Pair(question, peer, judged(own, problem, outlooks, rates), auto)
        mean, step, form, rated = pair.ratios
        seconds = f"mean {mean:.3f}x, step {step:.3f}x, form {form:.3f}x, rated {rated:.3f}x"
        print(f"  {peer:8s} {seconds}, {took}: {described(own)}", flush=True)
        yield pair


def planned(problem: Problem, strategy: str) -> PlanSpec | None:
    """A strategy's plan; None where nothing fits."""
    try:
        return plan(problem.model, problem.cluster, problem.batch, strategy=strategy, with_bounds=False, top=0).plan
    except BadInput:
        return None


def first_fitting(search: Search, problem: Problem) -> PlanSpec | None:
    """The cheapest plan of a search that binds and fits."""
    question = Question(problem.model, problem.cluster, *problem.batch)
    for _, draft in search(question):
        try:
            layout = bind(question.plan_of(draft), problem.model, problem.cluster)
            fits = all_fit(layout, rank_memory(layout), problem.constraints.reserve)
        except (BadInput, ValueError):  # heads that do not divide, too few samples for a replica
            continue
        if fits:
            return layout.plan
    return None


def fitted(problem: Problem) -> closed_form.Rates:
    """What the predictor's fit says that accelerators and links reach of their data sheets."""
    costs, (model, network) = Estimator(problem).unit_costs, (problem.model, Network(problem.cluster))
    seq_len, precision = problem.batch.seq_len, problem.batch.precision
    flops = 6 * seq_len * (model.layer_parameters + seq_len * model.heads * model.head_size)  # of a layer and sample
    compute, in_node = {}, {}
    for index, own in enumerate(problem.device_types):
        peak = own.accelerator.peak_flops(precision)
        compute[own.accelerator.name] = costs.layer_rate(index) * flops / peak
    for node in problem.cluster.nodes:
        sheet = problem.cluster.links.in_node.gbytes_per_second or node.device.link_gbytes_per_second
        in_node[node.name] = network.node_links(node).bytes_per_second(network.fit) / (1e9 * sheet)
    return closed_form.Rates(compute, in_node, network.fit["between_nodes_fraction"])


def judged(own: PlanSpec, problem: Problem, outlooks: Outlooks, rates: closed_form.Rates) -> Judged:
    layout = bind(own, problem.model, problem.cluster)
    mean, step = outlooks.of(own).objective_seconds, predict(layout).step_seconds
    return Judged(own, mean, step, closed_form.step(layout), closed_form.step(layout, rates).seconds)


def report(pairs: list[Pair]) -> int:
    """Prints the verdicts and what is missed, with the parts of the closed form; 1 where anything is."""
    missed = 0
    for peer in (*SEARCHES, *FAMILIES):
        own = [pair for pair in pairs if pair.peer == peer]
        if not own:
            print(f"{peer}: no plan on any question")
            continue
        for place, (what, least) in enumerate(LEAST.items()):
            ratios = [pair.ratios[place] for pair in own]
            middle = f"{len(own)} questions, geometric mean {statistics.geometric_mean(ratios):.3f}x"
            verdict(f"{peer} over auto, {what}, {middle}, worst", min(ratios), least, unit="x")
            for pair, ratio in zip(own, ratios, strict=True):
                if ratio < least:
                    missed += 1
                    print(f"  {pair.question}: auto {100 * (1 / ratio - 1):.1f} % slower")
                    if what == "form":
                        print(f"    auto {pair.auto}\n    {peer} {pair.own}")
    slower = [pair for pair in pairs if pair.ratios[-1] < LEAST["form"]]
    print(f"{len(pairs)} plans of peers, {missed} verdicts missed; with fitted rates {len(slower)} above 5 %")
    for pair in slower:
        print(f"  {pair.question} beside {pair.peer}: {100 * (1 / pair.ratios[-1] - 1):.1f} % slower")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
