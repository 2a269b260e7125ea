"""`quartet report`: a run as one HTML file, which needs no network and runs no script."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quartet_plugin.cli.command import RUNS, RunName, RunsFolder, find_run, path_here
from quartet_plugin.cli.output import show
from quartet_plugin.errors import QuartetError, StorageError

if TYPE_CHECKING:
    from quartet_plugin.model.history import RunHistory, TrialRow
    from quartet_plugin.model.plan import Plan
    from quartet_plugin.report.page import Picture
    from quartet_plugin.study.storage import StudyStorage

    # A name, a plan, and the seconds of its iteration.
    Step = tuple[str, Plan | None, float | None]

FILE_NAME = "report.html"


def report_command(
    run: RunName = None,
    run_dir: RunsFolder = RUNS,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="The file to write. Default: RUN/report.html."),
    ] = None,
) -> None:
    """Write a run's report.html: winner and baseline, every trial, memory, timelines, costs."""
    path = find_run(run, run_dir=run_dir)
    fault = write_report(path, output=output)
    show(f"wrote {output or path / FILE_NAME}")
    if fault is not None:
        raise fault


def write_report(
    path: Path, *, output: Path | None = None, storage: "StudyStorage | None" = None
) -> StorageError | None:
    """Write the report of the run in `path`; returns the error of its study if it could not be read.

    `storage` is where the study is, for a caller that knows its password.
    Raises ConfigError where there is no run or the file cannot be written, StorageError when the disk fails.
    """
    from quartet_plugin.cli.runs import read_whole
    from quartet_plugin.model.files import write_text_atomic
    from quartet_plugin.report.page import Extras, page

    history, study, fault = read_whole(path, storage=storage)
    extras = Extras(
        importance=study.importance if study else {},
        timelines=timelines(history, path=path),
        train=train_lines(history, path=path),
        flags=flag_lines(history.winner, path=path) if history.winner else (),
        parity=parity_words(path),
        fault=None if fault is None else str(fault),
    )
    write_text_atomic(output or path / FILE_NAME, page(history, extras))
    return fault


def timelines(history: "RunHistory", *, path: Path) -> "list[Picture]":
    """The simulated steps of the user's command and of the winner, and the winner's recorded step.

    Without a winner the best single trial stands for it. Only a custom schedule's ranks record a step.
    """
    plan, row = history.winner, history.best
    if plan is not None:
        row = history.row(plan.provenance.trial)
    elif row is not None:
        plan = row.plan if row.number > 0 else None
    if plan is None:
        return []
    pictures = _simulated([_own_step(history), ("the best plan", plan, _seconds_of(plan, row))])
    try:
        return pictures + _recorded(plan, row, path=path)
    except QuartetError:
        return pictures


def _own_step(history: "RunHistory") -> "Step":
    """The step of trial 0, scaled to the seconds of the final rounds if there were any."""
    row = history.baseline
    plan = None if row is None else row.plan
    measured = history.winner.measurement if history.winner and not history.baseline_note else None
    if measured is not None:
        return "your command", plan, measured.baseline.iteration_s.median
    return "your command", plan, None if row is None else row.iteration_s


def _seconds_of(plan: "Plan", row: "TrialRow | None") -> float | None:
    if plan.measurement is not None:
        return plan.measurement.plan.iteration_s.median
    return None if row is None else row.iteration_s


def _simulated(steps: "list[Step]") -> "list[Picture]":
    """The timelines of the steps that have a pipeline, on one scale of time."""
    from quartet_plugin.report.gantt import timeline
    from quartet_plugin.report.page import Picture
    from quartet_plugin.report.plan_timeline import simulated_plan

    made = []
    for name, plan, iteration_s in steps:
        if plan is None or iteration_s is None:
            continue
        try:
            simulated = simulated_plan(plan, iteration_s=iteration_s)
        except QuartetError:
            continue  # a plan that the simulator refuses has no timeline; its trial has said why
        if simulated is not None:
            made.append((name, plan, *simulated))
    without = [name for name, plan, _ in steps if plan is not None and plan.layout.pipeline_parallel == 1]
    span_s = max((simulation.makespan_s for _, _, _, simulation, _ in made), default=0.0)
    pictures: list[Picture] = []
    for name, plan, schedule, simulation, words in made:
        svg = timeline(schedule, simulation, label=f"Simulated timeline of {name}", span_s=span_s)
        if svg is not None:
            scale = "; on the scale of the timeline above" if pictures else ""
            flat = f"; {without[0]} has no pipeline, and so no timeline" if without else ""
            caption = f"{plan.schedule.label}, {words}{scale}{flat}."
            pictures.append(Picture(heading=f"Timeline of {name}", svg=svg, caption=caption))
    return pictures


def _recorded(plan: "Plan", row: "TrialRow | None", *, path: Path) -> "list[Picture]":
    from quartet_plugin.cli.trace import measurement_of, schedule_of
    from quartet_plugin.protocol.rank_files import read_actions
    from quartet_plugin.report.gantt import step_words, timeline
    from quartet_plugin.report.page import Picture
    from quartet_plugin.schedule.choice import relative_costs
    from quartet_plugin.schedule.simulate import simulate

    choice = plan.schedule.custom
    attempt = path / row.folder if row is not None and row.folder else None
    if choice is None or attempt is None or not any(attempt.glob("rank-*.actions.json")):
        return []
    records = read_actions(attempt)
    schedule = schedule_of(records, placement=choice.placement, num_microbatches=plan.num_microbatches)
    measured = measurement_of(records, simulate(schedule, relative_costs(choice).ratios))
    svg = timeline(schedule, measured, label="Measured timeline of the best plan")
    if svg is None:
        return []
    figures = step_words(measured.makespan_s, bubble_fraction=measured.bubble_fraction)
    caption = f"The last step of its trial as the ranks recorded it: {figures}."
    return [Picture(heading="The same step, measured", svg=svg, caption=caption)]


def train_lines(history: "RunHistory", *, path: Path) -> list[str]:
    """The command that trains with the winner."""
    import shlex

    from quartet_plugin.tuner.run_folder import RunFolder

    if history.winner is None:
        return []
    return [f"sh {shlex.quote(str(RunFolder(path=path).train_command))}"]


def parity_words(path: Path) -> str | None:
    """The parity gate's result for the winner; None if the gate was not run."""
    from quartet_plugin.model.receipt import read_receipt, receipt_path, worst_of

    receipt_file = receipt_path(path / "best" / "plan.json")
    if not receipt_file.exists():
        return None
    try:
        receipt = read_receipt(receipt_file)
    except QuartetError as error:
        return f"Its parity receipt cannot be read: {error}"
    loss, norm = worst_of(receipt.decisive_steps)
    by_layout = receipt.layout_reference
    stock = "stock's" if by_layout is None else f"that of stock under {by_layout.layout}"
    return (
        f"The parity gate {receipt.verdict}: over {len(receipt.steps)} steps from the same weights the loss "
        f"differs from {stock} by at most {loss:.1e} and the gradient norm by {norm:.1e}, relatively."
    )


def flag_lines(plan: "Plan", *, path: Path) -> list[str]:
    """The flags that express the plan without the plugin, or why there are none.

    A winner at full size has flags of its own; the script of the run is for the trials' nodes.
    """
    from quartet_plugin.cli.export import export, lines, native_path
    from quartet_plugin.model.plan import read_plan
    from quartet_plugin.tuner.run_folder import RunFolder

    full_plan, script = RunFolder(path=path).full_plan, native_path(path)
    begin = []
    try:
        if full_plan.is_file():
            plan = read_plan(full_plan)
        elif script.is_file():
            begin = [shlex.join(["sh", str(script)]), "", "# which adds to your command:"]
        return [*begin, *lines(export(plan))]
    except QuartetError as error:
        return [f"# {error}"]


def report_line(path: Path, *, storage: "StudyStorage | None" = None) -> str:
    """Write the report at the end of a run, and say where it is; an error here never fails the run."""
    try:
        write_report(path, storage=storage)
    except Exception as error:
        return f"report    not written: {error}; `quartet report {path}` tries again"
    return f"report    {path_here(path / FILE_NAME)}"
