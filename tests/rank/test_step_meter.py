"""All ranks of a trial end after the same step, as soon as RANK 0 has measured enough."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from quartet_plugin.model.packed_lengths import PackedTokens
from quartet_plugin.model.schema import read_record
from quartet_plugin.protocol.execution import Execution
from quartet_plugin.protocol.rank_files import CoreLimit, RankReport
from quartet_plugin.rank import step_meter
from quartet_plugin.rank.files import RankFileWriter, read_trial_spec
from quartet_plugin.rank.rendezvous import RankEnv
from quartet_plugin.rank.step_meter import StepMeter, StepResult
from tests.megatron.entry_launch import write_trial


class Ended(BaseException):
    """A rank has ended."""


class Meter(StepMeter):
    """Of steps that compute nothing."""

    def _result_of(self, results: Any) -> StepResult:
        return StepResult(loss=1.0, skipped=False, grad_norm=1.0)

    def _job(self) -> dict[str, Any]:
        return {}

    def _execution(self) -> Execution | None:
        return None


class Clock:
    """The time of all ranks."""

    now = 0.0

    def perf_counter(self) -> float:
        """Seconds."""
        return self.now

    def time(self) -> float:
        """Seconds since 1970."""
        return 1e9 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replaces the clock, the store of the process group and the end of a process."""
    clock, store = Clock(), HashStore()

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(step_meter, "time", clock)
    monkeypatch.setattr(step_meter, "_default_store", lambda: store)
    monkeypatch.setattr(step_meter, "exit_now", end)
    return clock


@pytest.fixture
def ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., list[tuple[str, StepMeter]]]]:
    """Two meters of a trial whose trial.json has these fields beside the usual ones."""

    def made(**changes: Any) -> list[tuple[str, StepMeter]]:
        path = write_trial(tmp_path, warmup=1, measure=10)
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        meters: list[tuple[str, StepMeter]] = []
        for rank in ("0", "1"):
            names = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0"}
            env = RankEnv.of({**names, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
            files = RankFileWriter(read_trial_spec(path), env)
            meters.append((rank, Meter(files, neutralised=[], started_at=0.0)))
        return meters

    yield made
    monkeypatch.delenv("RANK", raising=False)


def train(meters: list[tuple[str, StepMeter]], times: list[float], *, clock: Clock, setenv: Any) -> list[int]:
    """The steps after which each rank ended; each makes its part of a step before the next begins."""
    ended: dict[str, int] = {}
    steps = {rank: meter.wrap(lambda: None) for rank, meter in meters}
    for number, seconds in enumerate(times, start=1):
        for rank, _ in meters:
            setenv("RANK", rank)
            try:
                clock.now += seconds if rank == "0" else 0.0
                steps[rank]()
            except Ended:
                ended[rank] = number
        if ended:
            return [ended.get(rank, 0) for rank, _ in meters]
    return []


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, "precise"), (0.5, "slower")], ids=["as precise as needed", "slower"]
)
def test_the_ranks_end_after_the_same_step_when_enough_is_measured(
    limit: float | None,
    expected: str,
    clock: Clock,
    ranks: Callable[..., list[tuple[str, StepMeter]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    rule = {"least": 4, "precision": 0.02, "slower_than_s": limit}
    meters = ranks(max_warmup=6, early_end=rule)
    # The first step begins when the meter is called first, so its seconds are not RANK 0's.
    scatter = 0.01 if limit is None else 0.1
    times = [0.0, 3.0, 3.0, *([1.0, 1.0 + scatter, 1.0 - scatter] * 6)]
    ended = train(meters, times, clock=clock, setenv=monkeypatch.setenv)
    assert ended[0] == ended[1] < len(times)
    reports = [read_record(RankReport, tmp_path / f"rank-{rank}.json") for rank in (0, 1)]
    assert reports[0].ended_early == expected
    assert reports[1].ended_early is None
    spec = meters[0][1]._files.spec
    measured = spec.measured([step.iteration_s for step in reports[0].iterations])
    assert measured.start == 3
    assert len(measured) >= 4


def test_a_fixed_number_of_steps_is_made_whatever_they_take(
    clock: Clock, ranks: Callable[..., list[tuple[str, StepMeter]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(ranks(), [1.0] * 20, clock=clock, setenv=monkeypatch.setenv) == [11, 11]


def test_a_stop_file_ends_all_ranks_after_the_same_step(
    clock: Clock,
    ranks: Callable[..., list[tuple[str, StepMeter]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    meters = ranks()
    (tmp_path / "STOP").write_text("slow\n")
    assert train(meters, [1.0] * 20, clock=clock, setenv=monkeypatch.setenv) == [3, 3]


@pytest.mark.parametrize("device", ["cpu", "an accelerator"])
def test_a_rank_on_the_cpu_says_its_limit_and_its_network(
    device: str,
    clock: Clock,
    ranks: Callable[..., list[tuple[str, StepMeter]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    limit = CoreLimit(group="/pod", num_cores=1.5)
    monkeypatch.setattr(step_meter, "core_limit", lambda: limit)
    monkeypatch.setattr(step_meter, "network_namespace", lambda: 4026531840)
    monkeypatch.setattr(step_meter, "device_name", lambda: device)
    train(ranks(), [1.0] * 20, clock=clock, setenv=monkeypatch.setenv)
    report = read_record(RankReport, tmp_path / "rank-0.json")
    assert report.core_limit == (limit if device == "cpu" else None)
    assert report.network_namespace == (4026531840 if device == "cpu" else None)
    assert (report.cores is None) == (device != "cpu")


def test_the_tokens_of_packed_sequences_are_read_when_the_file_is_written(
    clock: Clock,
    ranks: Callable[..., list[tuple[str, StepMeter]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    class Sums:
        """A tensor whose values a step must not ask for."""

        def tolist(self) -> list[float]:
            """Tokens and squared lengths."""
            assert len(meters[0][1]._steps) == 11
            return [29.0, 305.0]

    meters = ranks()
    result = StepResult(loss=1.0, skipped=False, grad_norm=1.0, packed=(2, Sums()))
    monkeypatch.setattr(Meter, "_result_of", lambda self, results: result)
    train(meters, [1.0] * 20, clock=clock, setenv=monkeypatch.setenv)
    steps = read_record(RankReport, tmp_path / "rank-0.json").iterations
    expected = PackedTokens(num_microbatches=2, num_tokens=29.0, squared_lengths=305.0)
    assert {step.packed for step in steps} == {expected}
