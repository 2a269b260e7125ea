"""Describes a rank's exception as a failure: kind, exit code and words, for the tuner and the user."""

import errno
import linecache
import sys
import traceback
from types import FrameType, TracebackType

from quartet_plugin.errors import ExitCode, InfrastructureError, QuartetError, SeamError
from quartet_plugin.protocol.masking import collect_secrets, masked
from quartet_plugin.protocol.rank_files import ErrorKind, FailureReport
from quartet_plugin.rank.failure_texts import (
    means_device_fault,
    means_lost_peer,
    means_no_memory,
    wanted_bytes_of,
)

_MAX_LINES = 200
_MAX_CHARACTERS = 4_000
_NETWORK_TYPES = {"DistNetworkError", "DistStoreError"}
_NETWORK_ERRNOS = {
    errno.EADDRINUSE,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EPIPE,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ETIMEDOUT,
}
# Frames whose own `raise` or `assert` is the framework's verdict on a configuration.
_FRAMEWORKS = ("megatron", "transformer_engine", "deepspeed", "argparse")


def describe_failure(error: BaseException, *, num_steps: int, peak_bytes: int) -> FailureReport:
    """The failure that the exception means after `num_steps` training steps, without secrets.

    The script may have changed its environment since it began: its secrets are those of now.
    """
    collect_secrets()
    text = message_of(error)
    lines = masked("".join(traceback.format_exception(error))).splitlines()
    return FailureReport(
        kind=kind_of(error, num_steps=num_steps),
        type=type(error).__name__,
        message=masked(text)[:_MAX_CHARACTERS],
        exit_code=exit_code_of(error),
        peak_memory_bytes=peak_bytes,
        wanted_bytes=wanted_bytes_of(text),
        traceback=tuple(line[:_MAX_CHARACTERS] for line in lines[-_MAX_LINES:]),
    )


def kind_of(error: BaseException, *, num_steps: int) -> ErrorKind:
    """The kind of failure, from the exception and where it was raised; never from a process's output."""
    if isinstance(error, SeamError):
        return "seam"
    if isinstance(error, InfrastructureError):
        return "network"
    if isinstance(error, QuartetError):
        return "plan"
    text = message_of(error)
    if _lacks_memory(error):
        return "out-of-memory"
    if isinstance(error, OSError) and error.errno in _NETWORK_ERRNOS:
        return "network"
    if isinstance(error, RuntimeError) and (
        any(_is_named(error, name) for name in _NETWORK_TYPES) or means_lost_peer(text)
    ):
        return "network"
    if num_steps == 0 and _is_verdict(error):
        return "refused"
    return "error"


def is_device_failure(error: BaseException) -> bool:
    """Whether a library's error says that this process's device lacks memory or is at fault, not a peer."""
    return _lacks_memory(error) or _is_named(error, "AcceleratorError") or means_device_fault(str(error))


def exit_code_of(error: BaseException) -> int:
    """The code that Python ends the process with for this exception."""
    if isinstance(error, QuartetError):
        return int(error.exit_code)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return int(ExitCode.INTERRUPTED)
    return 1


def message_of(error: BaseException) -> str:
    """The exception's words; for argparse, which only exits, the sentence that it printed."""
    if isinstance(error, SystemExit):
        for frame, _ in _innermost(error):
            if frame.f_code.co_name == "error" and frame.f_globals.get("__name__") == "argparse":
                return str(frame.f_locals.get("message", error))
        return f"the script ended with exit code {error.code}"
    return str(error).strip() or type(error).__name__


def show_script_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A sys.excepthook that shows an error of the script as python does, without the frames that ran it."""
    part = _script_part(trace)
    sys.__excepthook__(kind, error.with_traceback(part), part)


def _script_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on; the whole traceback if no script was run."""
    entry = trace
    while entry is not None and entry.tb_frame.f_code.co_name != "run_program":
        entry = entry.tb_next
    if entry is None:
        return trace
    entry = entry.tb_next
    while entry is not None and entry.tb_frame.f_globals.get("__name__") == "runpy":
        entry = entry.tb_next
    return entry


def _is_verdict(error: BaseException) -> bool:
    """Whether a `raise` or `assert` of the framework, not something it called, made this exception."""
    frames = _innermost(error)
    if isinstance(error, SystemExit):
        return error.code not in (None, 0) and any(_is_framework(frame) for frame, _ in frames)
    if not frames or not _is_framework(frames[0][0]):
        return False
    line = linecache.getline(frames[0][0].f_code.co_filename, frames[0][1])
    return line.lstrip().startswith(("raise", "assert"))


def _is_framework(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _FRAMEWORKS


def _lacks_memory(error: BaseException) -> bool:
    is_known = isinstance(error, MemoryError) or _is_named(error, "OutOfMemoryError")
    return is_known or means_no_memory(message_of(error))


def _is_named(error: BaseException, name: str) -> bool:
    """Whether torch's class of that name is among its bases; torch may not even be imported."""
    return any(base.__name__ == name for base in type(error).__mro__)


def _innermost(error: BaseException) -> list[tuple[FrameType, int]]:
    """The frames of the exception's traceback with their lines, innermost first."""
    return list(traceback.walk_tb(error.__traceback__))[::-1]
