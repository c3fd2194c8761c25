"""How a command ends: one sentence for an error, a meaningful exit code, no traceback unless it is asked for."""

import importlib.util
import os
import sys
from collections.abc import Callable
from enum import IntEnum

import typer

from overspill.cli.output import Output
from overspill.errors import OverspillError


class ExitCode(IntEnum):
    """What the shell is told."""

    OK = 0
    FAILED = 1
    USAGE = 2
    PROBLEMS = 3
    UNEXPECTED = 70
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.OK: "done",
    ExitCode.FAILED: "it could not be done, and stderr says why",
    ExitCode.USAGE: "the command line could not be understood",
    ExitCode.PROBLEMS: "inspect found errors in the checkpoint",
    ExitCode.UNEXPECTED: "an error that nobody expected: please report it",
    ExitCode.INTERRUPTED: "stopped by Ctrl-C; nothing is left half-done",
}


class MissingLibraryError(OverspillError, ImportError):
    """A library that a command needs is not installed."""


def require(library: str, what: str) -> None:
    """Raise unless `library` is installed, without importing it."""
    if importlib.util.find_spec(library) is None:
        raise MissingLibraryError(f"{what} needs {library}. Install it: pip install 'overspill[{library}]'")


def carried_out(command: Callable[[], object], output: Output) -> int:
    """Run `command`, report on `output` what goes wrong, and return the exit code."""
    try:
        result = command()
        sys.stdout.flush()
        return result if isinstance(result, int) else ExitCode.OK
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except typer.TyperException as error:
        if message := error.format_message():  # none where the help was shown instead
            output.failure(error, f"{message} (see --help)")
        return ExitCode(error.exit_code)
    except BrokenPipeError:  # whoever read the output has gone, and needs no explanation
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's own flush at exit would fail again
        return ExitCode.FAILED
    except Exception as error:
        if output.debug:
            raise
        output.failure(error, _sentence(error))
        return ExitCode.FAILED if _is_expected(error) else ExitCode.UNEXPECTED


def _is_expected(error: Exception) -> bool:
    return isinstance(error, OverspillError | ImportError | OSError | MemoryError) or _is_out_of_memory(error)


def _is_out_of_memory(error: Exception) -> bool:
    import torch  # imported by then

    return isinstance(error, torch.OutOfMemoryError)


def _sentence(error: Exception) -> str:
    if isinstance(error, OverspillError):
        return str(error)
    if _is_out_of_memory(error):
        return "the device ran out of memory. Give it less in --max-memory, so that more is left for activations"
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    if _is_expected(error):
        return reason
    return f"{type(error).__name__}: {reason}. Run it again with --debug to see where this comes from"
