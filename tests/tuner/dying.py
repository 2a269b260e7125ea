"""A tuner that SIGKILL ends before one of its writes: the machine is arithmetic, files and lease are real.

    python -m tests.tuner.dying FOLDER DIES_BEFORE

Without the number it runs to its end and prints how many writes that were.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from sqlalchemy import event
from sqlalchemy.engine import Engine

from quartet_plugin.model.plan import Plan, write_plan
from quartet_plugin.trial.attempt import PREFIX
from quartet_plugin.trial.lease import Lease
from quartet_plugin.trial.recover import recover
from quartet_plugin.trial.request import TrialRequest, TrialResult
from quartet_plugin.tuner.disk_reserve import DiskReserve
from quartet_plugin.tuner.run_folder import prepare_folder
from quartet_plugin.tuner.trial_backend import LocalBackend
from quartet_plugin.tuner.tune_result import TuneResult, write_best
from tests.short_searches import shortened
from tests.tuner.fakes import FakeMachine, begin, by_formula, resume, tune
from tests.tuner.run_folders import write_attempt, write_reports

CONFIG: dict[str, Any] = {
    "search": {"pipeline_parallel": 2, "mapping": "stock", "schedule": ["1f1b", "zb-h1", "zb-v"]},
    "study": {"trials": 4, "rounds": 3, "top_k": 1},
}


class RecordingMachine(FakeMachine):
    """Its results are in the attempts' folders alone, so they outlive the process."""

    def recover(self, folder: Path, **options: Any) -> None:
        """The real one: what has no result gets one."""
        if folder.is_dir():
            recover(folder, poll_s=0.01)

    def recorded(self, folder: Path, *, plan_key: str | None) -> TrialResult | None:
        """The settled result in a trial's folder."""
        return LocalBackend().recorded(folder, plan_key=plan_key)

    def supersede(self, folder: Path) -> bool:
        """The real one."""
        return LocalBackend().supersede(folder)

    def run(self, request: TrialRequest, **options: Any) -> TrialResult:
        """One launch, written down as a real one."""
        result = super().run(request, **options)
        request.folder.mkdir(parents=True, exist_ok=True)
        folder = request.folder / f"{PREFIX}{1 + len(list(request.folder.iterdir()))}"
        folder.mkdir()
        if request.plan is not None:
            write_plan(request.plan, path=folder / "plan.json")
        write_reports(folder, self, result, request.plan)
        write_attempt(folder, request, result)
        found = LocalBackend().recorded(request.folder, plan_key=request.plan_key)
        assert found is not None
        return found


def machine() -> RecordingMachine:
    """Some schedules of ours are the fastest, and one of them does not train as it should."""

    def seconds(plan: Plan) -> float:
        return by_formula(plan) * (0.5 if plan.schedule.custom is not None else 1.0)

    return RecordingMachine(seconds=seconds, gate=lambda plan: plan.schedule.label != "zb-v")


def whole_run(folder: Path) -> TuneResult:
    """A run that begins, or goes on where it has begun, under its lease."""
    is_resumed = (folder / "config.json").exists()
    prepare_folder(folder, is_resumed=is_resumed)
    with Lease.acquire(folder) as lease, DiskReserve(folder, size_bytes=4096) as ballast:
        run = resume(folder) if is_resumed else begin(folder, **CONFIG)
        result = tune(run, machine(), fence=lease.check, make_room=ballast.drop)
        write_best(result, run=run)
    return result


def main() -> None:
    """Die before the given write."""
    folder, dies_before = Path(sys.argv[1]), [int(word) for word in sys.argv[2:]]
    count = 0

    def one(*args: Any) -> None:
        nonlocal count
        if count in dies_before:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            one()
            return function(*args, **kwargs)

        return wrapped

    def replace_of_run(source: Any, target: Any, **more: Any) -> None:
        # Caches of compiled code are written once, by whichever process is the first.
        if Path(target).is_relative_to(folder):
            one()
        replace(source, target, **more)

    replace = os.replace
    os.replace = cast(Any, replace_of_run)
    os.write = before(os.write)
    os.link = before(os.link)
    event.listen(Engine, "commit", one)
    with shortened():  # as in the tests that start this
        whole_run(folder)
    print(count)


if __name__ == "__main__":
    main()
