"""`quartet status`: where a run is, while it runs or after."""

import json
from pathlib import Path
from typing import Annotated

import typer

from quartet_plugin.cli.invocation import refuse_user_command
from quartet_plugin.errors import QuartetError


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @app.command("status")
    def _status(
        ctx: typer.Context,
        run: Annotated[
            str | None, typer.Argument(metavar="[RUN]", help="A run's folder or name; all without one.")
        ] = None,
        run_dir: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs"),
        as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    ) -> None:
        """Show what a run does now, what is left, and the best so far; only reads."""
        refuse_user_command(ctx)
        typer.echo("\n".join(status(run, run_dir=run_dir, as_json=as_json)))


def status(name: str | None, *, run_dir: Path, as_json: bool) -> list[str]:
    """The lines to print: one run in full, or each in a line.

    Raises ConfigError where there is no such run, StorageError where its study is damaged.
    """
    from quartet_plugin.cli.runs import all_runs, find_run
    from quartet_plugin.report.status import status_line, status_lines, status_record
    from quartet_plugin.report.words import clean
    from quartet_plugin.tuner.history import open_run, read_history

    several = all_runs(run_dir) if name is None else []
    if len(several) > 1:
        histories, faults = [], []
        for path in several:
            try:
                histories.append(read_history(path))
            except QuartetError as error:
                faults.append(f"{path.name}: {clean(str(error))}")
        if as_json:
            return [json.dumps([status_record(one) for one in histories], indent=1)]
        return [*(status_line(one) for one in histories), *faults]
    path = find_run(name, run_dir=run_dir)
    history = read_history(path)
    open_run(path).storage.check()
    return [json.dumps(status_record(history), indent=1)] if as_json else status_lines(history)
