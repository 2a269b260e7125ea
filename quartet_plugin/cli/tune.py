"""`quartet tune`: search with short live trials of the user's command."""

import contextlib
import json
import os
import shlex
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quartet_plugin.cli.command import (
    RUNS,
    AcceptChangedSource,
    RunsFolder,
    find_run,
    invocation,
    pass_on_changed_source,
    path_here,
    user_command,
)
from quartet_plugin.cli.output import show
from quartet_plugin.cli.signals import stop_on_signals
from quartet_plugin.errors import SeamError, UsageError

if TYPE_CHECKING:
    from quartet_plugin.model.launch import Observer
    from quartet_plugin.model.plan import Plan
    from quartet_plugin.tuner.run_folder import TuningRun
    from quartet_plugin.tuner.tune_result import TuneResult

DISTRIBUTION = "quartet-plugin"

# Libraries whose declared versions hold; those of the frameworks are checked by the ranks.
CHECKED_LIBRARIES = frozenset({"numba", "numpy", "optuna", "psutil", "pydantic", "scipy", "torch"})


def tune_command(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(help="The q.yaml with the search's settings. Default: all settings at their defaults."),
    ] = None,
    run_dir: RunsFolder = RUNS,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The run's name, which overrides `run` of the q.yaml.")
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Number of plans to try, which overrides `study.trials` of the q.yaml."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was stopped.")] = False,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Take over a run whose tuner on another host was lost.")
    ] = False,
    max_minutes: Annotated[
        float | None,
        typer.Option(help="Approximate time limit of the search and its final rounds, in minutes."),
    ] = None,
    earlier_run: Annotated[
        str | None,
        typer.Option("--from", metavar="RUN", help="Start with the measurements of another run."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Number of trials to run at once, each on its own part of this host's devices."),
    ] = None,
    joined: Annotated[
        str | None,
        typer.Option("--join", metavar="RUN", help="Run trials on this host for the tuner of that run."),
    ] = None,
    oversubscribe: Annotated[
        bool, typer.Option("--oversubscribe", help="Let the workers of a CPU run share all cores.")
    ] = False,
    launcher: Annotated[
        str | None,
        typer.Option(
            help="Start trials on nodes: slurm (this allocation), slurm-batch, ssh, ray, kubernetes, "
            "nemo-run, or a launcher that another package adds."
        ),
    ] = None,
    trial_nodes: Annotated[
        int | None, typer.Option(help="Number of nodes of each trial; needs --launcher.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(help="Number of nodes of the later training, if trials run on fewer."),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The site.yaml, which has the cluster's settings for every job."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be launched and searched; start nothing.")
    ] = False,
    accept_changed_source: AcceptChangedSource = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print one JSON object.")] = False,
) -> None:
    """Find a faster plan for the training command after `--`, with short trials."""
    pass_on_changed_source(is_accepted=accept_changed_source)
    if as_json and not dry_run:
        raise UsageError("quartet tune --json: needs --dry-run; `quartet status --json` reports on a run")
    if max_minutes is not None and not 0.1 <= max_minutes <= 1e6:
        raise UsageError(f"--max-minutes {max_minutes:g}: must be from 0.1 to {1e6:g} minutes")
    if joined is not None:
        from quartet_plugin.cli.workers import join

        others = (config, max_minutes, earlier_run, name, trials, launcher, trial_nodes, nodes, site)
        if resume or takeover or dry_run or any(other is not None for other in others):
            raise UsageError(
                "quartet tune --join: takes no option except --workers; the run's tuner sets the others"
            )
        words = invocation(ctx).user_command
        path = find_run(joined, run_dir=run_dir)
        join(path, words=words, num_workers=workers or 1, oversubscribe=oversubscribe)
        return
    from rich.console import Console

    from quartet_plugin.cli.export import write_native
    from quartet_plugin.cli.full_size import full_size_nodes
    from quartet_plugin.cli.report import report_line
    from quartet_plugin.cli.workers import slices_of
    from quartet_plugin.launchers.command import parse_command
    from quartet_plugin.launchers.local import check_start
    from quartet_plugin.protocol.masking import masked_argv
    from quartet_plugin.report.live import reporter
    from quartet_plugin.report.search_expense import expense_lines
    from quartet_plugin.report.tensorboard import Scalars
    from quartet_plugin.schedule.compilation import compilation_notice
    from quartet_plugin.study.samplers import check_installed
    from quartet_plugin.trial.lease import Lease
    from quartet_plugin.tuner.config import default_run_name, placement_of, read_config, with_launcher
    from quartet_plugin.tuner.context import TuningContext
    from quartet_plugin.tuner.coordinator import Coordinator
    from quartet_plugin.tuner.disk_reserve import DiskReserve
    from quartet_plugin.tuner.gpu_settings import check_gpu_settings
    from quartet_plugin.tuner.history import read_history
    from quartet_plugin.tuner.layer_builder import check_layer_builder
    from quartet_plugin.tuner.proposer import keep_machine, machine_of
    from quartet_plugin.tuner.run_folder import (
        RunFolder,
        begun_run,
        create_run,
        prepare_folder,
        resume_run,
    )
    from quartet_plugin.tuner.schedule_files import check_schedule_files, keep_schedule_files
    from quartet_plugin.tuner.trial_backend import LocalBackend
    from quartet_plugin.tuner.tune_result import write_best

    words = user_command(ctx)
    earlier_folder = None if earlier_run is None else find_run(earlier_run, run_dir=run_dir)
    check_versions()
    training = parse_command(words)
    with_options = partial(with_launcher, launcher=launcher, trial_nodes=trial_nodes, site=site, nodes=nodes)
    asked = with_options(read_config(config)).with_options(run=name, trials=trials)
    path = run_dir / (asked.run or default_run_name((training.target,), arguments=training.arguments))
    cwd = Path.cwd()
    if is_requeued(path):
        resume, takeover = True, True
    if resume:
        if config is None:
            begun = begun_run(path, config=None, command=None)
            asked = with_options(begun.config).with_options(run=None, trials=trials)
        resumed = begun_run(path, config=asked, command=words)
        asked, cwd = resumed.config, resumed.cwd
        training = parse_command(words, cwd=cwd)
    check_installed(asked.study.sampler)
    placement = placement_of(asked, cwd=cwd)
    training = placement.command(training)
    if not resume:
        check_start(training, cwd=cwd, environment=os.environ)
        machine_of(asked.machine, cwd=cwd)
        check_schedule_files(asked.search, command=training, cwd=cwd)
        check_layer_builder(asked.search, command=training, cwd=cwd)
        check_gpu_settings(asked, environment=os.environ)
        slices_of(asked, num_workers=workers, command=training, oversubscribe=oversubscribe)
    if dry_run:
        from quartet_plugin.cli.dry_run import dry_run_lines, dry_run_record

        if as_json:
            content = dry_run_record(
                asked, command=training, placement=placement, path=path, is_resumed=resume
            )
            typer.echo(json.dumps(content, indent=1))
            return
        show(*dry_run_lines(asked, command=training, placement=placement, path=path, is_resumed=resume))
        return
    folder = prepare_folder(path, is_resumed=resume)
    with (
        failure_reported(folder),
        Lease.acquire(folder, takeover=takeover) as lease,
        DiskReserve(folder) as kept,
    ):
        if resume:
            run = resume_run(folder, config=asked, command=words)
        else:
            keep_machine(asked.machine, cwd=cwd, folder=RunFolder(path=folder))
            keep_schedule_files(asked.search, cwd=cwd, folder=RunFolder(path=folder))
            run = create_run(folder, config=asked.model_copy(update={"run": path.name}), command=words)
        slices = slices_of(run.config, num_workers=workers, command=training, oversubscribe=oversubscribe)
        first_slice = slices[0] if slices else None
        with (
            reporter(Console()) as shown,
            stop_on_signals(shown.message) as should_stop,
            LocalBackend(
                device_slice=first_slice,
                nodes_launcher=placement.launcher_on(first_slice),
                warm_starts=run.config.trial.warm_starts == "auto",
                fence=lease.check,
            ) as backend,
        ):
            shown.message(f"run {run.name} in {path}; the command: {shlex.join(masked_argv(words))}")
            if placement.batch_divisor > 1:
                shown.message(placement.share_words)
            observer: Observer = shown
            if run.config.study.tensorboard:
                observer = Scalars(shown, run.folder.path / "tensorboard")
            context = TuningContext.create(
                run,
                command=training,
                backend=backend,
                observer=observer,
                should_stop=should_stop,
                fence=lease.check,
                max_minutes=max_minutes,
            )
            at_once = () if workers is None else slices
            coordinator = Coordinator(
                context,
                earlier_run=earlier_folder,
                slices=at_once,
                make_room=kept.drop,
                full_size=full_size_nodes(run.config, placement=placement, words=words),
            )
            with compilation_notice(shown.message):
                result = coordinator.tune()
        plan = write_best(result, run=run)
        native = write_native(plan, run=run)
    for line in summary_lines(result, plan=plan, run=run):
        show(line)
    show(*expense_lines(read_history(run.folder.path)))
    if native:
        show(f"native    {native}")
    show(report_line(run.folder.path, storage=run.storage))


def is_requeued(path: Path) -> bool:
    """Whether Slurm has started this very job again, its first tuner being gone, and the run is there."""
    from quartet_plugin.tuner.run_folder import RunFolder

    is_again = os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    return is_again and RunFolder(path=path).config_file.is_file()


@contextlib.contextmanager
def failure_reported(folder: Path) -> Iterator[None]:
    """A search that ends without a plan leaves its report too: it has every reason."""
    from quartet_plugin.cli.report import report_line
    from quartet_plugin.errors import InfeasibleError, InfrastructureError
    from quartet_plugin.tuner.run_folder import RunFolder

    try:
        yield
    except (InfeasibleError, InfrastructureError):
        if RunFolder(path=folder).has_study:
            show(report_line(folder))
        raise


def summary_lines(result: "TuneResult", *, plan: "Plan | None", run: "TuningRun") -> list[str]:
    """What the search found, and how to train with it."""
    from quartet_plugin.cli.full_size import full_size_lines
    from quartet_plugin.model.receipt import receipt_path
    from quartet_plugin.report.final_choice import choice_lines
    from quartet_plugin.report.plan_difference import difference_lines
    from quartet_plugin.report.tables import change_lines, comparison_lines
    from quartet_plugin.space.plan_label import plan_label
    from quartet_plugin.tuner.winner_choice import NEAREST_RULE

    baseline = _baseline_words(result)
    best = f"plan      {path_here(run.folder.best_plan)}"
    train = f"train     sh {path_here(run.folder.best_command)}"
    if plan is None or result.winner is None:
        tried = [trial for trial in result.trials if trial.record.repeats is None][1:]
        failed = sum(trial.record.verdict != "measured" for trial in tried)
        note = f" ({failed} could not be measured, see {path_here(run.folder.events_file)})" if failed else ""
        lines = [f"no better plan was found: {len(tried)} plans were tried{note}; keep {baseline}"]
        explained = []
        if result.rankings:
            number = result.rankings[0].trial.number
            label = plan_label(result.rankings[0].trial.plan)
            lines.append(f"nearest   trial {number} (not proven faster), {label}")
            lines.append(f"          {NEAREST_RULE}")
            lines += comparison_lines(result.rankings[0].comparison, names=("baseline", f"trial {number}"))
            explained = [explain_line(run, trial=number)]
        stand_in = [] if result.stand_in is None else [best, train]
        return [*lines, *study_lines(result), *explained, *stand_in]
    proof = []
    if result.receipt is not None:
        path = path_here(receipt_path(run.folder.best_plan))
        proof = [f"parity    passed: {result.receipt.agreement}; receipt {path}"]
    full_size = [] if result.full_size is None else full_size_lines(result.full_size.result, run=run)
    return [
        f"trial {result.winner.trial.number} is faster than {baseline}",
        *difference_lines(plan),
        *comparison_lines(result.winner.comparison, names=("baseline", "best")),
        *choice_lines(plan),
        *change_lines(plan),
        *study_lines(result, plan=plan),
        *proof,
        explain_line(run),
        best,
        *(full_size or [train]),
    ]


def _baseline_words(result: "TuneResult") -> str:
    from quartet_plugin.report.launch_words import COMMAND, STAND_IN

    return COMMAND if result.stand_in is None else STAND_IN


def explain_line(run: "TuningRun", *, trial: int | None = None) -> str:
    """The command that shows which part of an iteration a plan makes shorter."""
    words = [path_here(run.folder.path), *(() if trial is None else ("--trial", str(trial)))]
    return f"explain   quartet explain {shlex.join(words)}"


def study_lines(result: "TuneResult", *, plan: "Plan | None" = None) -> list[str]:
    """What the trials were spent on, by class of change, how the machine drifted, and what was missed."""
    from collections import Counter

    from quartet_plugin.report.drift_words import drift_lines
    from quartet_plugin.report.shape_curve import shape_lines
    from quartet_plugin.report.status import WINNER, regret_lines
    from quartet_plugin.report.tables import changes

    tried = [trial.plan for trial in result.trials[1:] if trial.record.repeats is None]
    classes = Counter(max((c.change_class for c in changes(plan)), default="A") for plan in tried)
    parts = [f"class {name} {100 * count / len(tried):.0f} %" for name, count in sorted(classes.items())]
    lines = [f"tried     {len(tried)} plans: {', '.join(parts)}"] if tried else []
    lines += drift_lines(result.drift_checks)
    if result.regret is not None:
        compared_with = _baseline_words(result) if result.winner is None else WINNER
        lines += regret_lines(result.regret, compared_with=compared_with, checks=result.drift_checks)
    if result.shape_curve is not None:
        lines += shape_lines(result.shape_curve, winner=plan)
    return lines


def check_versions() -> None:
    """Raise SeamError where a library is installed in a version outside of the declared range.

    One that is not installed is another matter: whatever needs it says so.
    """
    from packaging.requirements import Requirement

    try:
        declared = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return  # run from a source tree that was never installed: nothing is declared
    for requirement in map(Requirement, declared):
        name = requirement.name.lower()
        if name not in CHECKED_LIBRARIES:
            continue
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            raise SeamError(
                f"{name} {installed}: not supported, must be {requirement.specifier}; "
                f"pip install '{name}{requirement.specifier}'"
            )
