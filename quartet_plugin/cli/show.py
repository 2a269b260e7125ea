"""`quartet show`: a plan for reading."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quartet_plugin.cli.invocation import refuse_user_command

if TYPE_CHECKING:
    from quartet_plugin.model.plan import Plan


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
        shown = read_plan(plan)
        for line in plan_lines(shown, baseline=baseline_of(shown, path=plan)):
            typer.echo(line)


def baseline_of(plan: "Plan", *, path: Path) -> "Plan | None":
    """The user's own configuration, where the plan still lies in its run's folder; None elsewhere."""
    from quartet_plugin.errors import QuartetError
    from quartet_plugin.search.job import baseline_plan, parse_job
    from quartet_plugin.search.launches import LocalLaunches
    from quartet_plugin.search.run_folder import RunFolder

    folder = RunFolder(path=path.absolute().parent.parent)
    if path.absolute().parent.name != "best" or not folder.config_file.is_file():
        return None
    try:
        result = LocalLaunches().recorded(folder.trial(0), plan_key=None)
        if result is None or result.job is None:
            return None
        job = parse_job(result.job, where=str(result.folder))
        baseline = baseline_plan(
            job, nodes=plan.made_for.nodes, run=plan.provenance.run, seed=plan.provenance.seed
        )
    except QuartetError:
        return None
    return baseline if baseline.made_for == plan.made_for else None
