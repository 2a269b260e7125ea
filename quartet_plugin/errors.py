"""The one error hierarchy: each class carries the exit code of the `quartet` command.

A message holds the value, the rule and the fix, in one line. Errors are for what a user or the
outside world can cause; `assert` is for this program's invariants.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `quartet`, which stay as they are (docs/exit-codes.md)."""

    DONE = 0
    USAGE = 2
    INFEASIBLE = 3
    UNSUPPORTED = 4
    INFRASTRUCTURE = 5
    STORAGE = 6
    INCOMPLETE = 7
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141


# What each code tells the caller; docs/exit-codes.md has the table.
MEANINGS: dict[ExitCode, str] = {
    ExitCode.DONE: 'done; "no better plan was found" is a result',
    ExitCode.USAGE: "usage, configuration, or a plan that is corrupt or made for something else",
    ExitCode.INFEASIBLE: "no feasible plan",
    ExitCode.UNSUPPORTED: "unsupported version, or a seam that is missing, changed or patched",
    ExitCode.INFRASTRUCTURE: "infrastructure failed, or the user's command did",
    ExitCode.STORAGE: "storage, or another tuner holds the run",
    ExitCode.INCOMPLETE: "a batch ended with jobs that failed, or that its limits left out",
    ExitCode.INTERRUPTED: "interrupted; `--resume` continues",
    ExitCode.OUTPUT_CLOSED: "the reader of the output closed it, as `head` does; nothing is printed",
}


class QuartetError(Exception):
    """Base of every error that this program raises on purpose; the command exits with its `exit_code`."""

    exit_code: ExitCode = ExitCode.USAGE
    # Lines of this program's own below the message, such as a schedule as a table.
    table: str = ""

    def __str__(self) -> str:
        """The message, and the table below it."""
        return "\n".join(filter(None, (super().__str__(), self.table)))

    @property
    def lines(self) -> tuple[str, ...]:
        """The message, and the lines of the table: its own, or that of the error it was raised from."""
        text, error = str(self), self
        while not error.table and isinstance(error.__cause__, QuartetError):
            error = error.__cause__
        message = text.removesuffix(f"\n{error.table}") if error.table else text
        return (message, *(error.table.splitlines() if message != text else ()))


class UsageError(QuartetError):
    """A wrong command line."""


class ConfigError(QuartetError):
    """A configuration or data file that breaks its schema; names the field, the value and the rule."""


class PlanError(QuartetError):
    """A plan or schedule that is corrupt, impossible, or made for something else."""


class InfeasibleError(QuartetError):
    """No plan fits the constraints."""

    exit_code = ExitCode.INFEASIBLE


class SeamError(QuartetError):
    """An unsupported framework version, or a seam that is missing, changed or already patched."""

    exit_code = ExitCode.UNSUPPORTED


class InfrastructureError(QuartetError):
    """Processes, network, nodes or devices failed, or the user's command did."""

    exit_code = ExitCode.INFRASTRUCTURE


class StorageError(QuartetError):
    """The run folder or the study's storage cannot be read or written, or another tuner holds it."""

    exit_code = ExitCode.STORAGE


class IncompleteError(QuartetError):
    """A batch that has ended with jobs that failed, or that its limits left out."""

    exit_code = ExitCode.INCOMPLETE


class InterruptedByUserError(QuartetError):
    """Ctrl-C: state is saved and the run can be resumed."""

    exit_code = ExitCode.INTERRUPTED


def first_line(error: BaseException) -> str:
    """The first line of an exception's message; its type's name where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
