"""What the monitor of an attempt tells of it."""

from pathlib import Path

from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.schema import dump
from quartet_plugin.protocol.attempt_files import CommandRecord, TrialSpec
from quartet_plugin.protocol.rank_files import Heartbeat, RankReport, rank_file
from quartet_plugin.trial.attempt import Attempt
from quartet_plugin.trial.processes import ProcessRegistry
from quartet_plugin.trial.request import Progress, Timeouts
from quartet_plugin.trial.watch import AttemptMonitor
from tests.trial.factory import ID, beat, report


class EndedLauncher:
    """A launcher that has ended."""

    pid = 0

    def poll(self) -> int:
        return 0

    def terminate(self) -> None:
        raise AssertionError

    kill = terminate


def monitor_of(folder: Path, shown: list[Progress]) -> AttemptMonitor:
    """The monitor of an attempt with two processes."""
    command = CommandRecord(
        attempt_id=ID,
        argv=("torchrun", "pretrain_gpt.py"),
        cwd="/",
        environment={},
        starter="torchrun",
        num_processes=2,
        time=1_790_000_000.0,
        deadline_s=600.0,
        predicted_iteration_s=None,
        timeouts={},
        max_spread=0.25,
    )
    spec = TrialSpec(attempt_id=ID, folder=str(folder), warmup=1, measure=4, plan_key=None)
    attempt = Attempt(folder=folder, spec=spec, command=command)
    return AttemptMonitor(
        attempt=attempt,
        handle=EndedLauncher(),
        registry=ProcessRegistry(attempt.processes_file, attempt_id=ID),
        timeouts=Timeouts(),
        deadline_s=600.0,
        should_stop=lambda: False,
        clock=lambda: 0.0,
        poll_s=0.0,
        on_progress=shown.append,
    )


def test_an_attempt_is_done_where_every_rank_has_reported(tmp_path: Path) -> None:
    """Also before their last heartbeats, so that the end of the processes is known to begin."""
    folder = tmp_path / "attempt-1"
    folder.mkdir()
    shown: list[Progress] = []
    monitor = monitor_of(folder, shown)
    for rank in range(2):
        path = rank_file(Heartbeat, folder=folder, launch_rank=rank)
        write_json_atomic(path, dump(beat(rank, phase="measure", iteration=5)))
    for rank in range(2):
        monitor._look()
        write_json_atomic(rank_file(RankReport, folder=folder, launch_rank=rank), dump(report(rank)))
    monitor._look()
    assert [progress.phase for progress in shown] == ["measure", "done"]
