"""`quartet schedule`: search, name, simulate, bound and draw pipeline schedules; no torch, no processes."""

import gc
import json
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from quartet_plugin.cli.command import JsonSwitch, check_folder, invocation, refuse_user_command
from quartet_plugin.cli.output import show
from quartet_plugin.cli.schedule_steps import (
    AUTO,
    EVEN,
    CommandClock,
    SearchProgress,
    at_uniform_costs,
    check_effort,
    figures,
    fixed_placement,
    layers_of,
    num_stages,
    parse_chunks,
    parse_placement,
    parse_split,
    picture,
    quick_bound,
    simulated,
    write_trace,
)
from quartet_plugin.errors import ExitCode, QuartetError, UsageError


class Objective(StrEnum):
    """What a search makes small."""

    MAKESPAN = "makespan"
    PERIOD = "period"


class ScheduleFormat(StrEnum):
    """What a schedule is exported as."""

    CSV = "csv"
    JSON = "json"
    TEXT = "text"
    PNG = "png"
    TRACE = "trace"


CostsPath = Annotated[Path, typer.Argument(metavar="COSTS.json", help="The cost table.", show_default=False)]
SchedulePath = Annotated[
    Path, typer.Argument(metavar="SCHEDULE.json", help="The schedule.", show_default=False)
]
OutputPath = Annotated[
    Path, typer.Option("-o", "--output", metavar="FILE", help="The file to write.", show_default=False)
]
Placement = Annotated[
    str,
    typer.Option(
        "--placement",
        metavar="NAME",
        help="auto, linear, loop, v, snake, or the device of each stage: 0,1,1,0.",
    ),
]
Chunks = Annotated[str, typer.Option("--chunks", metavar="N", help="Number of stages per device, or auto.")]
Split = Annotated[
    str, typer.Option("--split", metavar="COUNTS", help="Layers of each stage: 3,2,2; or auto, or even.")
]
AllowEmpty = Annotated[
    bool,
    typer.Option("--allow-empty", help="Allow stages without layers; such schedules can only be simulated."),
]


schedule_command = typer.Typer(
    name="schedule",
    help="Search, name, simulate, bound and draw pipeline schedules.",
    no_args_is_help=True,
    callback=refuse_user_command,
)


@schedule_command.command()
def search(
    ctx: typer.Context,
    costs: CostsPath,
    output: OutputPath,
    placement: Placement = AUTO,
    chunks: Chunks = AUTO,
    split: Split = AUTO,
    objective: Annotated[
        Objective,
        typer.Option(
            metavar="NAME",
            help="The time to minimize: makespan or period. Only makespan refines single orders.",
        ),
    ] = Objective.MAKESPAN,
    time_limit: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Time limit of the whole command, in seconds.  [default: none; --evaluations limits]",
        ),
    ] = None,
    evaluations: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of evaluations; the result then depends only on --seed.  "
            "[default: by problem size, seconds on two idle cores]",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of all random choices.")] = 0,
    allow_empty: AllowEmpty = False,
) -> int:
    """Search split, placement and order for a cost table; Ctrl-C writes the best so far."""
    check_effort(time_limit=time_limit, evaluations=evaluations, seed=seed)
    check_folder(output)
    places, count, counts = parse_placement(placement), parse_chunks(chunks), parse_split(split)
    from quartet_plugin.cli.signals import is_interruption
    from quartet_plugin.report.summary import schedule_summary
    from quartet_plugin.schedule.compilation import compilation_time
    from quartet_plugin.schedule.files import read_costs, write_schedule
    from quartet_plugin.schedule.search import search as run_search

    table = read_costs(costs)
    fixed = fixed_placement(table, places, count)
    if not isinstance(counts, str):
        counts = layers_of(counts, table, num_stages(table, fixed, count), allow_empty=allow_empty)
    clock = CommandClock(invocation(ctx).started_s, time_limit)
    with compilation_time() as compiling:
        proven = quick_bound(table, fixed, counts, count, allow_empty=allow_empty)
    limit = clock.left_s(compiled_s=compiling())
    progress, is_interrupted = SearchProgress(proven), False
    try:
        result = run_search(
            table,
            placement=places,
            chunks=count,
            split=counts,
            objective=objective.value,
            time_limit_s=limit,
            evaluations=evaluations,
            seed=seed,
            allow_empty=allow_empty,
            lower_bound_s=proven or 0.0,
            on_round=progress,
        )
    except (KeyboardInterrupt, SystemError) as error:
        if progress.result is None or not is_interruption(error):
            raise
        result, is_interrupted = progress.result, True
    write_schedule(output, result.schedule, predicted=figures(result.simulation))
    best = None if result.named_best is None else (result.named_best.label, result.named_best.score_s)
    summary = schedule_summary(
        result.schedule,
        result.simulation,
        memory_limit_bytes=table.memory_limit_bytes,
        lower_bound_s=max(proven or 0.0, result.lower_bound_s) or None,
        best_named=best,
        objective=objective.value,
    )
    show(*summary.split("\n"), "")
    show(f"{result.num_evaluations} evaluations in {result.elapsed_s:.1f} s; wrote {output}")
    gc.freeze()  # or the interpreter walks all objects once more before it ends, up to half a second
    return ExitCode.INTERRUPTED if is_interrupted else ExitCode.DONE


@schedule_command.command()
def named(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A name that `quartet schedule list` shows.", show_default=False),
    ],
    costs: CostsPath,
    output: OutputPath,
    chunks: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of stages per device; the default depends on the schedule."),
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Microbatches that a chunk runs before the next chunk starts (interleaved)."
        ),
    ] = None,
    overlap: Annotated[
        bool,
        typer.Option(
            "--overlap",
            help="With overlapped pairs of a forward and a backward (interleaved, dualpipev, dualpipe).",
        ),
    ] = False,
    split: Split = EVEN,
    allow_empty: AllowEmpty = False,
) -> None:
    """Write a schedule of the literature for a cost table."""
    counts = parse_split(split)
    from quartet_plugin.report.summary import schedule_summary
    from quartet_plugin.schedule.files import read_costs, write_schedule
    from quartet_plugin.schedule.named import named as make_named
    from quartet_plugin.split.entries import balanced_entries

    table = read_costs(costs)
    order = make_named(
        name,
        num_devices=table.num_devices,
        num_microbatches=table.num_microbatches,
        num_chunks=chunks,
        group=group,
        with_pairs=overlap,
    )
    if counts == AUTO:
        layers = balanced_entries(table, order.placement, allow_empty=allow_empty)
    else:
        layers = layers_of(counts, table, order.num_stages, allow_empty=allow_empty)
    schedule = replace(order, layers_per_stage=layers)
    simulation = simulated(schedule, table)
    write_schedule(output, schedule, predicted=figures(simulation))
    show(*schedule_summary(schedule, simulation, memory_limit_bytes=table.memory_limit_bytes).split("\n"))


@schedule_command.command("list")
def list_named(
    devices: Annotated[int, typer.Option(metavar="P", min=1, max=64, help="Number of devices.")] = 8,
    microbatches: Annotated[
        int, typer.Option(metavar="M", min=1, max=1024, help="Number of microbatches.")
    ] = 32,
    as_json: JsonSwitch = False,
) -> None:
    """List the named schedules: chunks, makespan and memory at unit costs, and who can run them."""
    from quartet_plugin.report.summary import aligned
    from quartet_plugin.schedule.named import NAMED

    rows, records = [["name", "placement", "chunks", "backward", ">makespan", ">memory", "can be run"]], []
    for name, spec in NAMED.items():
        makespan, memory = _at_unit_costs(name, devices, microbatches)
        chunks = str(spec.num_chunks or "2 or more")
        rows.append(
            [
                name,
                "two copies" if spec.copies == 2 else spec.placement.value,
                "even" if spec.even_chunks else chunks,
                "split" if spec.split_backward else "full",
                "-" if makespan is None else f"{makespan:g}",
                "-" if memory is None else f"{memory:g}",
                "yes" if spec.executable else "simulate only",
            ]
        )
        records.append(
            {
                "name": name,
                "placement": spec.placement.value,
                "num_copies": spec.copies,
                "chunks": spec.num_chunks or None,
                "has_even_chunks": spec.even_chunks,
                "has_split_backward": spec.split_backward,
                "makespan": makespan,
                "memory": memory,
                "can_be_run": spec.executable,
            }
        )
    if as_json:
        content = {"schema_version": 1, "num_devices": devices, "num_microbatches": microbatches}
        typer.echo(json.dumps({**content, "schedules": records}, indent=1))
        return
    show(
        *aligned(rows),
        "",
        f"at {devices} devices and {microbatches} microbatches, when a device's share of one microbatch "
        "takes 1 for each of F, I and W;",
        "memory in such shares' activations, on the fullest device",
    )


@schedule_command.command()
def simulate(
    costs: CostsPath,
    schedule: SchedulePath,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="TRACE.json", help="Also write a trace for Perfetto.")
    ] = None,
) -> None:
    """Check a schedule and print its times and memory; refuse one that cannot run or does not fit."""
    from quartet_plugin.report.summary import schedule_summary
    from quartet_plugin.schedule.files import read_costs, read_schedule

    table, order = read_costs(costs), read_schedule(schedule)
    simulation = simulated(order, table)
    if trace is not None:
        write_trace(trace, order, simulation, table)
    if as_json:
        print(json.dumps({"schema_version": 1, **figures(simulation), "busy_s": simulation.busy_s.tolist()}))
    else:
        show(*schedule_summary(order, simulation, memory_limit_bytes=table.memory_limit_bytes).split("\n"))


@schedule_command.command()
def bound(
    costs: CostsPath,
    placement: Placement = AUTO,
    chunks: Chunks = AUTO,
    split: Split = AUTO,
    allow_empty: AllowEmpty = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the bound as JSON.")] = False,
) -> None:
    """Prove a lower bound on the makespan of every schedule with this placement and split."""
    places, count, counts = parse_placement(placement), parse_chunks(chunks), parse_split(split)
    from quartet_plugin.schedule.bound import lower_bound
    from quartet_plugin.schedule.files import read_costs

    table = read_costs(costs)
    fixed = fixed_placement(table, places, count)
    stages = num_stages(table, fixed, count)
    layers = None if counts == AUTO else layers_of(counts, table, stages, allow_empty=allow_empty)
    value = lower_bound(
        table, placement=fixed, layers_per_stage=layers, num_chunks=count, allow_empty=allow_empty
    )
    if as_json:
        print(json.dumps({"schema_version": 1, "makespan_s": value.makespan_s, "reason": value.reason}))
    else:
        show(f"makespan >= {value.makespan_s!r} s", *value.reason.split("\n"))


@schedule_command.command()
def export(
    schedule: SchedulePath,
    output: OutputPath,
    form: Annotated[
        ScheduleFormat,
        typer.Option(
            "--format",
            metavar="NAME",
            help="The output format: csv, json, text, png or trace.",
            show_default=False,
        ),
    ],
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="COSTS.json", help="The cost table: required for trace; without it png uses unit times."
        ),
    ] = None,
) -> None:
    """Write a schedule as CSV for PyTorch's pipelining, JSON, text, a picture or a trace."""
    if form is ScheduleFormat.TRACE and costs is None:
        raise UsageError("--format trace: needs times; add --costs COSTS.json")
    from quartet_plugin.model.files import write_bytes_atomic, write_text_atomic
    from quartet_plugin.schedule.files import entry_texts, read_costs, read_schedule, to_csv, write_schedule
    from quartet_plugin.schedule.validate import validate

    order = read_schedule(schedule)
    table = None if costs is None else read_costs(costs)
    simulation = None if table is None else simulated(order, table)
    if simulation is None:
        validate(order)
    if form is ScheduleFormat.CSV:
        write_text_atomic(output, to_csv(order))
    elif form is ScheduleFormat.JSON:
        write_schedule(output, order, predicted=None if simulation is None else figures(simulation))
    elif form is ScheduleFormat.TEXT:
        write_text_atomic(output, "".join(" ".join(row) + "\n" for row in entry_texts(order)))
    elif form is ScheduleFormat.PNG:
        write_bytes_atomic(output, picture(order, simulation))
    elif table is not None and simulation is not None:
        write_trace(output, order, simulation, table)
    show(f"wrote {output}")


def _at_unit_costs(name: str, devices: int, microbatches: int) -> tuple[float | None, float | None]:
    """Makespan and memory; None where the schedule does not exist for these numbers."""
    from quartet_plugin.schedule.named import named as make

    try:
        order = make(name, num_devices=devices, num_microbatches=microbatches)
        simulation = at_uniform_costs(order)
    except QuartetError:
        return None, None
    return simulation.makespan_s, float(simulation.peak_activation_bytes.max())
