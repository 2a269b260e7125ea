"""`quartet repair`: keeps what is whole of a damaged journal."""

from pathlib import Path
from typing import Annotated

import typer

from quartet_plugin.cli.invocation import refuse_user_command


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @app.command("repair")
    def _repair(
        ctx: typer.Context,
        run: Annotated[
            str, typer.Argument(metavar="RUN", help="A run's folder or name.", show_default=False)
        ],
        run_dir: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs"),
    ) -> None:
        """Cut a study's journal off at its first damage; a resumed run tells the rest from its folders."""
        from quartet_plugin.cli.runs import find_run

        refuse_user_command(ctx)
        for line in repair(find_run(run, run_dir=run_dir)):
            typer.echo(line)


def repair(path: Path) -> list[str]:
    """What was done. Raises ConfigError for a study that is no journal, StorageError while a tuner runs."""
    from dataclasses import replace

    from quartet_plugin.trial.lease import Lease
    from quartet_plugin.tuner.history import open_run

    said: list[str] = []
    storage = replace(open_run(path).storage, say=said.append)
    with Lease.acquire(path):
        lost = storage.repair()
    return [*said, "go on with `quartet tune --resume`"] if lost else ["nothing is damaged"]
