"""`quartet show`: a plan for reading."""

from pathlib import Path
from typing import Annotated

import typer

from quartet_plugin.cli.invocation import refuse_user_command


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @app.command("show")
    def _show(
        ctx: typer.Context,
        plan: Annotated[Path, typer.Argument(help="A plan file.", show_default=False)],
    ) -> None:
        """Show a plan: what it is for, what it changes and how far, what it gained."""
        from quartet_plugin.model.plan import read_plan
        from quartet_plugin.report.tables import plan_lines

        refuse_user_command(ctx)
        for line in plan_lines(read_plan(plan)):
            typer.echo(line)
