"""The figures of a simulated schedule, in a few lines of plain text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quartet_plugin.model.costs import FloatArray
from quartet_plugin.report.formatting import bubble_words, microbatch_words, size
from quartet_plugin.schedule.schedule import Schedule

if TYPE_CHECKING:
    from quartet_plugin.schedule.simulate import Simulation

_MAX_DEVICES = 64
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def seconds(value: float) -> str:
    """A duration with six digits and a fitting unit."""
    scale, unit = next((pair for pair in _SECONDS if value >= pair[0]), _SECONDS[0])
    return f"{value / scale:.6g} {unit}"


def schedule_summary(
    schedule: Schedule,
    simulation: "Simulation",
    *,
    memory_limit_bytes: FloatArray | None = None,
    lower_bound_s: float | None = None,
    best_named: tuple[str, float] | None = None,
    objective: str = "makespan",
) -> str:
    """The figures of a simulated schedule, then a row a device (the first 64).

    `lower_bound_s` is what the makespan is compared with, `best_named` (name and seconds) what the
    objective is, makespan or period.
    """
    makespan = simulation.makespan_s
    figures = [
        ("schedule", describe(schedule)),
        ("makespan", seconds(makespan)),
        ("period", f"{seconds(simulation.period_s)} a step if steps follow without a barrier"),
        ("bubble", f"{bubble_words(simulation.bubble_fraction)} of all device time"),
    ]
    if lower_bound_s is not None:
        figures.append(
            ("bound", f"{seconds(lower_bound_s)}, proven; {compared_with_bound(makespan, lower_bound_s)}")
        )
    if best_named is not None:
        name, named_s = best_named
        reached = simulation.period_s if objective == "period" else makespan
        figures.append(("best named", f"{name} {seconds(named_s)}; {_against(reached, named_s)}"))
    lines = [f"{name:<11}{text}" for name, text in figures]
    return "\n".join([*lines, "", *_devices(schedule, simulation, memory_limit_bytes)])


def describe(schedule: Schedule) -> str:
    """The schedule's origin and sizes, in one line."""
    origin = schedule.origin.get("name") or ("the family" if "family" in schedule.origin else "of no origin")
    copies = ", two copies of the model" if schedule.routes is not None else ""
    return (
        f"{origin}: {schedule.num_devices} devices, {schedule.num_stages} stages{copies}, "
        f"{microbatch_words(schedule.num_microbatches)}"
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width, the first row as head; texts left, numbers (from the head's ">") right."""
    right = [head.startswith(">") for head in rows[0]]
    cells = [[head.removeprefix(">") for head in rows[0]], *rows[1:]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(right))]
    return [
        "  ".join(
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]


def _devices(schedule: Schedule, simulation: "Simulation", limit: FloatArray | None) -> list[str]:
    rows = [["device", "stages", "layers", ">busy", ">peak activations"]]
    if limit is not None:
        rows[0].append(">limit")
    for device in range(min(schedule.num_devices, _MAX_DEVICES)):
        stages = [stage for stage, on in enumerate(schedule.placement) if on == device]
        layers = schedule.layers_per_stage
        busy = simulation.busy_s[device] / simulation.makespan_s if simulation.makespan_s > 0 else 0.0
        rows.append(
            [
                str(device),
                _listed(stages),
                "-" if layers is None else _listed([layers[stage] for stage in stages]),
                f"{100 * busy:.1f} %",
                size(float(simulation.peak_activation_bytes[device])),
            ]
        )
        if limit is not None:
            rows[-1].append(size(float(limit[device])))
    hidden = schedule.num_devices - _MAX_DEVICES
    return aligned(rows) + ([f"({hidden} more devices)"] if hidden > 0 else [])


def _listed(values: Sequence[int]) -> str:
    text = " ".join(map(str, values[:8]))
    return f"{text} ..." if len(values) > 8 else text


def compared_with_bound(makespan_s: float, bound_s: float) -> str:
    """How far a makespan is above a proven bound, in words."""
    if makespan_s <= bound_s * (1 + 1e-9):
        return "reached, so this is proven optimal"
    return f"{100 * (makespan_s / bound_s - 1):.1f} % above" if bound_s > 0 else "nothing proven"


def _against(makespan: float, named_s: float) -> str:
    gain = 100 * (1 - makespan / named_s) if named_s > 0 else 0.0
    return f"{gain:.1f} % saved" if gain > 0.005 else "no schedule found is shorter"
