"""Every device type alone in its best plan, on the terminal and as files."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from hethub.report.explanation import shape
from hethub.spec.documents import write_yaml
from hethub.spec.model import ModelSpec
from hethub.spec.plan import save_plan

if TYPE_CHECKING:
    from hethub.planner import HomogeneousPart


def print_alone(alone: Sequence["HomogeneousPart"], console: Console) -> None:
    """A line for every device type, with its part of the batch, its throughput and its plan."""
    for each in alone:
        lifted = ", its memory limit lifted since it cannot hold the model" if each.memory_lifted else ""
        console.print(
            f"alone: {each.count} x {each.accelerator} ({each.island}), {each.global_batch} samples: "
            f"{each.tokens_per_second:,.0f} tokens/s{lifted}, {each.plan.schedule}, {shape(each.plan)}"
        )
    if not alone:
        console.print("not compared with the makers alone: the batch leaves one device type without a sample")


def save_alone(alone: Sequence["HomogeneousPart"], model: ModelSpec, folder: Path) -> list[Path]:
    """Writes a folder per device type; `hethub report` and `diff` read its plan.yaml, cluster.yaml and model.yaml."""
    written = []
    for index, each in enumerate(alone):
        own = folder / f"{index}-{each.accelerator}-{each.island}"
        own.mkdir(parents=True, exist_ok=True)
        save_plan(each.plan, own / "plan.yaml")
        write_yaml(each.cluster.to_dict(), own / "cluster.yaml")
        write_yaml(model.to_dict(), own / "model.yaml")
        written.append(own)
    return written
