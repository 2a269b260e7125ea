"""`quartet batch`: many tuning runs by one file, and where they are."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from quartet_plugin.cli.command import JsonSwitch, check_seconds, path_here
from quartet_plugin.cli.output import say, show
from quartet_plugin.cli.signals import stop_on_signals
from quartet_plugin.errors import (
    ConfigError,
    IncompleteError,
    InterruptedByUserError,
    StorageError,
    UsageError,
)

if TYPE_CHECKING:
    from quartet_plugin.batch.config import Batch
    from quartet_plugin.model.batch import BatchPaths, BatchResults
    from quartet_plugin.trial.lease import Lease
    from quartet_plugin.tuner.config import TuneConfig

BATCHES = Path("batches")
PLAN_SUFFIX = "-plan"
# Without the working folder among the modules: a job's own files are not this program's.
PROGRAM = (sys.executable, "-P", "-c", "from quartet_plugin.cli.main import entry; entry()")
_DEFAULT = "run"


class DefaultGroup(TyperGroup):
    """The command `run` needs no word: `quartet batch JOBS.yaml` is `quartet batch run JOBS.yaml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command's name before words that begin with none."""
        helps = ctx.help_option_names
        if args and args[0] not in self.commands and args[0] not in helps:
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)


batch_command = typer.Typer(
    name="batch",
    cls=DefaultGroup,
    help="Tune many jobs from one file: `quartet batch JOBS.yaml`, and `quartet batch status FOLDER`.",
    no_args_is_help=True,
)


@batch_command.command("run")
def run_command(
    jobs: Annotated[Path, typer.Argument(metavar="JOBS.yaml", help="The jobs.", show_default=False)],
    batch_dir: Annotated[
        Path, typer.Option("--batch-dir", help="The folder that contains the batches.")
    ] = BATCHES,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a batch that was stopped.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="With --resume: also start failed jobs again.")
    ] = False,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Take over a batch whose process on another host was lost.")
    ] = False,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Let the planner rank each job; start nothing.")
    ] = False,
) -> None:
    """Tune every job of a file, one or several at a time; a failed job does not stop the others."""
    from rich.console import Console

    from quartet_plugin.batch.config import read_batch
    from quartet_plugin.batch.runner import BatchRunner
    from quartet_plugin.model.batch import BatchPaths
    from quartet_plugin.model.files import remove_torn
    from quartet_plugin.report.batch_live import batch_observer
    from quartet_plugin.report.batch_table import table_lines

    if retry_failed and not resume:
        raise UsageError("--retry-failed: works only with a stopped batch; add --resume")
    batch = read_batch(jobs)
    configs = _configs_of(batch)
    _collect_secrets(batch)
    if plan_only:
        batch = replace(batch, name=f"{batch.name[: 100 - len(PLAN_SUFFIX)]}{PLAN_SUFFIX}")
    paths = BatchPaths((batch_dir / batch.name).absolute())
    cwd = _prepare(paths, batch, is_resumed=resume, is_plan_only=plan_only)
    with (
        _lease_of(paths, takeover=takeover) as lease,
        batch_observer(Console()) as observer,
        stop_on_signals(observer.message) as should_stop,
    ):
        remove_torn(paths.path)
        runner = BatchRunner(
            batch,
            paths=paths,
            cwd=cwd,
            configs=configs,
            program=PROGRAM,
            observer=observer,
            should_stop=should_stop,
            fence=lease.check,
            write=lambda results: write_files(results, paths),
            is_plan_only=plan_only,
            retries_failed=retry_failed,
            takes_over=takeover,
        )
        observer.message(f"batch {batch.name} in {path_here(paths.path)}: {len(batch.jobs)} jobs")
        results = runner.run()
        is_stopped = should_stop()
    show(*table_lines(results))
    show(f"results   {path_here(paths.results_file)}, results.csv, report.html")
    _raise_for(results, is_stopped=is_stopped)


@batch_command.command("status")
def status_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A batch's folder, or its name.")],
    batch_dir: Annotated[
        Path, typer.Option("--batch-dir", help="The folder that contains the batches.")
    ] = BATCHES,
    as_json: JsonSwitch = False,
    watch_s: Annotated[
        float | None,
        typer.Option("--watch", metavar="SECONDS", min=0.5, help="Repeat the output until the batch ends."),
    ] = None,
) -> None:
    """Show every job: state, trials, best plan, speedup and the time left."""
    from quartet_plugin.model.batch import BatchPaths

    path = folder if (folder / "batch.json").is_file() else batch_dir / folder
    if not (path / "batch.json").is_file():
        raise ConfigError(f"{folder}: no such batch, here or in {batch_dir}; name a folder that it wrote")
    paths = BatchPaths(path)
    if watch_s is not None:
        check_seconds("--watch", watch_s, least=0.5)
    while _show_status(paths, as_json=as_json) in ("running", "elsewhere") and watch_s is not None:
        time.sleep(watch_s)
        if not as_json:
            say("")


def _show_status(paths: "BatchPaths", *, as_json: bool) -> str:
    """Show one batch and return its state."""
    from quartet_plugin.batch.results import read_batch_state
    from quartet_plugin.model.schema import dump
    from quartet_plugin.report.batch_table import table_lines

    results = read_batch_state(paths)
    if as_json:
        typer.echo(json.dumps(dump(results), indent=1, allow_nan=False))
    else:
        show(*table_lines(results))
    return results.state


def write_files(results: "BatchResults", paths: "BatchPaths") -> None:
    """Write results.json, results.csv and report.html. Raises ConfigError or StorageError."""
    from quartet_plugin.model.files import write_text_atomic
    from quartet_plugin.model.schema import write_record
    from quartet_plugin.report.batch_page import batch_page
    from quartet_plugin.report.batch_table import csv_text

    write_record(results, path=paths.results_file)
    write_text_atomic(paths.table_file, csv_text(results))
    write_text_atomic(paths.page_file, batch_page(results))


def _configs_of(batch: "Batch") -> "dict[str, TuneConfig]":
    """The q.yaml of every job by the job's name, each file read once. Raises ConfigError."""
    from quartet_plugin.tuner.config import read_config

    read: dict[Path | None, TuneConfig] = {}
    for job in batch.jobs:
        if job.config not in read:
            read[job.config] = read_config(job.config)
    return {job.name: read[job.config] for job in batch.jobs}


def _collect_secrets(batch: "Batch") -> None:
    """Register the secrets of every command, so that they are masked from now on."""
    from quartet_plugin.protocol.masking import collect_secrets

    # Dashes between two commands: a flag at the end of one has no value in the next.
    collect_secrets([word for job in batch.jobs for word in (*job.words, "--")])


def _prepare(paths: "BatchPaths", batch: "Batch", *, is_resumed: bool, is_plan_only: bool) -> Path:
    """The folder that commands start in; the batch's folder is made where it begins.

    Raises ConfigError where a batch that begins is there already, or one to resume is not.
    """
    from quartet_plugin.batch.job_file import check_kept, read_batch_file

    here = path_here(paths.path)
    if is_resumed:
        if not paths.batch_file.is_file():
            raise ConfigError(f"{here}: no batch to resume; omit --resume to start one")
        begun = read_batch_file(paths)
        if begun.is_plan_only != is_plan_only:
            words = _with(begun.is_plan_only)
            raise ConfigError(f"{here}: the batch was started {words}; resume it the same way")
        check_kept(begun, batch, paths=paths)
        return Path(begun.cwd)
    if paths.batch_file.exists():
        raise ConfigError(
            f"{here}: the batch exists; add --resume to continue it, or choose another `batch:`"
        )
    try:
        paths.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        paths.runs.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{here}: cannot be created: {error.strerror}; name a folder that can with --batch-dir"
        ) from error
    return Path.cwd()


def _with(is_plan_only: bool) -> str:
    return f"with{'' if is_plan_only else 'out'} --plan-only"


def _lease_of(paths: "BatchPaths", *, takeover: bool) -> "Lease":
    """The right to run the batch. Raises StorageError naming the process that has it."""
    from quartet_plugin.trial.lease import Lease
    from quartet_plugin.tuner.attempts import holder_of

    try:
        return Lease.acquire(paths.path, takeover=takeover, say=say)
    except StorageError as error:
        holder = holder_of(paths.path, now=time.time())
        if holder is None:
            raise
        raise StorageError(
            f"{path_here(paths.path)}: process {holder.pid} on {holder.host} runs this batch, renewed "
            f"{holder.renewed_s:.0f} s ago; wait for it, end it, or add --takeover if it can no longer run"
        ) from error


def _raise_for(results: "BatchResults", *, is_stopped: bool) -> None:
    """Raise where jobs are left or have failed: InterruptedByUserError or IncompleteError."""
    if is_stopped:
        raise InterruptedByUserError("stopped; `quartet batch JOBS.yaml --resume` continues it")
    counts = results.counts()
    failed = counts.pop("failed", 0)
    left = sum(count for state, count in counts.items() if state != "done")
    parts = [f"{failed} failed"] if failed else []
    parts += [f"{left} not done; --resume continues the batch"] if left else []
    if parts:
        raise IncompleteError(f"of {len(results.jobs)} jobs {', '.join(parts)}")
