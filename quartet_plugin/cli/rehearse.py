"""`quartet rehearse`: a schedule in real processes whose compute only sleeps, beside what is predicted."""

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quartet_plugin.cli.command import check_range
from quartet_plugin.cli.output import show
from quartet_plugin.errors import ExitCode, InfrastructureError, QuartetError, UsageError

if TYPE_CHECKING:
    from quartet_plugin.schedule.simulate import Simulation

_MODULE = "quartet_plugin.runtime.rehearsal"
_MAX_STEPS = 1_000


def rehearse_command(
    schedule: Annotated[
        Path, typer.Argument(metavar="SCHEDULE.json", help="The schedule.", show_default=False)
    ],
    costs: Annotated[
        Path,
        typer.Option(
            metavar="COSTS.json",
            help="The cost table: each action sleeps for its time.",
            show_default=False,
        ),
    ],
    steps: Annotated[int, typer.Option(help="Number of steps to rehearse.")] = 5,
    time_scale: Annotated[float, typer.Option(help="A factor for all times of the cost table.")] = 1.0,
    hang: Annotated[
        float, typer.Option(help="Seconds without progress after which the rehearsal is stopped as hung.")
    ] = 60.0,
) -> None:
    """Run a schedule in real processes, one per device, whose computations only sleep.

    This finds hangs, and shows the simulator's error. A laptop can rehearse many devices.
    """
    check_range("--steps", steps, most=_MAX_STEPS)
    for name, value in (("--time-scale", time_scale), ("--hang", hang)):
        if not 0 < value < 1e6:
            raise UsageError(f"{name} {value:g}: must be above 0 and below 1e6")
    from quartet_plugin.cli.schedule_steps import simulated
    from quartet_plugin.schedule.files import read_costs, read_schedule

    simulation = simulated(read_schedule(schedule), read_costs(costs))
    longest_s = time_scale * max(
        (float((end - start).max()) for start, end in zip(simulation.start_s, simulation.end_s, strict=True)),
        default=0.0,
    )
    hang_s = max(hang, 5 * longest_s)
    result = _run([str(schedule), str(costs)], [str(steps), repr(time_scale), repr(hang_s)])
    show(*lines(result["steps"], simulation, time_scale=time_scale))


def _run(files: list[str], numbers: list[str]) -> dict[str, Any]:
    """Start the rehearsal in a separate process, which may import torch, and return its result."""
    from quartet_plugin.model.files import read_json

    with tempfile.TemporaryDirectory(prefix="quartet-") as folder:
        target = Path(folder, "result.json")
        done = subprocess.run([sys.executable, "-m", _MODULE, *files, str(target), *numbers], check=False)
        if not target.exists():
            raise InfrastructureError(
                f"the rehearsal ended with code {done.returncode}; its output above gives the reason"
            )
        result: dict[str, Any] = read_json(target)
    if "error" in result:
        error = QuartetError(result["error"])
        error.exit_code = ExitCode(result["exit_code"])
        raise error
    return result


def lines(steps: list[dict[str, Any]], simulation: "Simulation", *, time_scale: float) -> list[str]:
    """A line for each step, the median, and the largest delay of a device against the simulation."""
    expected_s = simulation.makespan_s * time_scale
    walls = [float(step["wall_s"]) for step in steps]
    rows = [f"simulated makespan {expected_s:.4f} s"]

    def beside(wall_s: float) -> str:
        return f"  {wall_s / expected_s - 1:+.1%}" if expected_s > 0.0 else ""

    rows += [f"step {number:>3}: {wall_s:.4f} s{beside(wall_s)}" for number, wall_s in enumerate(walls, 1)]
    median_s = statistics.median(walls)
    rows.append(f"median   : {median_s:.4f} s{beside(median_s)}")
    step = min(steps, key=lambda step: abs(step["wall_s"] - median_s))
    late = [
        max((m - time_scale * s for m, s in zip(measured, ends, strict=True)), default=0.0)
        for measured, ends in zip(step["end_s"], simulation.end_s, strict=True)
    ]
    worst = max(range(len(late)), key=late.__getitem__)
    rows.append(f"largest delay against the simulation: {1e3 * late[worst]:.1f} ms, on device {worst}")
    return rows
