"""`quartet train`: run the user's own command with a plan."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quartet_plugin.cli.command import Device, DeviceName, user_command
from quartet_plugin.cli.output import tell
from quartet_plugin.cli.signals import handled
from quartet_plugin.errors import ConfigError, ExitCode, InfrastructureError, PlanError, QuartetError
from quartet_plugin.protocol.environment import DEVICE_FLAG, ERRORS_FOLDER, PLAN_FLAG

if TYPE_CHECKING:
    from quartet_plugin.launchers.command import Command
    from quartet_plugin.model.plan import Plan

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def train_command(
    ctx: typer.Context,
    plan: Annotated[
        Path | None, typer.Option(help="The plan to train with. Without one the command runs as it is.")
    ] = None,
    device: DeviceName = "auto",
    skip_parity_check: Annotated[
        bool, typer.Option(help="Train with a custom schedule that `quartet check` has not passed.")
    ] = False,
) -> int:
    """Train with a plan: the command that follows `--`, checkpoints and all."""
    from quartet_plugin.launchers.command import parse_command

    training = parse_command(user_command(ctx))
    flags = [DEVICE_FLAG, device] if device != "auto" else []
    if plan is not None:
        from quartet_plugin.model.plan import read_plan

        content = read_plan(plan)
        check_before_start(content, command=training, path=plan)  # the ranks check the rest
        check_receipt(content, path=plan, skip=skip_parity_check)
        flags += [PLAN_FLAG, str(plan.absolute())]
    return run_wrapped(training, flags=flags, device=device)


def check_before_start(plan: "Plan", *, command: "Command", path: Path) -> None:
    """Compare a plan with the installed framework and the command; PlanError names the first difference."""
    made_for = plan.made_for
    here = framework_version(made_for.framework)
    if here is not None and here != made_for.framework_version:
        raise PlanError(
            f"{path}: made for {made_for.framework} {made_for.framework_version}, here is {here}; "
            "make a plan with `quartet tune`"
        )
    if command.num_processes is not None and command.num_processes != made_for.world_size:
        raise PlanError(
            f"{path}: made for {made_for.world_size} processes, the command starts {command.num_processes}; "
            "make a plan with `quartet tune`"
        )


def check_receipt(plan: "Plan", *, path: Path, skip: bool) -> None:
    """Require the parity gate's receipt of a plan with a custom schedule; PlanError without one.

    `skip` trains all the same and says so.
    """
    from quartet_plugin.model.receipt import needs_receipt, receipt_path, require_receipt

    if not needs_receipt(plan):
        return
    if not skip:
        require_receipt(plan, path=path, torch_version=framework_version("torch"))
        return
    tell(
        f"quartet: parity check skipped (--skip-parity-check): {receipt_path(path)} was not asked for, and "
        f"nothing shows that schedule {plan.schedule.name!r} trains as stock does"
    )


def run_wrapped(
    command: "Command",
    *,
    flags: Sequence[str],
    device: Device,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run the command under the adapter, its output and signals passed on, and return its exit code.

    `environment` is added to the command's own.

    Raises the ranks' own error where one says why the command failed, InfrastructureError elsewhere.
    """
    from quartet_plugin.launchers.local import check_start, child_environment, free_port, resolve_device

    check_start(command, cwd=Path.cwd(), environment=os.environ)
    port = free_port() if command.port_flag is not None else None
    argv = command.wrapped(flags, port=port)
    resolved = resolve_device(device, environment=os.environ)
    with tempfile.TemporaryDirectory(prefix="quartet-", ignore_cleanup_errors=True) as folder:
        surroundings = child_environment(resolved, environment={**os.environ, **(environment or {})})
        surroundings[ERRORS_FOLDER] = folder
        signals = _Signals()
        with handled(_PASSED_ON, signals.handle):
            try:
                # In this session: a terminal's Ctrl-C reaches it as it would without us.
                process = subprocess.Popen(argv, env=surroundings)
            except OSError as error:
                raise InfrastructureError(f"command {argv[0]!r}: cannot start: {error.strerror}") from error
            code = signals.wait(process)
        reported = first_error(Path(folder))
    if code == 0:
        return int(ExitCode.DONE)
    if code in (-signal.SIGINT, 128 + signal.SIGINT):
        return int(ExitCode.INTERRUPTED)
    if reported is not None:
        raise reported
    ended = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    raise InfrastructureError(f"the command ended {ended}; its own output above says why")


def first_error(folder: Path) -> QuartetError | None:
    """The first failure that a rank wrote down, those of ranks that only saw a peer go away last.

    The plugin's refusals keep their exit code; a failure of the user's command is INFRASTRUCTURE.
    """
    from quartet_plugin.model.schema import read_record
    from quartet_plugin.protocol.rank_files import CommandFailure, rank_files_of

    failures: list[tuple[bool, float, int, str]] = []
    for path in rank_files_of(CommandFailure, folder):
        with contextlib.suppress(ConfigError):
            failure = read_record(CommandFailure, path)
            text = " ".join(failure.message.split())[:500]
            code = failure.exit_code
            if failure.kind not in ("plan", "seam"):
                code = int(ExitCode.INFRASTRUCTURE)
                text = f"your own command failed: {failure.type}: {text}"
            failures.append((failure.kind == "network", failure.time, code, text))
    if not failures:
        return None
    _, _, code, text = min(failures)
    error = QuartetError(text)
    known = code in (ExitCode.USAGE, ExitCode.UNSUPPORTED, ExitCode.INFEASIBLE, ExitCode.STORAGE)
    error.exit_code = ExitCode(code) if known else ExitCode.INFRASTRUCTURE
    return error


class _Signals:
    """Passes signals on to the command, those included that come while it is being started.

    A terminal's Ctrl-C reaches the command by itself.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._is_interrupted = False

    def wait(self, process: "subprocess.Popen[bytes]") -> int:
        """Wait for the command's end and return its exit code."""
        self._process = process
        for number in self._early:  # of these a terminal's Ctrl-C too came before the command was there
            process.send_signal(number)
        code = process.wait()
        return -signal.SIGINT if self._is_interrupted and code != 0 else code

    def handle(self, number: int, frame: object) -> None:
        del frame
        self._is_interrupted |= number == signal.SIGINT
        if self._process is None:
            self._early.append(number)
        elif number != signal.SIGINT and self._process.poll() is None:
            self._process.send_signal(number)


def framework_version(framework: str) -> str | None:
    """The installed version; None where this environment has none (the command may bring its own)."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(framework).partition("+")[0]
    except PackageNotFoundError:
        return None
