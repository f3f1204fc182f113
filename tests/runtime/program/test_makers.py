"""Parameters that all ranks keep whole, where the ranks' devices round unlike: each steps its own copy."""

import functools
from pathlib import Path
from typing import Any

import torch

from hethub.runtime.program import trainer
from hethub.runtime.program.trainer import ProgramTrainer
from tests.runtime.program.test_program_jobs import write_program_job
from tests.support.command import ranks

STEPS, EVERY = 5, 2


def round_unlike(folder: Path, rank: int) -> None:
    """Rank 1's steps are a little larger, as another maker's may be; what each rank has whole goes to the folder."""
    run_step = ProgramTrainer.run_step

    def noted(self: Any, step: int, *given: Any, **more: Any) -> Any:
        if self._optimizer is not None and rank == 1:
            for group in self._optimizer.param_groups:
                group["eps"] = self._train.eps * (1 - 1e-3)
        outcome = run_step(self, step, *given, **more)
        state = {
            f"{kind}/{name}": tensor.clone()
            for name, shard in self.step.named_parameters()
            if self.step.is_whole(name)
            for kind, tensor in {"weights": shard.detach(), **self._optimizer.state[shard]}.items()
        }
        torch.save(state, folder / f"{step}-{rank}.pt")
        return outcome

    trainer.ALIKE_EVERY = EVERY
    ProgramTrainer.run_step = noted  # type: ignore[method-assign]


def test_copies_do_not_drift_apart(tmp_path: Path) -> None:
    """They did, for as long as a run lasted, and no rank noticed."""
    job = write_program_job(tmp_path / "job", "Words", size=2, train={"steps": STEPS, "eps": 1e-3}, core="CPU-core")
    given = ("train", job, "--run-dir", tmp_path / "run")
    for ended in ranks(2, *given, cwd=tmp_path, hook=functools.partial(round_unlike, tmp_path)):
        assert ended.exit_code == 0, ended.stderr
    alike = []
    for step in range(1, STEPS + 1):
        first, second = (torch.load(tmp_path / f"{step}-{rank}.pt") for rank in range(2))
        assert first.keys() == second.keys()
        assert any(key.startswith("exp_avg/") for key in first)
        alike.append(all(torch.equal(first[key], second[key]) for key in first))
    assert alike == [step % EVERY == 0 for step in range(1, STEPS + 1)]
