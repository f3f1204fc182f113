"""Bytes and seconds of plans over a real wire: the kernel's counters and the clock beside the prediction.

    python benchmarks/wire.py [PLAN ...] [--steps 3] [--rounds 3]

Two network namespaces of this host, joined by a veth pair that the kernel shapes to 0.1 to 1 Gbit/s, are two machines;
their ranks train a small Llama under eight plans, pipelines and replicas over the link, inside one island and across
two. Bytes: what each end of the pair has sent in a plan's steps (/proc/thread-self/net/dev, 66 bytes of Ethernet, IP
and TCP headers off for each packet) beside what the plan sends over that link. Seconds: the ranks measure themselves
and the link, as `hethub profile` does, before and behind the plan's steps; the prediction is the geometric mean of what
the two foretell, the error the median over rounds.

Exits with 1 where a link carries 3 % more or less than the plan says, or a step takes 10 % more or less. Needs root and
iproute2.
"""

import argparse
import math
import os
import sys
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).resolve().parents[1]))  # behind site-packages: only `tests` is meant

from hethub.predictor import predict
from hethub.predictor.cost.profile import ProfileSpec
from tests.support.hosts.namespaces import namespaces, why_no_namespaces
from tests.support.hosts.wire import MODEL, PLANS, carried, layout_of, measured, planned_bytes

MOST_BYTES, MOST_SECONDS = 0.03, 0.10  # the bounds


def report(names: list[str], steps: int, rounds: int) -> bool:
    """Prints a row for each plan; whether all bounds hold."""
    print(
        f"{MODEL.parameters / 1e6:.1f} M parameters, fp32; {rounds} rounds of {steps} steps; load {os.getloadavg()[0]:.1f}"
    )
    print(
        "| plan | Gbit/s | MB planned | sent / planned | measured s (least to most) | predicted / measured | wire alone s |"
    )
    print("|---|---|---|---|---|---|---|")
    worst_bytes = worst_seconds = 0.0
    with namespaces(f"hethub-wire-{os.getpid()}") as found:
        for name in names:
            plan, layout = PLANS[name], layout_of(PLANS[name])
            ranks = measured(found, name, steps, rounds)
            foretold = [
                predict(layout, profile=ProfileSpec.model_validate(taken)).step_seconds
                for taken in ranks[0]["profiles"]
            ]
            seconds = [max(own) for own in zip(*(each["seconds"] for each in ranks), strict=True)]
            ratios = [math.sqrt(a * b) / own for a, b, own in zip(foretold, foretold[1:], seconds, strict=False)]
            ratio, shares, planned = median(ratios), carried(name, ranks), planned_bytes(layout)
            worst_bytes = max(worst_bytes, *(abs(share - 1) for share in shares))
            worst_seconds = max(worst_seconds, abs(ratio - 1))
            print(
                f"| {name} | {plan.gbps:g} | {max(planned.values()) / 1e6:.2f} | {', '.join(f'{s:.3f}' for s in shares)} | "
                f"{median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f}) | {ratio:.3f} | "
                f"{max(planned.values()) * 8e-9 / plan.gbps:.3f} |",
                flush=True,
            )
    print(
        f"bytes: worst {worst_bytes:.1%} (bound {MOST_BYTES:.0%}); seconds: worst {worst_seconds:.1%} (bound {MOST_SECONDS:.0%})"
    )
    return worst_bytes <= MOST_BYTES and worst_seconds <= MOST_SECONDS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="*", metavar="PLAN", help=f"of {'; '.join(PLANS)}")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if (reason := why_no_namespaces()) is not None:
        print(f"two machines on one {reason}")
        return 1
    return 0 if report(options.plans or list(PLANS), options.steps, options.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
