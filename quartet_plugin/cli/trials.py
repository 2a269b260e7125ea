"""`quartet trials`: every trial of a run, for people and for programs."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quartet_plugin.cli.invocation import refuse_user_command
from quartet_plugin.errors import StorageError

if TYPE_CHECKING:
    from quartet_plugin.model.history import RunHistory


class TableFormat(StrEnum):
    """How trials are printed."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @app.command("trials")
    def _trials(
        ctx: typer.Context,
        run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="A run's folder or name.")] = None,
        run_dir: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs"),
        form: Annotated[
            TableFormat, typer.Option("-f", "--format", help="A table, or data.", show_default=True)
        ] = TableFormat.TABLE,
    ) -> None:
        """List every trial: plan, class, outcome, times, memory, prediction, reason of a refusal."""
        from quartet_plugin.cli.runs import find_run

        refuse_user_command(ctx)
        history, fault = read_whole(find_run(run, run_dir=run_dir))
        typer.echo(text_of(history, form=form))
        if fault is not None:
            raise fault


def read_whole(path: Path) -> "tuple[RunHistory, StorageError | None]":
    """The run with its study; where that cannot be read, what the folder alone says, and the fault."""
    from quartet_plugin.study.view import read_study
    from quartet_plugin.tuner.history import open_run, read_history

    fault, study = None, None
    try:
        study = read_study(open_run(path).storage)
    except StorageError as error:
        fault = StorageError(f"{error}; shown is what the trials' folders hold")
    return read_history(path, study=study), fault


def text_of(history: "RunHistory", *, form: TableFormat) -> str:
    """The trials in the form that was asked for."""
    from quartet_plugin.report.trial_table import records, table_lines

    if form is TableFormat.TABLE:
        return "\n".join(table_lines(history))
    if form is TableFormat.JSON:
        return json.dumps(records(history), indent=1)
    import yaml

    return yaml.safe_dump(records(history), sort_keys=False, allow_unicode=True, width=110).rstrip("\n")
