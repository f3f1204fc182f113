"""The program `hethub`: parses the command line, runs a command, and ends with its exit code."""

import argparse
import errno
import faulthandler
import gc
import io
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

import hethub
from hethub.commands import data, machine, plan, report, size, starting, train
from hethub.commands.common import another_speaks
from hethub.commands.train import AGAIN
from hethub.spec.errors import BadInput, RunFailed, suggest

# By exit code. After a failure a rank whose main thread is stuck speaks within five seconds (World.watch).
_LINGER_SECONDS = {1: 6.0, 2: 2.0, AGAIN: 6.0}

_FULL = "Make room there, or name another folder; what was whole before is untouched."
_CLOSED = "Allow this user to use it, or name another."
_REMEDIES = {
    errno.ENOSPC: _FULL, errno.EDQUOT: _FULL, errno.EFBIG: _FULL, errno.EROFS: _CLOSED, errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED, errno.ENAMETOOLONG: "Give a shorter one.", errno.EMFILE: "Raise the limit of open files (ulimit -n).",
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
    # A stream that whoever started this has closed (`>&-`) is none, and the next file opened would take its number.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  open as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal's encoding has arrows
    faulthandler.enable(all_threads=False)  # a token file cut under its readers kills every rank, without a word
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
    if code in (1, AGAIN):
        os._exit(code)
    gc.freeze()  # ending, Python looks for cycles among all there is: a fifth of a second behind a search
    return code


def _let_others_speak(code: int) -> None:
    """Returns when the other ranks of a job under mpirun have had the time to say what they know.

    `mpirun --continuous` (Open MPI 5.0) counts a rank that ends with an error twice. So it takes the job for ended,
    and kills whoever is left, when half of the ranks have gone.
    """
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        time.sleep(_LINGER_SECONDS.get(code, 0.0))


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0 done, 1 failed, 2 bad input; of `train` and `launch` also 3,
    stopped by a signal with a checkpoint, and 75, failed, but the same command would go on."""
    logging.basicConfig(format="hethub: %(message)s")
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        print("hethub: interrupted", file=sys.stderr)
        return 1


def _run(arguments: Sequence[str]) -> int:
    try:
        options = _parsed(arguments)
    except BadInput as error:
        return _ended(error, 2, quiet=another_speaks(), debug=False)
    try:
        code: int = options.command(options) or 0
    except BadInput as error:
        return _ended(error, 2, quiet=error.quiet, debug=options.debug, text=_with_remedy(str(error)))
    except RunFailed as error:
        code = AGAIN if error.again else 1
        return _ended(error, code, quiet=error.quiet, debug=options.debug, text=_with_remedy(str(error)))
    except BrokenPipeError:
        raise
    except (OSError, MemoryError, RuntimeError) as error:
        text = _refused(error)
        if text is None:
            raise
        code = 2 if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG else 1  # whoever gave it is wrong
        return _ended(error, code, quiet=False, debug=options.debug, text=text)
    return code


def _with_remedy(text: str) -> str:
    """A failure, and what to change where the system's refusal is behind it, on whichever rank."""
    remedies = (_REMEDIES[number] for words, number in _SAID_BY_TORCH.items() if words in text)
    remedy = next(remedies, None)
    return text if remedy is None else _once(text, remedy)


def _once(text: str, remedy: str) -> str:
    """Both as sentences, the remedy where the text has not said it: the communicator does, for who uses it alone."""
    return text if remedy.rstrip(".") in text else f"{text.rstrip('.')}. {remedy}"


def _refused(error: OSError | MemoryError | RuntimeError) -> str | None:
    """What the system has refused, and what to change; None where it is something else that failed."""
    if isinstance(error, RuntimeError):
        number = next((number for words, number in _SAID_BY_TORCH.items() if words in str(error)), None)
        return None if number is None else f"{str(error).splitlines()[0]}. {_REMEDIES[number]}"
    if isinstance(error, MemoryError):
        return f"the system gives this process no more memory. {_REMEDIES[errno.ENOMEM]}"
    what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    return _once(what, _REMEDIES.get(error.errno or 0, "Nothing that was whole before is changed."))


def _ended(error: Exception, code: int, *, quiet: bool, debug: bool, text: str | None = None) -> int:
    """One paragraph on stderr; the traceback only with --debug."""
    if debug and not quiet:
        import traceback

        traceback.print_exception(error)
    elif not quiet:
        # One write with its line's end: the ranks share their launcher's pipe, and Python may run unbuffered.
        print(f"hethub: {text or error}\n", end="", file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    """argparse, whose errors are one paragraph too."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; `{self.prog} --help` shows what it takes, with an example.")


def command_line() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The program's parser, and each command's by its name."""
    parser = _Parser(prog="hethub", description=hethub.__doc__)
    parser.add_argument("--version", action="version", version=hethub.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for theme in (train, plan, size, machine, report, data, starting):
        theme.add(commands)
    return parser, commands.choices


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser, commands = command_line()
    word = next((word for word in arguments if not word.startswith("-")), None)
    if word is not None and word not in commands:
        raise BadInput(f"there is no command '{word}'; {suggest(word, list(commands))}")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        (commands[word] if word else parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    return options
