"""The time left: what counts, that it does not jump, and that `quartet status` has the tuner's estimate."""

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.model.plan import Plan
from quartet_plugin.trial.lease import Lease
from quartet_plugin.tuner.config import StudyConfig
from quartet_plugin.tuner.history_rows import read_events, time_left_of
from quartet_plugin.tuner.launches_left import launches_left
from tests.tuner.fakes import FakeMachine, Killed, Watching, tune
from tests.tuner.fakes import begin_with_journal as begin
from tests.tuner.run_folders import WritingMachine

LAUNCH_S = 10.0


@dataclass
class Estimates(Watching):
    """Keeps the label, the seconds left and the share that measured of every launch."""

    starts: list[tuple[str, float | None]] = field(default_factory=list)
    shares: list[float | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def plan_started(self, label: str, plan: Plan | None, **options: Any) -> None:
        self.starts.append((label, options["time_left_s"]))
        self.shares.append(options["measured_share"])
        super().plan_started(label, plan, **options)


@pytest.mark.parametrize(
    ("num_tried", "others", "expected"),
    [
        (0, {}, 20 + 1 + 5 * 4 + 2 * 5),
        (9, {}, 11 + 1 + 30),
        (10, {}, 10 + 30),
        (20, {}, 30),
        (20, {"num_parity_runs": 5}, 35),
        (0, {"num_workers": 3}, 7 + 1 + 30),
    ],
)
def test_everything_that_is_still_launched_counts(
    num_tried: int, others: dict[str, int], expected: int
) -> None:
    config = StudyConfig(trials=20, control=10, top_k=3, rounds=5)
    assert launches_left(config, num_tried=num_tried, **others) == expected


@pytest.mark.parametrize("gain", [1.04, 1.3])
def test_the_time_left_shrinks_to_its_end(gain: float, tmp_path: Path) -> None:
    """A leader by 4 % takes more rounds than one by 30 %: neither is a surprise."""
    watched = Estimates()
    machine = FakeMachine(seconds=lambda plan: 1.0 / gain if plan.schedule.custom else 1.0, wall_s=LAUNCH_S)
    tune(begin(tmp_path / "r", study={"trials": 12, "rounds": 5, "control": 5}), machine, observer=watched)
    assert machine.checked, "parity checks are among the launches"
    left = [(label, seconds) for label, seconds in watched.starts if seconds is not None]
    assert [label for label, seconds in watched.starts if seconds is None] == ["0"]
    assert any("parity check" in label for label, _ in left)
    assert watched.shares[0] is None
    assert all(share is not None and share > 0.0 for share in watched.shares[1:])
    for (before, before_s), (after, after_s) in pairwise(left):
        # A kind of schedules that has not run before is checked before its first trial.
        unforeseen_s = LAUNCH_S * ("parity check" in before + after)
        assert after_s <= before_s + unforeseen_s, after
    in_last_round = [label for label, _ in left if label.endswith(left[-1][0].partition(" ")[2])]
    assert left[-len(in_last_round)][1] >= LAUNCH_S * len(in_last_round)


def test_status_shows_the_estimate_of_the_tuner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched = Estimates()
    machine = WritingMachine(dies_at=4, wall_s=LAUNCH_S)
    with pytest.raises(Killed):
        tune(begin(tmp_path / "r", study={"trials": 10, "rounds": 3}), machine, observer=watched)
    _, left_s = watched.starts[-1]
    assert left_s is not None
    events = read_events(tmp_path / "r" / "events.jsonl")
    began_s = events[-1]["time"]
    assert time_left_of(events, now_s=began_s) == left_s
    assert time_left_of(events, now_s=began_s + 7.0) == pytest.approx(left_s - 7.0)
    assert time_left_of(events, now_s=began_s + 1e6) == 0.0
    assert time_left_of(events[:2], now_s=began_s) is None
    with Lease.acquire(tmp_path / "r"):
        assert main(["status", str(tmp_path / "r")]) == 0
    assert "; about " in capsys.readouterr().out
