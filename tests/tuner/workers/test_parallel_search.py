"""A whole run whose trials are measured by several workers, on a machine made of arithmetic."""

import json
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.errors import InfeasibleError, InterruptedByUserError, SeamError
from quartet_plugin.launchers.device_slices import DeviceSlice
from quartet_plugin.launchers.running_process import current_identity
from quartet_plugin.model.plan import Plan
from quartet_plugin.protocol.work_queue_files import Claim, Done, QueuedTrial, SliceRecord, WorkerRecord
from quartet_plugin.trial.node_speed import NodeSpeed
from quartet_plugin.trial.request import Outcome, TrialRequest, TrialResult
from quartet_plugin.tuner import coordinator
from quartet_plugin.tuner.slow_nodes import MAX_UNCONFIRMED_CHECKS
from quartet_plugin.tuner.tune_result import TuneResult
from quartet_plugin.tuner.workers.parallel_search import ParallelSearch
from quartet_plugin.tuner.workers.work_queue import WorkQueue
from tests.tuner.fakes import FakeMachine, Killed, Watching, resume, tune
from tests.tuner.fakes import begin_with_journal as begin

HOST = socket.gethostname()  # the fake cluster's nodes have other names
SLICES = tuple(DeviceSlice(device="cpu", index=index, count=4, cores=(index,)) for index in range(4))
OWN = {"pipeline_parallel": 2, "mapping": "stock", "schedule": ["1f1b", "zb-h1", "zb-v"]}


@dataclass
class Shop(FakeMachine):
    """A machine whose workers take a step, in random order, whenever the coordinator waits."""

    num_workers: int = 4
    seed: int = 0
    dies_after: int | None = None
    attempts: dict[Path, TrialResult] = field(default_factory=dict)
    holding: dict[str, tuple[QueuedTrial, Claim]] = field(default_factory=dict)
    most_at_once: int = 0
    num_done: int = 0
    num_started: int = 0
    queue: Any = None

    def __post_init__(self) -> None:
        self.generator = random.Random(self.seed)
        self.on_launch = lambda request: self.alone()

    def alone(self) -> None:
        """What the coordinator launches itself is launched beside nothing."""
        assert not self.holding

    def check(self, *args: Any, **options: Any) -> Any:
        """A parity check."""
        self.alone()
        return super().check(*args, **options)

    def workers(self) -> list[WorkerRecord]:
        """The workers."""
        return [
            WorkerRecord(
                name=f"w{index}",
                host=HOST,
                identity=current_identity(),
                parent=current_identity(),
                share=SliceRecord(device="cpu", cores=(index,)),
                is_joined=False,
            )
            for index in range(self.num_workers)
        ]

    def step(self, seconds: float) -> None:
        """One worker does something."""
        if not self.num_started:
            return
        if self.dies_after is not None and self.num_done >= self.dies_after and len(self.holding) > 1:
            raise Killed
        worker = self.generator.choice(self.workers())
        if worker.name not in self.holding and self.queue.is_dismissed(worker):
            return
        if worker.name not in self.holding:
            taken = self.queue.take(worker)
            if taken is not None:
                self.holding[worker.name] = taken
                self.most_at_once = max(self.most_at_once, len(self.holding))
            return
        queued, claim = self.holding.pop(worker.name)
        self.measure(queued)
        self.queue.finish(claim, Done(fence=queued.fence, attempt=queued.attempt))
        self.num_done += 1

    def measure(self, queued: QueuedTrial) -> None:
        """Leave a result."""
        folder = self.queue.trial_folder(queued.trial)
        plan = self.queue.plan(queued)
        request = TrialRequest(folder=folder, command=self.command, plan=plan, measure=queued.measure)
        self.launched.append((folder.name, plan.key))
        found = self._result(request)
        result = replace(found, attempt_id=queued.fence + found.attempt_id[16:])
        self.disk[folder] = self.attempts[folder / f"attempt-{queued.attempt}"] = result

    @property
    def command(self) -> Any:
        """Any command."""
        from quartet_plugin.launchers.command import parse_command
        from tests.tuner.fakes import COMMAND

        return parse_command(COMMAND, environment={})


class Hands:
    """Stands for the processes of the workers."""

    last_code = 0
    last_line = ""

    def __init__(self, shop: Shop, *, queue: WorkQueue, **options: Any) -> None:
        self.shop = shop
        self.shop.queue = queue
        self.registered: set[str] = set()

    @property
    def num_running(self) -> int:
        return self.shop.num_started

    def start_missing(self) -> None:
        self.shop.num_started = self.shop.num_workers
        for worker in self.shop.workers():
            # A worker that was dismissed has ended, and is not started again.
            if worker.name not in self.registered:
                self.registered.add(worker.name)
                self.shop.queue.register(worker)

    def close(self, *, is_forced: bool = False) -> bool:
        for worker in self.shop.workers():
            self.shop.queue.forget(worker.name)
        self.shop.holding.clear()
        self.shop.num_started = 0
        return True


def run_shared(
    monkeypatch: pytest.MonkeyPatch, folder: Path, shop: Shop, *, is_resumed: bool = False, **config: Any
) -> TuneResult:
    """Tune with workers.

    The sampler is left alone, which takes a fraction of the planner's time; a journal takes one of SQLite's.
    """
    options = config.pop("options", {})
    config["study"] = {"starts": "none", "storage": "journal", **config.get("study", {})}
    with monkeypatch.context() as patch:
        patch.setattr(coordinator, "WorkerPool", lambda **given: Hands(shop, **given))
        patch.setattr(coordinator, "ParallelSearch", lambda **given: ParallelSearch(**given, sleep=shop.step))
        patch.setattr(coordinator, "read_judged", shop.attempts.get)
        run = resume(folder) if is_resumed else begin(folder, **config)
        return tune(run, shop, slices=SLICES, **options)


def killed(monkeypatch: pytest.MonkeyPatch, folder: Path, shop: Shop, *, storage: str = "journal") -> None:
    """A run whose coordinator is killed with several trials under way: nothing is cleaned up."""
    with monkeypatch.context() as patch:
        patch.setattr(ParallelSearch, "_close", lambda self: None)
        study = {"trials": 8, "rounds": 3, "top_k": 1, "storage": storage}
        with pytest.raises(Killed):
            run_shared(patch, folder, shop, study=study)
    assert len(shop.holding) > 1


def spent(result: TuneResult) -> list[int]:
    return [
        trial.number
        for trial in result.trials[1:]
        if trial.record.repeats is None and trial.record.verdict != "lost"
    ]


@pytest.mark.parametrize("seed", range(2))
def test_every_trial_is_measured_once_and_the_budget_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    shop = Shop(seed=seed)
    result = run_shared(monkeypatch, tmp_path / "r", shop, study={"trials": 14, "rounds": 3, "top_k": 1})
    assert len(spent(result)) == 14
    searched = [key for folder, key in shop.launched if "round" not in folder and key is not None]
    assert len(searched) == len(set(searched)) == 14
    assert shop.most_at_once >= 3
    assert [trial.number for trial in result.trials] == list(range(len(result.trials)))
    assert not list((tmp_path / "r/workers/orders").iterdir())
    assert not list((tmp_path / "r/workers/claims").iterdir())
    assert not (tmp_path / "r/workers/board.json").exists()


def test_one_worker_spends_a_study_as_a_tuner_without_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = {"study": {"starts": "none", "trials": 9, "rounds": 3, "top_k": 2, "control": 4}}
    alone = tune(begin(tmp_path / "a" / "r", **config), FakeMachine())
    shared = run_shared(monkeypatch, tmp_path / "b" / "r", Shop(num_workers=1), **config)
    assert [(r.plan.key, r.record.value, r.record.repeats) for r in shared.trials] == [
        (r.plan.key, r.record.value, r.record.repeats) for r in alone.trials
    ]
    assert shared.drift_checks == alone.drift_checks
    assert [one.comparison for one in shared.rankings] == [one.comparison for one in alone.rankings]


def test_drift_is_measured_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(seed=1)
    result = run_shared(
        monkeypatch, tmp_path / "r", shop, study={"trials": 12, "control": 4, "rounds": 3, "top_k": 1}
    )
    assert [control.num_tried for control in result.drift_checks] == [4, 8]
    assert len(spent(result)) == 12


def test_parity_checks_run_alone_and_what_they_refuse_is_not_handed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(gate=lambda plan: plan.schedule.label != "zb-v")
    result = run_shared(
        monkeypatch, tmp_path / "r", shop, search=OWN, study={"trials": 8, "rounds": 3, "top_k": 1}
    )
    assert len(spent(result)) == 8
    assert shop.checked
    verdicts = {trial.plan.schedule.label: trial.record.verdict for trial in result.trials}
    assert verdicts["zb-h1"] == "measured"
    assert verdicts["zb-v"] == "wrong"


@pytest.mark.parametrize("dies_after", [0, 1, 4])
def test_a_killed_coordinators_trials_are_adopted_or_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_after: int
) -> None:
    """One result lies there without having been told, one with its report, the others are under way."""
    shop = Shop(dies_after=dies_after, seed=2)
    folder = tmp_path / "r"
    killed(monkeypatch, folder, shop)
    (first, _), (second, claim) = list(shop.holding.values())[:2]
    shop.measure(first)
    shop.measure(second)
    shop.queue.finish(claim, Done(fence=second.fence, attempt=second.attempt))
    shop.holding.clear()
    shop.num_started = 0
    shop.dies_after = None
    before = list(shop.launched)
    for one in shop.workers():
        shop.queue.forget(one.name)
    for one in shop.queue.claims():  # their processes have ended with the host
        if one.fence != second.fence:
            (shop.queue.path / "claims" / f"{one.stem}.json").unlink()
    result = run_shared(monkeypatch, folder, shop, is_resumed=True)
    assert len(spent(result)) == 8
    assert [trial.number for trial in result.trials] == list(range(len(result.trials)))
    again = [name for name, _ in shop.launched[len(before) :] if "round" not in name]
    assert {f"{first.trial:06d}", f"{second.trial:06d}"}.isdisjoint(again)
    measured = [name for name, key in shop.launched if "round" not in name and key is not None]
    assert len(measured) == len(set(measured)) == 8


def test_stopping_takes_every_hand_out_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(seed=3)
    with pytest.raises(InterruptedByUserError, match="--resume"):
        run_shared(
            monkeypatch,
            tmp_path / "r",
            shop,
            study={"trials": 8, "rounds": 3, "top_k": 1},
            options={"should_stop": lambda: shop.num_done >= 3},
        )
    assert all(queued.is_closed for queued in shop.queue.queued_trials())
    assert shop.queue.queued_trials()
    shop.seed = 4
    result = run_shared(monkeypatch, tmp_path / "r", shop, is_resumed=True)
    assert len(spent(result)) == 8


def test_a_run_with_workers_may_go_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(dies_after=3)
    killed(monkeypatch, tmp_path / "r", shop)
    holding = dict(shop.holding)
    shop.holding.clear()
    result = tune(resume(tmp_path / "r"), shop)
    assert len(spent(result)) == 8
    assert {queued.trial for queued, _ in holding.values()} <= set(spent(result))
    assert not any(shop.queue.renew(claim) for _, claim in holding.values())


def test_what_ends_a_study_ends_it_with_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def harness(plan: Plan) -> Outcome:
        return Outcome.HARNESS if plan.layout.data_parallel == 2 else Outcome.OK

    with pytest.raises(SeamError, match="trial"):
        run_shared(monkeypatch, tmp_path / "a" / "r", Shop(outcome=harness), study={"trials": 12})

    def infeasible(plan: Plan) -> Outcome:
        fits = plan.split == plan.made_for.baseline.split and plan.layout == plan.made_for.baseline.layout
        return Outcome.OK if fits else Outcome.INFEASIBLE

    with pytest.raises(InfeasibleError, match="in a row did not fit"):
        run_shared(monkeypatch, tmp_path / "b" / "r", Shop(outcome=infeasible), study={"trials": 90})


def test_the_time_limit_holds_over_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop, watching = Shop(wall_s=10.0), Watching()
    now = [0.0]
    step = shop.step

    def passing(seconds: float) -> None:
        now[0] += 5.0
        step(seconds)

    shop.step = passing  # type: ignore[method-assign]
    result = run_shared(
        monkeypatch,
        tmp_path / "r",
        shop,
        study={"trials": 90, "rounds": 3, "top_k": 2},
        options={"max_minutes": 4.0, "clock": lambda: now[0], "observer": watching},
    )
    assert now[0] <= 240.0
    assert 0 < len(spent(result)) < 90
    assert any("reserved for the final rounds" in text for text in watching.messages)


def test_a_worker_on_other_devices_is_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop, watching = Shop(seed=5), Watching()
    own = shop.cluster
    strange: set[str] = set()

    def nodes(result: TrialResult) -> Any:
        if result.attempt_id in strange:
            return tuple(replace(node, node_class="another x2") for node in own)
        return own

    measure = shop.measure

    def measured(queued: QueuedTrial) -> None:
        measure(queued)
        if not strange:
            strange.add(shop.disk[shop.queue.trial_folder(queued.trial)].attempt_id)

    monkeypatch.setattr(shop, "nodes", nodes)
    monkeypatch.setattr(shop, "measure", measured)
    result = run_shared(
        monkeypatch,
        tmp_path / "r",
        shop,
        study={"trials": 6, "rounds": 3, "top_k": 1},
        options={"observer": watching},
    )
    assert len(spent(result)) == 6
    assert any("their times are not comparable" in text for text in watching.messages)
    attempts = {trial.record.attempt_id for trial in result.trials}
    assert attempts.isdisjoint(strange)


def with_slow_node(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, *, is_slow: Callable[[int], bool]
) -> list[str]:
    """The node of the worker `w1` is slow in its n-th launch where `is_slow`; returns each launch's node."""
    node_of_attempt: dict[str, str] = {}
    launches: list[str] = []
    factors: dict[str, float] = {}
    measure = shop.measure

    def measured(queued: QueuedTrial) -> None:
        measure(queued)
        claim = shop.queue.claim_of(queued)
        assert claim is not None
        attempt, node = shop.disk[shop.queue.trial_folder(queued.trial)].attempt_id, f"node-of-{claim.worker}"
        number = launches.count(node)
        factors[attempt] = 1.5 if node == "node-of-w1" and is_slow(number) else 1.0
        launches.append(node)
        node_of_attempt[attempt] = node

    def node_speeds(result: TrialResult) -> tuple[NodeSpeed, ...]:
        host = node_of_attempt.get(result.attempt_id, shop.cluster[0].host)
        product_s = 1e-3 * factors.get(result.attempt_id, 1.0)
        return (NodeSpeed(host=host, kind=("H100", 8, 0), product_s=product_s, spread=0.01),)

    monkeypatch.setattr(shop, "measure", measured)
    monkeypatch.setattr(shop, "node_speeds", node_speeds)
    return launches


def test_a_worker_on_a_slow_node_is_set_aside_after_a_second_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it measured there reaches the study from another worker."""
    shop, watching = Shop(seed=5, num_workers=3), Watching()
    launches = with_slow_node(shop, monkeypatch, is_slow=lambda number: True)
    result = run_shared(
        monkeypatch,
        tmp_path / "r",
        shop,
        study={"trials": 8, "rounds": 3, "top_k": 1, "control": 0},
        options={"observer": watching},
    )
    assert len(spent(result)) == 8
    words = "node node-of-w1 is slow: its computations take 1.50x the time"
    assert sum(words in text for text in watching.messages) == 1
    assert sum("worker w1 is dismissed" in text for text in watching.messages) == 1
    assert all(trial.record.node_slowdowns is None for trial in result.trials)
    assert launches.count("node-of-w1") == 2


def test_second_looks_at_a_node_that_confirm_nothing_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, watching = Shop(seed=5, num_workers=2), Watching()
    launches = with_slow_node(shop, monkeypatch, is_slow=lambda number: number % 2 == 1)
    result = run_shared(
        monkeypatch,
        tmp_path / "r",
        shop,
        study={"trials": 16, "rounds": 3, "top_k": 1, "control": 0},
        options={"observer": watching},
    )
    assert len(spent(result)) == 16
    assert not any("is slow" in text for text in watching.messages)
    assert launches.count("node-of-w1") >= 6
    again = [
        event
        for event in map(json.loads, (tmp_path / "r" / "events.jsonl").read_text().splitlines())
        if event["kind"] == "again"
    ]
    assert [event["reason"] for event in again] == [
        "node node-of-w1 seems slow: it is measured again"
    ] * MAX_UNCONFIRMED_CHECKS


def test_the_last_worker_stays_though_its_node_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(seed=5, num_workers=1)

    def node_speeds(result: TrialResult) -> tuple[NodeSpeed, ...]:
        is_baseline = result.plan_key is None
        host, product_s = (shop.cluster[0].host, 1e-3) if is_baseline else ("other", 1.5e-3)
        return (NodeSpeed(host=host, kind=("H100", 8, 0), product_s=product_s, spread=0.01),)

    monkeypatch.setattr(shop, "node_speeds", node_speeds)
    result = run_shared(monkeypatch, tmp_path / "r", shop, study={"trials": 4, "rounds": 3, "top_k": 1})
    assert len(spent(result)) == 4
    assert all(trial.record.node_slowdowns for trial in result.trials if trial.number)
