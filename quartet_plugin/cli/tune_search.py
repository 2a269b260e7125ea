"""`quartet tune` after its options: checks what can be checked before a launch, searches, shows the plan."""

import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from quartet_plugin.cli.command import find_run
from quartet_plugin.cli.export import write_native
from quartet_plugin.cli.full_size import full_size_nodes
from quartet_plugin.cli.output import say, show
from quartet_plugin.cli.report import report_line
from quartet_plugin.cli.signals import stop_on_signals
from quartet_plugin.cli.tune_summary import summary_lines
from quartet_plugin.cli.workers import cores_per_trial_of, slices_of
from quartet_plugin.errors import InfeasibleError, InfrastructureError
from quartet_plugin.launchers.command import Command, parse_command
from quartet_plugin.launchers.device_slices import DeviceSlice
from quartet_plugin.launchers.local import check_start
from quartet_plugin.launchers.placement import Placement
from quartet_plugin.model.launch import Observer
from quartet_plugin.protocol.accepted_sources import paths_of
from quartet_plugin.protocol.masking import masked_argv
from quartet_plugin.report.live import reporter
from quartet_plugin.report.search_expense import expense_lines
from quartet_plugin.report.tensorboard import Scalars
from quartet_plugin.schedule.compilation import compilation_notice
from quartet_plugin.study.samplers import check_installed
from quartet_plugin.trial.lease import Lease
from quartet_plugin.tuner.accepted_sources import accept_as_before
from quartet_plugin.tuner.config import TuneConfig, default_run_name, placement_of, read_config, with_launcher
from quartet_plugin.tuner.context import TuningContext
from quartet_plugin.tuner.coordinator import Coordinator
from quartet_plugin.tuner.disk_reserve import DiskReserve
from quartet_plugin.tuner.gpu_settings import check_gpu_settings
from quartet_plugin.tuner.history import read_history
from quartet_plugin.tuner.layer_builder import check_layer_builder
from quartet_plugin.tuner.proposer import keep_machine, machine_of
from quartet_plugin.tuner.run_folder import (
    RunFolder,
    TuningRun,
    begun_run,
    create_run,
    prepare_folder,
    resume_run,
)
from quartet_plugin.tuner.schedule_files import check_schedule_files, keep_schedule_files
from quartet_plugin.tuner.trial_backend import LocalBackend
from quartet_plugin.tuner.tune_result import TuneResult, write_best


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """The options of `quartet tune` that decide what is searched, and where; None: as in the q.yaml."""

    config: Path | None
    run_dir: Path
    name: str | None
    trials: int | None
    is_resumed: bool
    is_taken_over: bool
    max_minutes: float | None
    earlier_run: str | None
    num_workers: int | None
    oversubscribe: bool
    launcher: str | None
    trial_nodes: int | None
    nodes: int | None
    site: str | None

    def read(self) -> TuneConfig:
        """The q.yaml, with the options in place of its values."""
        return self.over(read_config(self.config)).with_options(run=self.name, trials=self.trials)

    def over(self, config: TuneConfig) -> TuneConfig:
        """A configuration, with the options that choose launcher and nodes in place of its values."""
        return with_launcher(
            config,
            launcher=self.launcher,
            trial_nodes=self.trial_nodes,
            site=self.site,
            nodes=self.nodes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """A search that may start: its configuration and command were checked, nothing was written.

    `is_begun`: an earlier session of the run has launched something. `cores_per_trial` is then the number of
    processor cores that each trial had; None where that is not known, or trials train on accelerators.
    """

    options: TuneOptions
    words: tuple[str, ...]
    config: TuneConfig
    command: Command
    placement: Placement
    path: Path
    cwd: Path
    is_resumed: bool
    is_taken_over: bool
    earlier_folder: Path | None
    cores_per_trial: int | None = None
    is_begun: bool = False

    def slices(self, config: TuneConfig) -> tuple[DeviceSlice, ...]:
        """The parts of the devices, one for each trial at a time. Raises ConfigError."""
        return slices_of(
            config,
            placement=self.placement,
            num_workers=self.options.num_workers,
            command=self.command,
            oversubscribe=self.options.oversubscribe,
            cores_per_trial=self.cores_per_trial,
        )


def checked_request(words: Sequence[str], options: TuneOptions) -> TuneRequest:
    """The search of a command. Raises ConfigError or UsageError for what would fail later."""
    earlier_folder = (
        None if options.earlier_run is None else find_run(options.earlier_run, run_dir=options.run_dir)
    )
    training = parse_command(words)
    config = options.read()
    run_name = config.run or default_run_name((training.target,), arguments=training.arguments)
    path, cwd = options.run_dir / run_name, Path.cwd()
    is_again = _is_requeued(path)
    is_resumed = options.is_resumed or is_again
    is_begun, cores_per_trial = False, None
    if is_resumed:
        if options.config is None:
            begun = begun_run(path, config=None, command=None)
            config = options.over(begun.config).with_options(run=None, trials=options.trials)
        resumed = begun_run(path, config=config, command=words)
        config, cwd = resumed.config, resumed.cwd
        is_begun = resumed.folder.is_begun
        cores_per_trial = resumed.cores_per_trial if is_begun else None
        training = parse_command(words, cwd=cwd)
    check_installed(config.study.sampler)
    placement = placement_of(config, cwd=cwd)
    request = TuneRequest(
        options=options,
        words=tuple(words),
        config=config,
        command=placement.command(training),
        placement=placement,
        path=path,
        cwd=cwd,
        is_resumed=is_resumed,
        is_taken_over=options.is_taken_over or is_again,
        earlier_folder=earlier_folder,
        cores_per_trial=cores_per_trial,
        is_begun=is_begun,
    )
    if not is_resumed:
        _check_first_start(request)
    elif placement.is_local:
        request.slices(config)
    return request


def _check_first_start(request: TuneRequest) -> None:
    config, command, cwd = request.config, request.command, request.cwd
    check_start(command, cwd=cwd, environment=os.environ)
    machine_of(config.machine, cwd=cwd)
    check_schedule_files(config.search, command=command, cwd=cwd)
    check_layer_builder(config.search, command=command, cwd=cwd)
    check_gpu_settings(config, environment=os.environ)
    request.slices(config)


def _is_requeued(path: Path) -> bool:
    """Whether Slurm has started this very job again, its first tuner being gone, and the run is there."""
    is_again = os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    return is_again and RunFolder(path=path).config_file.is_file()


def search_and_show(request: TuneRequest) -> None:
    """Search, write the best plan down, and print the closing lines."""
    folder = prepare_folder(request.path, is_resumed=request.is_resumed)
    with (
        _failure_reported(folder),
        Lease.acquire(folder, takeover=request.is_taken_over, say=say) as lease,
        DiskReserve(folder) as kept,
    ):
        run = _begin(request, folder)
        if request.is_resumed:
            _accept_known_sources(run)
        result = _search(request, run=run, lease=lease, kept=kept)
        plan = write_best(result, run=run)
        native = write_native(plan, run=run)
    for line in summary_lines(result, plan=plan, run=run):
        show(line)
    show(*expense_lines(read_history(run.folder.path)))
    if native:
        show(f"native    {native}")
    show(report_line(run.folder.path, storage=run.storage))


@contextlib.contextmanager
def _failure_reported(folder: Path) -> Iterator[None]:
    """Print where the report is also for a search that fails: it has the reason of every failed trial."""
    try:
        yield
    except (InfeasibleError, InfrastructureError):
        if RunFolder(path=folder).has_study:
            show(report_line(folder))
        raise


def _begin(request: TuneRequest, folder: Path) -> TuningRun:
    """The run, with the files that the search reads kept in its folder."""
    cores_per_trial = None
    if request.placement.is_local and not request.is_begun:
        cores_per_trial = cores_per_trial_of(request.config, slices=request.slices(request.config))
    if request.is_resumed:
        return resume_run(
            folder, config=request.config, command=request.words, cores_per_trial=cores_per_trial
        )
    keep_machine(request.config.machine, cwd=request.cwd, folder=RunFolder(path=folder))
    keep_schedule_files(request.config.search, cwd=request.cwd, folder=RunFolder(path=folder))
    named = request.config.model_copy(update={"run": request.path.name})
    return create_run(folder, config=named, command=request.words, cores_per_trial=cores_per_trial)


def _accept_known_sources(run: TuningRun) -> None:
    """Let the ranks accept the changed functions that earlier sessions accepted, and say so."""
    functions = accept_as_before(run.folder)
    if functions:
        first, *more = paths_of(functions)
        others = f" and {len(more)} more" if more else ""
        show(f"changed source ({first}{others}) is accepted as in an earlier session; no other change is")


def _search(request: TuneRequest, *, run: TuningRun, lease: Lease, kept: DiskReserve) -> TuneResult:
    config, placement = run.config, request.placement
    slices = request.slices(config)
    first_slice = slices[0] if slices else None
    with (
        reporter(Console()) as shown,
        stop_on_signals(shown.message) as should_stop,
        LocalBackend(
            device_slice=first_slice,
            nodes_launcher=placement.launcher_on(first_slice),
            warm_starts=config.trial.warm_starts == "auto",
            fence=lease.check,
        ) as backend,
    ):
        command_line = shlex.join(masked_argv(request.words))
        shown.message(f"run {run.name} in {request.path}; the command: {command_line}")
        if placement.batch_divisor > 1:
            shown.message(placement.share_words)
        if first_slice is not None and placement.is_local and request.options.num_workers is None:
            shown.message(f"trials run on {first_slice.label}: as many as the run's earlier trials had")

        def stops() -> bool:
            # Trials ask this all the time, also while they show no progress: the lease must not expire.
            lease.keep_if_writable()
            return should_stop()

        observer: Observer = shown
        if config.study.tensorboard:
            observer = Scalars(shown, run.folder.path / "tensorboard")
        context = TuningContext.create(
            run,
            command=request.command,
            backend=backend,
            observer=observer,
            should_stop=stops,
            fence=lease.check,
            max_minutes=request.options.max_minutes,
        )
        coordinator = Coordinator(
            context,
            earlier_run=request.earlier_folder,
            slices=() if request.options.num_workers is None else slices,
            make_room=kept.drop,
            full_size=full_size_nodes(config, placement=placement, words=request.words),
        )
        with compilation_notice(shown.message):
            return coordinator.tune()
