"""`python -m quartet_plugin.runtime.rehearsal SCHEDULE.json COSTS.json RESULT.json STEPS TIME_SCALE HANG_S`.

Started by `quartet rehearse`, which has no torch of its own. The result has the times of every step, or the
error and its exit code.
"""

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from quartet_plugin.errors import QuartetError


def main(words: list[str]) -> int:
    """Rehearse and write the result; returns the exit code."""
    from quartet_plugin.model.costs import stage_costs
    from quartet_plugin.model.files import write_json_atomic
    from quartet_plugin.runtime.rehearsal.processes import Rehearsal
    from quartet_plugin.schedule.files import read_costs, read_schedule

    schedule_file, costs_file, result_file, num_steps, time_scale, hang_s = words
    try:
        schedule = read_schedule(Path(schedule_file))
        if schedule.layers_per_stage is None:
            raise QuartetError("layers_per_stage: missing; a schedule without a split cannot be rehearsed")
        costs = stage_costs(
            read_costs(Path(costs_file)),
            placement=schedule.placement,
            layers_per_stage=schedule.layers_per_stage,
        )
        with tempfile.TemporaryDirectory(prefix="quartet-rehearsal-") as folder:
            steps = Rehearsal(
                schedule=schedule,
                costs=costs,
                folder=Path(folder),
                num_steps=int(num_steps),
                time_scale=float(time_scale),
                hang_s=float(hang_s),
            ).run()
    except QuartetError as error:
        write_json_atomic(Path(result_file), {"error": str(error), "exit_code": int(error.exit_code)})
        return int(error.exit_code)
    content = [asdict(step) for step in steps]
    write_json_atomic(Path(result_file), {"steps": content})
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
