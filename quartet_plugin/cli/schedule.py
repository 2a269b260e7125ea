"""`quartet schedule`: search, name, simulate, bound and draw pipeline schedules; no torch, no processes."""

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    group = typer.Typer(name="schedule", help="Pipeline schedules.", no_args_is_help=True)
    app.add_typer(group)

    @group.callback()
    def _group() -> None:
        pass
