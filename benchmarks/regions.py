"""Whether more accelerators are ever worse where slow links part them: python benchmarks/regions.py [--clusters N] [--first N]

Random clusters of three or four device types in two or three regions, 1 to 100 Gbit/s between them. The answer's mean over
the scenarios beside the best of its parts, each planned by itself: without one device type, without one region, one region
alone. Witness: arithmetic, for what a part needs can be left unused. Exit code 1 where a whole cluster is more than 2 %
slower than a part of it.
"""

import argparse
import random
import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

sys.path.append(
    str(Path(__file__).resolve().parents[1])
)  # behind site-packages: only `tests` and `benchmarks` are meant

from hethub.planner import plan
from hethub.planner.evaluate.outlook import Outlooks
from hethub.planner.problem.pose import pose
from hethub.planner.problem.problem import Batch
from hethub.spec.accelerator import Precision
from hethub.spec.cluster import ClusterSpec
from hethub.spec.errors import BadInput
from hethub.spec.model import ModelSpec
from hethub.spec.plan import PlanSpec

ACCELERATORS = ["H100-SXM5-80GB", "A100-SXM4-80GB", "A100-SXM4-40GB", "V100-SXM2-32GB", "MI300X", "MI250X-GCD", "L40S"]
MOST_PERCENT = 2.0


class Question(NamedTuple):
    """What is planned: nodes by name, each name's region, Gbit/s between regions."""

    nodes: dict[str, dict[str, object]]
    region_of: dict[str, int]
    gbps: list[list[float]]
    model: ModelSpec
    batch: Batch

    def parts(self) -> set[frozenset[str]]:
        """Names of nodes: all but one, all but a region, and a region alone."""
        every = frozenset(self.nodes)
        regions = [frozenset(name for name in every if self.region_of[name] == own) for own in range(len(self.gbps))]
        return {*regions, *(every - own for own in regions), *(every - {name} for name in every)} - {every, frozenset()}

    def cluster(self, names: Collection[str]) -> ClusterSpec:
        """These nodes alone."""
        kept = sorted({self.region_of[name] for name in names})
        links: dict[str, object] = {"between_islands": {"gbps_per_node": 50, "latency_seconds": 3e-5}}
        if len(kept) > 1:
            of_node = {name: f"r{self.region_of[name]}" for name in names}
            rates = [[self.gbps[a][b] for b in kept] for a in kept]
            links["regions"] = {"of_node": of_node, "names": [f"r{own}" for own in kept], "gbps": rates}
        nodes = [self.nodes[name] for name in sorted(names)]
        return ClusterSpec.model_validate({"name": "regions", "nodes": nodes, "links": links})

    def objective(self, names: Collection[str]) -> float:
        """What the answer on these nodes takes in the mean over the scenarios of all nodes; infinite where no plan fits."""
        own = self.cluster(names)
        try:
            found = plan(self.model, own, self.batch, with_bounds=False, top=0).plan
        except BadInput:
            return float("inf")
        return self.outlooks.of(self.on_all_nodes(found, own)).objective_seconds

    def on_all_nodes(self, found: PlanSpec, part: ClusterSpec) -> PlanSpec:
        """A part's plan, which leaves the other nodes unused."""
        whole = self.cluster(self.nodes)
        first = {place.node.name: rank for rank, place in reversed(list(enumerate(whole.places)))}
        own = {place.node.name: rank for rank, place in reversed(list(enumerate(part.places)))}
        moved = [rank + first[place.node.name] - own[place.node.name] for rank, place in enumerate(part.places)]
        stages = tuple(
            stage.replace(
                replicas=tuple(each.replace(ranks=tuple(moved[rank] for rank in each.ranks)) for each in stage.replicas)
            )
            for stage in found.stages
        )
        used = {rank for stage in stages for each in stage.replicas for rank in each.ranks}
        unused = tuple(rank for rank in range(len(whole.places)) if rank not in used)
        return found.replace(stages=stages, unused=unused)

    @property
    def outlooks(self) -> Outlooks:
        return Outlooks(pose(self.model, self.cluster(self.nodes), self.batch))


def question(seed: int) -> Question:
    draw = random.Random(seed)
    accelerators = draw.sample(ACCELERATORS, draw.choice([3, 4]))
    regions = draw.choice([2, 3]) if len(accelerators) > 3 else 2
    nodes: dict[str, dict[str, object]] = {}
    for name in accelerators:
        shape = {"count": draw.choice([1, 2]), "accelerators": draw.choice([4, 8]), "nics": draw.choice([1, 4])}
        nodes[f"n{len(nodes)}"] = {
            "name": f"n{len(nodes)}", "accelerator": name, **shape, "gbps_per_nic": draw.choice([100, 400]),
            "host_memory_gb": 1024,
        }  # fmt: skip
    region_of = {name: number if number < regions else draw.randrange(regions) for number, name in enumerate(nodes)}
    gbps = [
        [1000.0 if a == b else draw.choice([1.0, 5.0, 10.0, 25.0, 100.0]) for b in range(regions)]
        for a in range(regions)
    ]
    layers, hidden = draw.choice([16, 24, 32]), draw.choice([2048, 3072, 4096])
    model = ModelSpec(
        name="drawn", layers=layers, hidden=hidden, heads=hidden // 128, kv_heads=hidden // 128,
        ffn=int(2.7 * hidden) // 64 * 64, vocab=32000, max_seq_len=4096,
    )  # fmt: skip
    half: Precision = "fp16" if any(name.startswith("V100") for name in accelerators) else "bf16"
    return Question(nodes, region_of, gbps, model, Batch(draw.choice([128, 256, 512]), 4096, half))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, default=20)
    parser.add_argument("--first", type=int, default=100, help="seed of the first")
    asked = parser.parse_args()
    worst, broken = 0.0, 0
    for seed in range(asked.first, asked.first + asked.clusters):
        own = question(seed)
        whole = own.objective(own.nodes)
        best, names = min((own.objective(part), sorted(part)) for part in own.parts())
        percent = 100.0 * (whole / best - 1.0) if best < float("inf") else 0.0
        kinds = [f"{own.nodes[name]['accelerator']} in r{own.region_of[name]}" for name in own.nodes]
        print(
            f"{seed}: {', '.join(kinds)}: {whole:.3f} s, best of parts {best:.3f} s ({'+'.join(names)}): {percent:+.1f} %",
            flush=True,
        )
        worst, broken = max(worst, percent), broken + (percent > MOST_PERCENT)
    print(f"{broken} of {asked.clusters} more than {MOST_PERCENT:g} % slower than a part, worst {worst:.1f} %")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
