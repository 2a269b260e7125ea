"""`quartet trace`: a trial's measured actions over the simulated ones, in one file for Perfetto."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quartet_plugin.cli.output import show
from quartet_plugin.errors import ConfigError

if TYPE_CHECKING:
    from quartet_plugin.model.costs import StageCosts
    from quartet_plugin.protocol.rank_files import ActionTimes
    from quartet_plugin.schedule.choice import RelativeCosts
    from quartet_plugin.schedule.schedule import Schedule
    from quartet_plugin.schedule.simulate import Simulation


def trace_command(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The folder of a run, a trial or an attempt.", show_default=False),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The file to write.")],
    trial: Annotated[
        int | None, typer.Option(min=0, help="The trial's number. Default: the trial of the best plan.")
    ] = None,
) -> None:
    """Write a trial's measured and simulated actions to one trace, and print the simulator's error.

    A plan knows only the ratios of its stages' times, so the simulated times are scaled until they sum to the
    measured compute time.
    """
    show(*trace(attempt_of(run, trial=trial), output))


def attempt_of(folder: Path, *, trial: int | None = None) -> Path:
    """The attempt's folder: `folder` itself, the last attempt of a trial's folder, or one in a run's folder.

    Raises ConfigError where nothing was measured, or nothing won and no trial is named.
    """
    from quartet_plugin.model.plan import read_plan
    from quartet_plugin.tuner.run_folder import RunFolder

    run = RunFolder(path=folder)
    if not run.trials.is_dir():
        if trial is not None:
            raise ConfigError(f"--trial {trial}: {folder} is no run's folder; name the run, or leave it out")
        return _last_attempt(folder)
    if trial is None:
        if not run.best_plan.is_file():
            raise ConfigError(f"{folder}: the run has no best plan; name one of its trials with --trial N")
        trial = read_plan(run.best_plan).provenance.trial
    place = run.trial(trial)
    if not place.is_dir():
        raise ConfigError(f"--trial {trial}: {folder} has no such trial; its trials are in {run.trials}")
    return _last_attempt(place)


def _last_attempt(folder: Path) -> Path:
    """The last attempt in a trial's folder; the folder itself where it has none."""
    from quartet_plugin.trial.attempt import PREFIX, attempt_number

    return max(folder.glob(f"{PREFIX}*"), key=attempt_number, default=folder)


def trace(folder: Path, output: Path) -> list[str]:
    """Write the trace and return the lines that compare the measured with the simulated step.

    Raises ConfigError for a folder without measured actions, PlanError for actions that are no schedule.
    """
    from quartet_plugin.model.files import write_text_atomic
    from quartet_plugin.model.plan import read_plan
    from quartet_plugin.protocol.rank_files import read_actions
    from quartet_plugin.report import perfetto
    from quartet_plugin.schedule.choice import relative_costs
    from quartet_plugin.schedule.simulate import simulate

    plan = read_plan(folder / "plan.json")
    choice = plan.schedule.custom
    if choice is None:
        raise ConfigError(
            f"{folder}: the plan has no custom schedule; Megatron's own schedules record no actions"
        )
    records = read_actions(folder)
    schedule = schedule_of(records, placement=choice.placement, num_microbatches=plan.num_microbatches)
    costs = relative_costs(choice)
    measured = measurement_of(records, simulate(schedule, costs.ratios))
    simulation = simulate(schedule, in_units_of(measured, records, costs=costs, schedule=schedule))
    tracks = perfetto.trace(schedule, measured, name="measured")
    predicted = perfetto.trace(schedule, simulation, name="simulated")
    tracks["traceEvents"] += [_as_second_process(event) for event in predicted["traceEvents"]]
    tracks["otherData"]["simulated_makespan_s"] = float(simulation.makespan_s)
    write_text_atomic(output, json.dumps(tracks, separators=(",", ":"), allow_nan=False) + "\n")
    return [*lines(schedule, measured, simulation), *memory_lines(records, simulation), f"wrote {output}"]


def _as_second_process(event: dict[str, Any]) -> dict[str, Any]:
    """The same event as a second process, its arrows apart from those of the first."""
    moved = {**event, "pid": 2}
    if "id" in moved:
        moved["id"] += 1_000_000
    return moved


def schedule_of(
    records: "list[ActionTimes]", *, placement: tuple[int, ...], num_microbatches: int
) -> "Schedule":
    """The order that was executed. Raises PlanError where the actions are not those of the placement."""
    from quartet_plugin.schedule.files import parse_order
    from quartet_plugin.schedule.schedule import Schedule
    from quartet_plugin.schedule.validate import validate

    orders = tuple(
        parse_order(record.actions, num_stages=len(placement), num_microbatches=num_microbatches)
        for record in records
    )
    schedule = Schedule(
        num_devices=len(records), num_microbatches=num_microbatches, placement=placement, orders=orders
    )
    validate(schedule)
    return schedule


def measurement_of(records: "list[ActionTimes]", simulation: "Simulation") -> "Simulation":
    """The measured times in the simulator's form, from the start of the first device on."""
    from dataclasses import replace

    import numpy as np

    from quartet_plugin.schedule.simulate import bubble_fraction

    first = min(record.begin_at for record in records)
    start = tuple(np.array(record.start_s) + (record.begin_at - first) for record in records)
    end = tuple(np.array(record.end_s) + (record.begin_at - first) for record in records)
    busy = np.array([float(np.sum(e - s)) for s, e in zip(start, end, strict=True)])
    makespan = max(float(row.max()) for row in end)
    return replace(
        simulation,
        makespan_s=makespan,
        period_s=makespan,
        bubble_fraction=bubble_fraction(float(busy.sum()), makespan_s=makespan, num_devices=len(records)),
        busy_s=busy,
        start_s=start,
        end_s=end,
    )


def in_units_of(
    measured: "Simulation", records: "list[ActionTimes]", *, costs: "RelativeCosts", schedule: "Schedule"
) -> "StageCosts":
    """The plan's relative costs in seconds and bytes, so that both add up to what was measured.

    All devices' compute time is the same in both, and the sum of their peaks of activations where counted:
    the simulator's error is then in how they are spread over devices and time.
    """
    from quartet_plugin.schedule.simulate import simulate

    relative = simulate(schedule, costs.ratios)
    busy, peaks = float(relative.busy_s.sum()), float(relative.peak_activation_bytes.sum())
    counted = sum(record.peak_activation_bytes or 0 for record in records)
    return costs.scaled(
        unit_s=float(measured.busy_s.sum()) / busy if busy > 0 else 0.0,
        unit_bytes=counted / peaks if peaks > 0 else 0.0,
    )


def memory_lines(records: "list[ActionTimes]", simulation: "Simulation") -> list[str]:
    """The device with the highest peak of activations, measured and simulated; none where not counted."""
    peaks = [record.peak_activation_bytes for record in records]
    counted = [(peak, device) for device, peak in enumerate(peaks) if peak is not None]
    if not counted:
        return []
    peak, device = max(counted)
    expected = float(simulation.peak_activation_bytes[device])
    return [
        f"activations of device {device} at their peak: measured {peak / 2**20:.1f} MiB, simulated "
        f"{expected / 2**20:.1f} MiB"
    ]


def lines(schedule: "Schedule", measured: "Simulation", simulation: "Simulation") -> list[str]:
    """Makespan and bubble of both, and the mean time of every kind of action."""
    from quartet_plugin.report.formatting import bubble_words

    rows = [
        f"makespan: measured {1e3 * measured.makespan_s:.2f} ms, simulated "
        f"{1e3 * simulation.makespan_s:.2f} ms: error {simulation.makespan_s / measured.makespan_s - 1:+.1%}",
        f"bubble: measured {bubble_words(measured.bubble_fraction)}, simulated "
        f"{bubble_words(simulation.bubble_fraction)}",
    ]
    for kind in ("F", "I", "W", "B"):
        pairs = [
            (m_end - m_start, s_end - s_start)
            for device in range(schedule.num_devices)
            for action, m_start, m_end, s_start, s_end in zip(
                schedule.actions(device),
                measured.start_s[device],
                measured.end_s[device],
                simulation.start_s[device],
                simulation.end_s[device],
                strict=True,
            )
            if action.kind.name == kind
        ]
        if pairs:
            took, expected = (1e3 * sum(side) / len(pairs) for side in zip(*pairs, strict=True))
            rows.append(f"mean {kind}: measured {took:.3f} ms, simulated {expected:.3f} ms")
    return rows
