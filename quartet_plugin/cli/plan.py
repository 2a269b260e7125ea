"""`quartet plan`: the best layouts of a described job, without running anything."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quartet_plugin.cli.command import CalibrationFile, HardwareFolder, constants_of, devices_of
from quartet_plugin.cli.output import show

if TYPE_CHECKING:
    from quartet_plugin.planner.layout_table import Refusal
    from quartet_plugin.planner.ranking import Ranked

MAX_REFUSALS = 12


def plan_command(
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
    refused: Annotated[
        bool, typer.Option("--refused", help="List which constraint refused how many layouts.")
    ] = False,
    hardware: HardwareFolder = None,
    calibration: CalibrationFile = None,
) -> None:
    """Rank every legal layout of JOB.yaml by predicted iteration time, under the memory limit."""
    from quartet_plugin.model.plan import write_plan
    from quartet_plugin.planner.job import read_job
    from quartet_plugin.planner.plans import plain_layout, plan_of
    from quartet_plugin.planner.ranking import best_plans, refusals

    request = read_job(job, devices=devices_of(hardware))
    constants = constants_of(calibration)
    ranking = best_plans(request, top=top, exhaustive=exhaustive, constants=constants)
    plain = plain_layout(request, best=ranking.best[0], constants=constants)
    for place, ranked in enumerate(ranking.best, start=1):
        path = output if place == 1 else output.with_name(f"{output.stem}.{place}{output.suffix}")
        write_plan(plan_of(request, ranked, plain=plain, name=job.stem, place=place), path=path)
        show(f"{place}. {path}: {_line(ranked)}")
        show(f"   {_terms(ranked) if place == 1 else _reason(ranked, ranking.best[0])}")
        if ranked.slots is not None:
            show(f"   {_mapping(ranked)}")
    show(f"plain: {plain.layout.label}: {plain.iteration_s:.4g} s an iteration")
    show(
        f"{ranking.num_considered} layouts: {ranking.num_predicted} predicted, "
        f"{ranking.num_too_large} do not fit in memory, {ranking.num_pruned} cannot be faster"
    )
    if refused:
        for line in _refusals(refusals(request, ranking)):
            show(line)


def _line(ranked: "Ranked") -> str:
    from quartet_plugin.cost.memory import distinct_numbers
    from quartet_plugin.report.explain import layout_words

    memory = ranked.memory
    total, available = distinct_numbers(memory.total / 2**30, memory.available / 2**30, digits=1)
    words = f"{ranked.iteration_s:.4g} s an iteration, {layout_words(ranked.layout)}"
    return f"{words}, {total} GiB of {available}"


def _terms(ranked: "Ranked") -> str:
    """The terms that cost anything, the largest first."""
    terms = sorted(ranked.terms.items(), key=lambda item: -item[1])
    return ", ".join(f"{name.removesuffix('_s')} {value:.4g} s" for name, value in terms if value)


def _reason(ranked: "Ranked", best: "Ranked") -> str:
    """Its seconds over the best plan's by term, the largest difference first."""
    from quartet_plugin.report.explain import differences

    slower = 100 * (ranked.equal_work_s / best.equal_work_s - 1)
    if ranked.shape != best.shape:
        return f"{slower:.1f} % slower for equal work, with another shape"
    terms = differences(ranked.terms, best.terms)
    return f"{slower:.1f} % slower: {terms}" if terms else "as fast"


def _mapping(ranked: "Ranked") -> str:
    """The best stock rank order's seconds, beside which the solved mapping stands."""
    stock = min((ranked.stock_s or {}).items(), key=lambda item: item[1], default=None)
    if stock is None:
        return "mapping solved; no stock order is legal"
    return f"mapping solved: the stock order {stock[0]} takes {stock[1]:.4g} s"


def _refusals(all_refusals: "list[Refusal]") -> list[str]:
    """A table of the constraints, those that refused most first."""
    from quartet_plugin.report.summary import aligned

    if not all_refusals:
        return ["refused: none"]
    degrees = [refusal for refusal in all_refusals if not refusal.reason.startswith("memory")]
    memory = [refusal for refusal in all_refusals if refusal.reason.startswith("memory")]
    lines = []
    for title, rows in (("refused degrees (TP x CP x PP)", degrees), ("layouts that do not fit", memory)):
        if rows:
            shown = [[str(refusal.count), refusal.reason] for refusal in rows[:MAX_REFUSALS]]
            lines += ["", *aligned([[">count", title], *shown])]
            hidden = sum(refusal.count for refusal in rows[MAX_REFUSALS:])
            lines += [f"(and {hidden} for other reasons)"] if hidden else []
    return lines
