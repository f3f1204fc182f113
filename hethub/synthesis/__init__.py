"""Programs for any model: a PyTorch module is cut over unlike accelerators, proved best under its cost (HAP).

Start reading: planning.py, then capture/, rules.py, search.py, ratios.py and lower.py.
May import: spec, predictor, communicator, kernels.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hethub.synthesis.capture.trace import trace
from hethub.synthesis.lower import Step
from hethub.synthesis.planning import plan
from hethub.synthesis.program import Program

__all__ = ["Program", "Step", "clip_grad_norm_", "compile", "plan", "state_dict"]


def compile(
    module: torch.nn.Module, example_inputs: Sequence[torch.Tensor], program: Program, group: dist.ProcessGroup
) -> Step:
    """This rank's part of `program`: `step(*inputs)` is the global loss, `step.parameters()` are the rank's shards."""
    return Step(module, trace(module, example_inputs), program, group)


def clip_grad_norm_(step: Step, max_norm: float) -> float:
    """As torch.nn.utils.clip_grad_norm_ on one device, whose norm it returns; all ranks call it together."""
    return step.clip_grad_norm_(max_norm)


def state_dict(step: Step) -> dict[str, torch.Tensor]:
    """The whole module's state, as one device would have it; all ranks call it together."""
    return step.state_dict()
