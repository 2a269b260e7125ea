"""`quartet plan`: the best layouts of a described job, without running anything."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from quartet_plugin.search.planner.ranking import Ranked, Ranking


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @app.command("plan")
    def plan(
        ctx: typer.Context,
        job: Annotated[
            Path, typer.Argument(metavar="JOB.yaml", help="Model, cluster and batch.", show_default=False)
        ],
        output: Annotated[
            Path,
            typer.Option("-o", "--output", metavar="PLAN.json", help="The best plan.", show_default=False),
        ],
        top: Annotated[
            int, typer.Option(min=1, max=100, help="Also write PLAN.2.json to PLAN.K.json.", metavar="K")
        ] = 1,
        exhaustive: Annotated[
            bool, typer.Option("--exhaustive", help="Predict every layout; no bound rules any out.")
        ] = False,
        hardware: Annotated[
            Path | None,
            typer.Option(metavar="FOLDER", help="Device files of your own, before the library's."),
        ] = None,
    ) -> None:
        """Rank every legal layout of JOB.yaml by predicted iteration time, under the memory limit."""
        from quartet_plugin.cli.invocation import refuse_user_command
        from quartet_plugin.cost.devices import read_folder
        from quartet_plugin.model.plan import write_plan
        from quartet_plugin.search.planner.job import read_job
        from quartet_plugin.search.planner.plans import plain_layout, plan_of
        from quartet_plugin.search.planner.ranking import rank

        refuse_user_command(ctx)
        read = read_job(job, devices=None if hardware is None else read_folder(hardware))
        found = rank(read, top=top, exhaustive=exhaustive)
        plain = plain_layout(read, best=found.best[0])
        for place, ranked in enumerate(found.best, start=1):
            path = output if place == 1 else output.with_name(f"{output.stem}.{place}{output.suffix}")
            write_plan(plan_of(read, ranked, plain=plain, name=job.stem, place=place), path=path)
            typer.echo(f"{place}. {path}: {_line(ranked)}")
            typer.echo(f"   {_terms(ranked)}")
        typer.echo(f"plain: {plain.layout.label}: {plain.iteration_s:.4g} s an iteration")
        typer.echo(_counts(found))


def _line(ranked: "Ranked") -> str:
    layout = ranked.layout
    options = f"recompute {layout.recompute}" + (
        ", sharded optimizer" if layout.distributed_optimizer else ""
    )
    return (
        f"{ranked.iteration_s:.4g} s an iteration, {layout.label}, {options}, "
        f"{ranked.memory.total / 2**30:.1f} GiB of {ranked.memory.available / 2**30:.1f}"
    )


def _terms(ranked: "Ranked") -> str:
    """The terms that cost anything, the largest first."""
    terms = sorted(ranked.terms.items(), key=lambda item: -item[1])
    return ", ".join(f"{name.removesuffix('_s')} {value:.4g} s" for name, value in terms if value > 0)


def _counts(found: "Ranking") -> str:
    return (
        f"{found.num_considered} layouts: {found.num_predicted} predicted, {found.num_too_large} do not fit "
        f"in memory, {found.num_pruned} cannot be faster"
    )
