"""The program `hethub`: parses the command line, runs a command, and ends with its exit code."""

import argparse
import errno
import logging
import os
import sys
import time
from collections.abc import Sequence

import hethub
from hethub.commands import data, machine, plan, report, size, train
from hethub.spec.errors import BadInput, RunFailed

# By exit code. After a failure a rank whose main thread is stuck speaks within five seconds (World.watch).
_LINGER_SECONDS = {1: 6.0, 2: 2.0}

_FULL = "Make room there, or name another folder; what was whole before is untouched."
_CLOSED = "Allow this user to use it, or name another."
_REMEDIES = {
    errno.ENOSPC: _FULL, errno.EDQUOT: _FULL, errno.EFBIG: _FULL, errno.EROFS: _CLOSED, errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED, errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.ENFILE: "Raise the system's limit of open files (fs.file-max).",
    errno.ENOMEM: "Raise the limits of memory (ulimit -v) and of processes and threads (ulimit -u), or plan for less.",
}  # fmt: skip
# torch and Python's threads raise RuntimeError for these too, with the words alone.
_SAID_BY_TORCH = {
    "an't allocate memory": errno.ENOMEM, "annot allocate memory": errno.ENOMEM, "an't start new thread": errno.ENOMEM,
    "Resource temporarily unavailable": errno.ENOMEM, "Too many open files": errno.EMFILE,
}  # fmt: skip


def main() -> int:
    """The program: `run`, and where that failed an end that no thread can hold up.

    After a failure the communicator's threads may be stuck in native calls; finalising the interpreter under them
    would wait for them, or abort.
    """
    try:
        code = run()
        sys.stdout.flush()
    except BrokenPipeError:  # `hethub … | head`: who reads has enough, and has nothing to be told
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception:  # noqa: BLE001  nobody is left to handle it, so it is shown as Python itself would
        sys.excepthook(*sys.exc_info())
        code = 1
    if code != 0:
        sys.stdout.flush()
        sys.stderr.flush()
        _let_others_speak(code)
    if code == 1:
        os._exit(code)
    return code


def _let_others_speak(code: int) -> None:
    """Returns when the other ranks of a job under mpirun have had the time to say what they know.

    `mpirun --continuous` (Open MPI 5.0) counts a rank that ends with an error twice. So it takes the job for ended,
    and kills whoever is left, when half of the ranks have gone.
    """
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        time.sleep(_LINGER_SECONDS[code])


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0 done, 1 failed, 2 bad input."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="hethub: %(message)s")
    try:
        options.command(options)
    except BadInput as error:
        return _ended(error, 2, quiet=error.quiet, debug=options.debug)
    except RunFailed as error:
        return _ended(error, 1, quiet=error.quiet, debug=options.debug)
    except BrokenPipeError:
        raise
    except (OSError, MemoryError, RuntimeError) as error:
        text = _refused(error)
        if text is None:
            raise
        return _ended(error, 1, quiet=False, debug=options.debug, text=text)
    except KeyboardInterrupt:
        print("hethub: interrupted", file=sys.stderr)
        return 1
    return 0


def _refused(error: OSError | MemoryError | RuntimeError) -> str | None:
    """What the system has refused, and what to change; None where it is something else that failed."""
    if isinstance(error, RuntimeError):
        number = next((number for words, number in _SAID_BY_TORCH.items() if words in str(error)), None)
        return None if number is None else f"{str(error).splitlines()[0]}. {_REMEDIES[number]}"
    if isinstance(error, MemoryError):
        return f"the system gives this process no more memory. {_REMEDIES[errno.ENOMEM]}"
    what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    return f"{what}. {_REMEDIES.get(error.errno or 0, 'Nothing that was whole before is changed.')}"


def _ended(error: Exception, code: int, *, quiet: bool, debug: bool, text: str | None = None) -> int:
    """One paragraph on stderr; the traceback only with --debug."""
    if debug and not quiet:
        import traceback

        traceback.print_exception(error)
    elif not quiet:
        print(f"hethub: {text or error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hethub", description=hethub.__doc__)
    parser.add_argument("--version", action="version", version=hethub.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for theme in (train, plan, size, machine, report, data):
        theme.add(commands)
    return parser
