"""Restore: the run's checkpoints, and the newest of them in the trainer where the run is resumed."""

from hethub.communicator import Rendezvous, World
from hethub.runtime.checkpoint import CheckpointManager
from hethub.runtime.launch.consensus import consensus
from hethub.runtime.loop.build import BUILDING_SECONDS
from hethub.runtime.loop.trainer import TrainingRank
from hethub.runtime.run_folder import RunFolder
from hethub.spec.job import CheckpointSpec


def restore(
    meeting: Rendezvous,
    world: World,
    trainer: TrainingRank,
    spec: CheckpointSpec,
    folder: RunFolder,
    *,
    resumes: bool,
    behind: int | None,
) -> tuple[CheckpointManager, int]:
    """The folder's checkpoints, and the step that the trainer now goes on behind, `behind` where that is named, 0 where
    nothing is resumed. Newer ones are out of the way where any step is left. Raises BadInput on every rank."""

    def opened() -> tuple[CheckpointManager, int]:
        store = CheckpointManager(folder.checkpoints, keep=spec.keep, world=world, keep_every=spec.keep_every)
        return store, trainer.restore(store, store.latest(behind)) if resumes else 0

    store, done = consensus(meeting, "checkpoint", opened, patience_seconds=BUILDING_SECONDS)
    if done < trainer.train.steps:  # else nothing is trained
        store.begin_behind(done)
    return store, done
