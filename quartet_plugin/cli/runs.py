"""`quartet status`, `trials` and `repair`: where a run is, every trial of it, and mending its journal."""

import json
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quartet_plugin.cli.command import (
    RUNS,
    RunName,
    RunsFolder,
    all_runs,
    check_seconds,
    find_run,
    train_words,
)
from quartet_plugin.cli.output import say, show, tell
from quartet_plugin.errors import QuartetError, StorageError

if TYPE_CHECKING:
    from quartet_plugin.model.history import RunHistory, RunState
    from quartet_plugin.study.storage import StudyStorage
    from quartet_plugin.study.view import StudyView


class TableFormat(StrEnum):
    """The output formats of the list of trials."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    CSV = "csv"


def status_command(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run's folder or name. Default: all runs."),
    ] = None,
    run_dir: RunsFolder = RUNS,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object, or for several runs a list of JSON objects."),
    ] = False,
    watch_s: Annotated[
        float | None,
        typer.Option(
            "--watch",
            metavar="SECONDS",
            min=0.5,
            help="Repeat the output every N seconds until the run ends.",
        ),
    ] = None,
) -> None:
    """Show the state of a run, the remaining work, and the best plan so far."""
    if watch_s is None:
        _show_status(run, run_dir=run_dir, as_json=as_json)
        return
    check_seconds("--watch", watch_s, least=0.5)
    path = find_run(run, run_dir=run_dir)
    while _show_run(path, as_json=as_json) in ("running", "elsewhere"):
        time.sleep(watch_s)
        if not as_json:
            say("")


def _show_status(run: str | None, *, run_dir: Path, as_json: bool) -> None:
    several = all_runs(run_dir) if run is None else []
    if len(several) > 1:
        _show_runs(several, as_json=as_json)
    else:
        _show_run(find_run(run, run_dir=run_dir), as_json=as_json)


def _show_runs(paths: Sequence[Path], *, as_json: bool) -> None:
    """Show several runs, those that cannot be read with their faults."""
    from quartet_plugin.report.formatting import clean
    from quartet_plugin.report.status import status_line, status_record, unreadable_record
    from quartet_plugin.tuner.history import read_history

    records, lines, faults = [], [], []
    for path in paths:
        try:
            history = read_history(path)
        except QuartetError as error:
            records.append(unreadable_record(name=path.name, path=str(path), fault=str(error)))
            faults.append(f"{path.name}: {clean(str(error))}")
        else:
            records.append(status_record(history))
            lines.append(status_line(history))
    if as_json:
        typer.echo(json.dumps(records, indent=1))
        tell(*faults)
    else:
        show(*lines, *faults)


def _show_run(path: Path, *, as_json: bool) -> "RunState":
    """Show one run; returns its state."""
    from quartet_plugin.report.status import status_lines, status_record
    from quartet_plugin.tuner.history import open_run, read_history
    from quartet_plugin.tuner.study_remake import with_remake

    history = read_history(path)
    run = open_run(path)
    with_remake(run.storage, run.folder)[0].check()
    if as_json:
        typer.echo(json.dumps(status_record(history), indent=1))
    else:
        script = run.folder.train_command
        train = [f"train     {train_words(script)}"] if script.is_file() else []
        show(*status_lines(history), *train)
    return history.state


def trials_command(
    run: RunName = None,
    run_dir: RunsFolder = RUNS,
    form: Annotated[
        TableFormat,
        typer.Option("-f", "--format", help="Print a table, or data for programs.", show_default=True),
    ] = TableFormat.TABLE,
) -> None:
    """List every trial: plan, class, outcome, times, memory, prediction, and why a trial was refused."""
    history, _, fault = read_whole(find_run(run, run_dir=run_dir))
    from quartet_plugin.report.trial_table import csv_text, records, table_lines

    if form is TableFormat.TABLE:
        show(*table_lines(history))
    elif form is TableFormat.CSV:
        typer.echo(csv_text(history), nl=False)
    elif form is TableFormat.JSON:
        typer.echo(json.dumps(records(history), indent=1))
    else:
        import yaml

        text = yaml.safe_dump(records(history), sort_keys=False, allow_unicode=False, width=110)
        typer.echo(text.rstrip("\n"))
    if fault is not None:
        raise StorageError(f"{fault}; the list shows the trials found in the folders")


def read_whole(
    path: Path, *, storage: "StudyStorage | None" = None
) -> "tuple[RunHistory, StudyView | None, StorageError | None]":
    """The run in `path` with its study; if the study cannot be read, the folder's contents and the error.

    `storage` is where the study is, for a caller that knows its password.
    """
    from quartet_plugin.study.view import read_study
    from quartet_plugin.tuner.history import open_run, read_history

    fault, study = None, None
    try:
        study = read_study(storage or open_run(path).storage)
    except StorageError as error:
        fault = error
    return read_history(path, study=study), study, fault


def repair_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder or name.", show_default=False)],
    run_dir: RunsFolder = RUNS,
) -> None:
    """Truncate a journal before its damage; `tune --resume` restores the rest from the trials' folders."""
    from dataclasses import replace

    from quartet_plugin.trial.lease import Lease
    from quartet_plugin.tuner.history import open_run

    path = find_run(run, run_dir=run_dir)
    storage = replace(open_run(path).storage, say=say)
    with Lease.acquire(path, say=say):
        lost = storage.repair()
    show("continue with `quartet tune --resume`" if lost else "nothing is damaged")
