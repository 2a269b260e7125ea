"""`quartet train`: run the user's command with a plan."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quartet_plugin.cli.command import (
    AcceptChangedSource,
    Device,
    DeviceName,
    check_range,
    pass_on_changed_source,
    user_command,
)
from quartet_plugin.cli.plan_checks import check_before_start, check_receipt
from quartet_plugin.cli.signals import handled, is_in_foreground
from quartet_plugin.errors import (
    ConfigError,
    ExitCode,
    InfrastructureError,
    QuartetError,
    UsageError,
)
from quartet_plugin.protocol.environment import ACCEPT_CHANGED_SOURCE, DEVICE_FLAG, ERRORS_FOLDER, PLAN_FLAG

if TYPE_CHECKING:
    from quartet_plugin.launchers.command import Command

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def train_command(
    ctx: typer.Context,
    plan: Annotated[
        Path | None, typer.Option(help="The plan to train with. Default: none, the command runs unchanged.")
    ] = None,
    schedule: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A SCHEDULE.json to train with; all other settings stay as in the command.",
        ),
    ] = None,
    device: DeviceName = "auto",
    skip_parity_check: Annotated[
        bool,
        typer.Option(
            "--skip-parity-check", help="Train even if the custom schedule has not passed `quartet check`."
        ),
    ] = False,
    launcher: Annotated[
        str | None,
        typer.Option(
            help="Start the command once on each node: with slurm in this allocation, or with any "
            "launcher of `quartet tune`."
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Number of nodes to train on; needs --launcher. Default: the plan's.")
    ] = None,
    site: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The site.yaml, which has the cluster's settings for every job."),
    ] = None,
    accept_changed_source: AcceptChangedSource = False,
) -> int:
    """Run the training command that follows `--` with a plan or a schedule."""
    from quartet_plugin.launchers.command import parse_command

    if plan is not None and schedule is not None:
        raise UsageError(
            "quartet train: --plan and --schedule are both given; a plan has a schedule, so give only one"
        )
    if skip_parity_check and (accept_changed_source or os.environ.get(ACCEPT_CHANGED_SOURCE)):
        raise UsageError(
            f"--accept-changed-source (or {ACCEPT_CHANGED_SOURCE}) needs the parity gate; omit "
            "--skip-parity-check"
        )
    pass_on_changed_source(is_accepted=accept_changed_source)
    training = parse_command(user_command(ctx))
    if launcher is None and (nodes, site) != (None, None):
        raise UsageError("quartet train: --nodes and --site work only with --launcher; add it, or omit them")
    if nodes is not None:
        check_range("--nodes", nodes, most=10_000)
    if launcher is not None:
        return _on_nodes(
            training,
            launcher=launcher,
            nodes=nodes,
            site=site,
            plan=plan,
            schedule=schedule,
            device=device,
            skip=skip_parity_check,
        )
    flags = [DEVICE_FLAG, device] if device != "auto" else []
    if schedule is not None:
        from quartet_plugin.cli.train_schedule import scheduled_plan

        plan = scheduled_plan(schedule, command=training, device=device, skip=skip_parity_check)
    if plan is not None:
        from quartet_plugin.model.plan import read_plan

        content = read_plan(plan)
        check_before_start(content, command=training, path=plan)  # the ranks check the rest
        check_receipt(content, path=plan, skip=skip_parity_check)
        flags += [PLAN_FLAG, str(plan.absolute())]
    return run_wrapped(training, flags=flags, device=device)


def _on_nodes(
    command: "Command",
    *,
    launcher: str,
    nodes: int | None,
    site: Path | None,
    plan: Path | None,
    schedule: Path | None,
    device: Device,
    skip: bool,
) -> int:
    """The same training on every node; checks that are possible here come before anything starts."""
    from quartet_plugin.cli.train_nodes import train_on_nodes
    from quartet_plugin.launchers.nodes_command import on_nodes

    if schedule is not None:
        raise UsageError("quartet train --launcher: --schedule runs on one machine; give a plan that has it")
    options = [] if device == "auto" else ["--device", device]
    if skip:
        options.append("--skip-parity-check")
    if plan is not None:
        from quartet_plugin.model.plan import read_plan

        content = read_plan(plan)
        nodes = len(content.made_for.nodes) if nodes is None else nodes
        check_before_start(content, command=on_nodes(command, num_nodes=nodes), path=plan)
        check_receipt(content, path=plan, skip=skip)
        options += ["--plan", str(plan.absolute())]
    if nodes is None:
        raise UsageError(
            "quartet train --launcher: without a plan add --nodes, the number of nodes to train on"
        )
    on_nodes(command, num_nodes=nodes)
    return train_on_nodes(options, command.words, launcher=launcher, num_nodes=nodes, site=site)


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
    from quartet_plugin.trial.attempt import started_argv

    check_start(command, cwd=Path.cwd(), environment=os.environ)
    port = free_port() if command.port_flag is not None else None
    resolved = resolve_device(device, environment=os.environ)
    with tempfile.TemporaryDirectory(prefix="quartet-", ignore_cleanup_errors=True) as folder:
        surroundings = child_environment(resolved, environment={**os.environ, **(environment or {})})
        surroundings[ERRORS_FOLDER] = folder
        argv = started_argv(command, flags=flags, port=port, folder=Path(folder), environment=surroundings)
        signals = _Signals()
        with handled(_PASSED_ON, signals.handle):
            try:
                # In this session: a terminal's Ctrl-C reaches it as without this process.
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
    raise InfrastructureError(f"the command ended {ended}; its output above gives the reason")


def first_error(folder: Path) -> QuartetError | None:
    """The first failure that a rank recorded; failures of ranks that only lost a peer come last.

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
                text = f"your command failed: {failure.type}: {text}"
            failures.append((failure.kind == "network", failure.time, code, text))
    if not failures:
        return None
    _, _, code, text = min(failures)
    error = QuartetError(text)
    known = code in (ExitCode.USAGE, ExitCode.UNSUPPORTED, ExitCode.INFEASIBLE, ExitCode.STORAGE)
    error.exit_code = ExitCode(code) if known else ExitCode.INFRASTRUCTURE
    return error


class _Signals:
    """Forwards signals to the command, including signals that arrive while it starts.

    A terminal's Ctrl-C reaches the command without this; SIGINT from another process does not.
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
        elif self._process.poll() is None and not (number == signal.SIGINT and is_in_foreground()):
            self._process.send_signal(number)
