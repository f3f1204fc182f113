"""The parts of the upper bound: every kind of accelerator alone in its best plan, on the terminal and as files."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from hethub.report.explanation import shape
from hethub.spec.base import write_yaml
from hethub.spec.model import ModelSpec
from hethub.spec.plan import save_plan

if TYPE_CHECKING:
    from hethub.planner import KindAlone


def print_kinds_alone(alone: Sequence["KindAlone"], console: Console) -> None:
    """A line for every kind, with its part of the batch, its throughput and its plan."""
    for kind in alone:
        lifted = ", its memory limit lifted since it cannot hold the model" if kind.memory_lifted else ""
        console.print(
            f"alone: {kind.count} x {kind.accelerator} ({kind.island}), {kind.global_batch} samples: "
            f"{kind.tokens_per_second:,.0f} tokens/s{lifted}, {kind.plan.schedule}, {shape(kind.plan)}"
        )
    if not alone:
        console.print("no upper bound: the batch leaves one kind of accelerator without a sample")


def save_kinds_alone(alone: Sequence["KindAlone"], model: ModelSpec, folder: Path) -> list[Path]:
    """Writes a folder per kind; its plan.yaml, cluster.yaml and model.yaml are what `hethub report` and `diff` read."""
    written = []
    for index, kind in enumerate(alone):
        own = folder / f"{index}-{kind.accelerator}-{kind.island}"
        own.mkdir(parents=True, exist_ok=True)
        save_plan(kind.plan, own / "plan.yaml")
        write_yaml(kind.cluster.to_dict(), own / "cluster.yaml")
        write_yaml(model.to_dict(), own / "model.yaml")
        written.append(own)
    return written
