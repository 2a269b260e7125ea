"""`quartet` whose trials take the time that a formula says: command line, files and lease are real.

    python -m tests.batch.arithmetic_quartet tune ... -- torchrun ... pretrain.py [--layers N] ...

The user's words behind the script decide the job and the machine. `--fail` fails before anything is
measured, `--launch-s S` is how long a launch takes.
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quartet_plugin.launchers import local
from quartet_plugin.model.plan import Plan
from quartet_plugin.trial.request import Outcome, TrialRequest, TrialResult
from quartet_plugin.tuner import trial_backend
from tests.space.jobs import make_job, make_nodes, make_shape
from tests.tuner.dying import RecordingMachine
from tests.tuner.fakes import by_formula


@dataclass
class Machine(RecordingMachine):
    """The machine that the command's words describe."""

    launch_s: float = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def run(self, request: TrialRequest, **options: Any) -> TrialResult:
        """One launch, which takes a while and is written down."""
        if os.environ.get("ARITHMETIC_LOG"):
            with Path(os.environ["ARITHMETIC_LOG"]).open("a", encoding="utf-8") as log:
                log.write(f"{request.folder}\n")
        time.sleep(self.launch_s)
        return super().run(request, **options)


def machine_of(words: list[str]) -> Machine:
    """The machine and the job of a command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--launch-s", type=float, default=0.0)
    parser.add_argument("--slow-split", type=float, default=1.0)
    parser.add_argument("--fail", action="store_true")
    said, _ = parser.parse_known_args(words)

    def seconds(plan: Plan) -> float:
        return by_formula(plan) * (0.5 if plan.schedule.custom is not None else 1.0)

    return Machine(
        job=make_job(shape=make_shape(num_layers=said.layers), global_batch_size=said.batch),
        cluster=make_nodes(2),
        seconds=seconds,
        outcome=lambda plan: Outcome.INFRA if said.fail else Outcome.OK,
        launch_s=said.launch_s,
    )


def main() -> None:
    """`quartet` with this machine."""
    words = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    trial_backend.LocalBackend = lambda **options: machine_of(words)  # type: ignore[assignment,misc]
    local.check_start = lambda *args, **options: None
    from quartet_plugin.cli.main import entry

    entry()


if __name__ == "__main__":
    main()
