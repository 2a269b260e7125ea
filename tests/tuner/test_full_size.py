"""Tuning runs whose trials have fewer replicas: what is handed over, and the comparison at full size."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.calibration.feasibility import FeasibilityModel
from quartet_plugin.cli.full_size import full_size_lines, full_size_nodes
from quartet_plugin.errors import ConfigError, InfrastructureError, PlanError
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.launchers.slurm_batch import SlurmBatchEngine
from quartet_plugin.model.full_size import Confirmation, FullSize
from quartet_plugin.model.measurement import Interval
from quartet_plugin.model.plan import Plan, read_plan
from quartet_plugin.model.schema import read_record
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.schedule.named import named
from quartet_plugin.space.features import FEWER_STAGES
from quartet_plugin.space.full_size import full_nodes
from quartet_plugin.space.param_sources import RandomParams
from quartet_plugin.space.plan_space import build_space
from quartet_plugin.space.written_schedules import WrittenSchedule
from quartet_plugin.trial.attempt import read_result
from quartet_plugin.trial.request import Outcome, TrialRequest, TrialResult
from quartet_plugin.tuner.config import parse_config, placement_of, with_launcher
from quartet_plugin.tuner.full_size import RULE, FullSizeNodes, FullSizeStudy
from quartet_plugin.tuner.history_rows import read_events
from quartet_plugin.tuner.run_folder import TuningRun
from quartet_plugin.tuner.trial_backend import TrialBackend
from quartet_plugin.tuner.tune_result import TuneResult, write_best
from tests.space.jobs import make_job, make_layout, make_nodes
from tests.tuner.fakes import COMMAND, FakeMachine, Killed, Watching, by_formula, resume, tune
from tests.tuner.fakes import begin_with_journal as begin
from tests.tuner.run_folders import WritingMachine

NODES = make_nodes(1, 1)
FACTOR = 4
CONFIG = {
    "launcher": "slurm",
    "device": "cpu",
    "nodes": 2 * FACTOR,
    "search": {"schedule": ["1f1b", "no-pipelining"]},
}
RUN = {
    **CONFIG,
    "study": {"trials": 4, "control": 0, "rounds": 3, "top_k": 1},
    "trial": {"nodes": 2},
}
SLOWDOWN = 1.5


def seconds(plan: Plan) -> float:
    """Micro-batches of one and mappings of another order are slow."""
    return by_formula(plan) * (1.0 + 0.4 * (plan.layout.micro_batch_size == 1))


@dataclass
class FullNodes:
    """The same machine on all nodes; `opened` counts how often it was asked for."""

    machine: FakeMachine = field(
        default_factory=lambda: FakeMachine(
            job=make_job(layout=make_layout(data_parallel=FACTOR), global_batch_size=32 * FACTOR),
            cluster=full_nodes(NODES, factor=FACTOR),
            seconds=seconds,
        )
    )
    opened: int = 0

    @contextmanager
    def _open(self) -> Iterator[TrialBackend]:
        self.opened += 1
        yield self.machine

    @property
    def nodes(self) -> FullSizeNodes:
        def opener() -> AbstractContextManager[TrialBackend]:
            return self._open()

        return FullSizeNodes(command=parse_command(COMMAND, environment={}), open_backend=opener)


def part_of_a_replica() -> TrainingJob:
    """What trial 0 reports where it has half of the training's stages."""
    return replace(make_job(features=(FEWER_STAGES,)), stage_divisor=2)


def run_and_tune(
    path: Path, *, job: TrainingJob | None = None, **options: Any
) -> tuple[TuningRun, TuneResult, Watching]:
    watching = Watching()
    run = begin(path, **RUN)
    machine = FakeMachine(job=job or make_job(), cluster=NODES, seconds=seconds)
    return run, tune(run, machine, observer=watching, **options), watching


def at_full_size(search: dict[str, Any], *, written: dict[str, WrittenSchedule] | None = None) -> Plan:
    """A plan of two devices with the search's schedule, and four stages a device pair at full size."""
    job = replace(
        make_job(layout=make_layout(pipeline_parallel=2)), features=(FEWER_STAGES,), stage_divisor=2
    )
    config = parse_config({"search": search}, where="test").search
    space = build_space(job, nodes=NODES, search=config, run="r", seed=0, written=written)
    study: Any = FullSizeStudy(context=None, space=space, factor=2, predictor=None, nodes="")  # type: ignore[arg-type]
    plan = space.decode(RandomParams(random.Random(0)), trial=0)
    assert plan.schedule.custom is not None
    full: Plan = study._full(plan)
    return full


def test_a_searched_order_keeps_the_limits_of_its_family_at_full_size() -> None:
    search = {"schedule": "searched", "virtual_stages": 2, "schedule_family": {"placement": "loop"}}
    full = at_full_size(search)
    assert full.schedule.custom is not None
    assert full.schedule.custom.placement == (0, 1, 2, 3, 0, 1, 2, 3)


def test_the_order_of_a_file_has_no_form_at_full_size() -> None:
    made = named("zb-h1", num_devices=2, num_microbatches=4)
    known = WrittenSchedule(schedule=replace(made, layers_per_stage=(4, 6)))
    other = WrittenSchedule(schedule=replace(known.schedule, origin={}))
    search = {"schedule": "mine.json"}
    assert at_full_size(search, written={"mine.json": known}).schedule.label == "zb-h1"
    with pytest.raises(PlanError, match="the order of a file"):
        at_full_size(search, written={"mine.json": other})


def test_the_winner_is_handed_over_with_all_replicas(tmp_path: Path) -> None:
    run, result, watching = run_and_tune(tmp_path / "a", full_size="the allocation has 2 nodes")
    assert result.winner is not None
    assert result.full_size is not None
    write_best(result, run=run)
    small, full = read_plan(run.folder.best_plan), read_plan(run.folder.full_plan)
    assert full.layout.data_parallel == FACTOR * small.layout.data_parallel
    assert full.num_microbatches == small.num_microbatches
    assert len(full.made_for.nodes) == 2 * FACTOR
    assert full.prediction is not None
    assert full.prediction.iteration_s is not None
    said = read_record(FullSize, run.folder.full_prediction)
    assert said == result.full_size.result
    assert said.unconfirmed == "the allocation has 2 nodes"
    assert said.iteration_s.low < said.iteration_s.median < said.iteration_s.high
    assert f"--nodes {2 * FACTOR}" in run.folder.full_command.read_text()
    assert "--nodes 2 " in run.folder.best_command.read_text()
    assert result.choice is not None
    assert result.choice.rule == RULE
    assert any(text.startswith("full size: 8 nodes") for text in watching.messages)


def test_the_winner_is_compared_once_where_there_are_nodes(tmp_path: Path) -> None:
    at_full = FullNodes()
    run, result, _ = run_and_tune(tmp_path / "a", full_size=at_full.nodes)
    assert result.winner is not None
    assert result.full_size is not None
    number = result.winner.trial.number
    assert at_full.opened == 1
    assert [name for name, _ in at_full.machine.launched] == [
        "000000-round-1",
        f"{number:06d}-round-1",
        f"{number:06d}-round-2",
        "000000-round-2",
    ]
    keys = [key for _, key in at_full.machine.launched]
    assert keys[0] is None
    assert keys[1] == keys[2] == result.full_size.plan.key
    confirmed = result.full_size.result.confirmation
    assert confirmed is not None
    assert len(confirmed.iteration_s) == len(confirmed.baseline_iteration_s) == 2
    assert confirmed.speedup > 1.0
    assert any("measured there" in line for line in _lines_of(result, run))
    # The comparison is not the study's: it measures the winner alone, and no trial is at full size.
    assert all(len(trial.plan.made_for.nodes) == 2 for trial in result.trials)


def session(
    run: TuningRun, machine: FakeMachine, at_full: FullNodes
) -> tuple[Confirmation | None, list[str]]:
    """The comparison of a session of the run, and the folders of the launches that it made for it."""
    num_before = len(at_full.machine.launched)
    result = tune(run, machine, full_size=at_full.nodes)
    assert result.full_size is not None
    launched = [name for name, _ in at_full.machine.launched[num_before:]]
    return result.full_size.result.confirmation, launched


def writing_machine(machine: type[WritingMachine] = WritingMachine, **options: Any) -> FullNodes:
    """All nodes, on which each launch leaves its files."""
    fake = FullNodes().machine
    return FullNodes(machine(job=fake.job, cluster=fake.cluster, seconds=seconds, **options))


@pytest.mark.parametrize("num_measured", [1, 2, 3])
def test_only_launches_of_one_session_are_compared_at_full_size(tmp_path: Path, num_measured: int) -> None:
    """The machine is slower when the run is resumed."""
    undisturbed, launches = session(
        begin(tmp_path / "whole", **RUN),
        FakeMachine(job=make_job(), cluster=NODES, seconds=seconds),
        FullNodes(),
    )
    assert undisturbed is not None
    machine = FakeMachine(job=make_job(), cluster=NODES, seconds=seconds)
    at_full = writing_machine(dies_at=num_measured)
    run = begin(tmp_path / "r", **RUN)
    with pytest.raises(Killed):
        session(run, machine, at_full)
    at_full.machine.seconds = lambda plan: SLOWDOWN * seconds(plan)
    confirmed, launched = session(resume(tmp_path / "r"), machine, at_full)
    assert launched == launches
    assert confirmed is not None
    assert confirmed.speedup == pytest.approx(undisturbed.speedup)
    slowed = [SLOWDOWN * time_s for time_s in undisturbed.baseline_iteration_s]
    assert confirmed.baseline_iteration_s == pytest.approx(slowed)
    results = [read_result(path) for path in run.folder.full_size.glob("*/attempt-*")]
    assert Counter(each.is_superseded for each in results if each is not None) == {
        True: num_measured,
        False: len(launches),
    }
    again = [event for event in read_events(run.folder.events_file) if event["kind"] == "full-size-again"]
    assert [event["superseded"] for event in again] == [num_measured]
    assert session(resume(tmp_path / "r"), machine, at_full) == (confirmed, [])


def test_another_winner_is_not_compared_with_earlier_launches(tmp_path: Path) -> None:
    """Of the earlier comparison the launches of the user's command alone are on disk."""
    machine = FakeMachine(job=make_job(), cluster=NODES, seconds=seconds)
    at_full = writing_machine()
    _, launches = session(begin(tmp_path / "r", **RUN), machine, at_full)
    disk = at_full.machine.disk
    at_full.machine.disk = {path: result for path, result in disk.items() if path.name.startswith("000000")}
    _, launched = session(resume(tmp_path / "r"), machine, at_full)
    assert launched == launches


class PlansDoNotFit(WritingMachine):
    """Nodes on which only the user's command has enough memory."""

    def _result(self, request: TrialRequest) -> TrialResult:
        result = super()._result(request)
        if request.plan is None:
            return result
        return replace(result, outcome=Outcome.INFEASIBLE, iteration_s=())


def test_a_comparison_that_a_failed_launch_has_ended_is_not_launched_again(tmp_path: Path) -> None:
    machine = FakeMachine(job=make_job(), cluster=NODES, seconds=seconds)
    at_full = writing_machine(PlansDoNotFit)
    confirmed, launched = session(begin(tmp_path / "r", **RUN), machine, at_full)
    assert (confirmed, len(launched)) == (None, 2)
    assert session(resume(tmp_path / "r"), machine, at_full) == (None, [])


class OtherDevices(FakeMachine):
    """Nodes of which the last has another device."""

    def run(self, *_: Any, **__: Any) -> Any:
        raise InfrastructureError("node-7: other devices than in the first launch")


def test_a_comparison_that_cannot_be_launched_leaves_the_winner(tmp_path: Path) -> None:
    machine = OtherDevices(job=make_job(), cluster=full_nodes(NODES, factor=FACTOR), seconds=seconds)
    run, result, _ = run_and_tune(tmp_path / "a", full_size=FullNodes(machine=machine).nodes)
    assert result.winner is not None
    assert result.full_size is not None
    assert result.full_size.result.confirmation is None
    reason = "0 at full size 1 was not measured: node-7: other devices than in the first launch"
    assert result.full_size.result.unconfirmed == reason
    assert write_best(result, run=run) is not None
    assert run.folder.full_plan.is_file()


def test_of_a_replica_that_is_larger_all_stages_are_handed_over(tmp_path: Path) -> None:
    """Trials of two processes with half of the stages: on 8 nodes PP is doubled and DP is what is left."""
    job = part_of_a_replica()
    _, result, watching = run_and_tune(tmp_path / "a", job=job, full_size="the allocation has 2 nodes")
    assert result.winner is not None
    assert result.full_size is not None
    small, full = result.winner.trial.plan, result.full_size.plan
    assert full.layout.pipeline_parallel == 2 * small.layout.pipeline_parallel
    assert full.layout.data_parallel * 2 == FACTOR * small.layout.data_parallel
    assert full.shape.num_layers == full.made_for.shape.num_layers == 2 * job.shape.num_layers
    assert full.num_microbatches == small.num_microbatches
    assert all(trial.plan.mapping.is_stock for trial in result.trials)
    assert any(text.startswith("a replica is larger than a trial") for text in watching.messages)
    assert any(text.startswith(f"full size: {full.layout.label}") for text in watching.messages)


def test_a_plan_that_more_stages_make_too_large_is_not_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FeasibilityModel, "share_of_memory", lambda self, plan: 1.2)
    _, result, watching = run_and_tune(tmp_path / "a", job=part_of_a_replica())
    assert result.full_size is None
    assert any("predicted to need 120% of a device's memory" in text for text in watching.messages)


def _lines_of(result: TuneResult, run: TuningRun) -> list[str]:
    assert result.full_size is not None
    return full_size_lines(result.full_size.result, run=run)


def test_nodes_are_a_multiple_of_a_trials_and_belong_to_a_launcher() -> None:
    asked = with_launcher(
        parse_config({"device": "cpu"}, where="t"), launcher="slurm", trial_nodes=2, site=None, nodes=8
    )
    placement = placement_of(asked)
    parsed = parse_command(["torchrun", "--nproc-per-node", "4", "t.py"], environment={})
    assert placement.command(parsed).batch_divisor == 4
    assert placement.at_full_size.command(parsed).batch_divisor == 1
    assert placement.at_full_size.command(parsed).num_nodes == 8
    with pytest.raises(ConfigError, match=r"nodes: 8; must be a multiple of trial.nodes \(3\)"):
        placement_of(asked.model_copy(update={"trial": asked.trial.model_copy(update={"nodes": 3})}))
    local = parse_config({"nodes": 2}, where="t")
    with pytest.raises(ConfigError, match="nodes: 2; this machine is one node"):
        placement_of(local).command(parsed)


def test_why_nothing_is_launched_at_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["torchrun", "--nproc-per-node", "4", "t.py"]
    monkeypatch.setattr(SlurmBatchEngine, "divide", lambda self, *, num_nodes, at_once: ((),) * at_once)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    def why(**changes: Any) -> FullSizeNodes | str:
        config = parse_config({**CONFIG, "trial": {"nodes": 2}, **changes}, where="t")
        return full_size_nodes(config, placement=placement_of(config), words=words)

    assert why(confirm="none") == "confirm: none"
    assert why(launcher="slurm-batch") == "launcher: slurm-batch: a queue would have to give 8 nodes at once"
    assert "SLURM_JOB_ID is not set" in str(why())


def test_a_confirmation_and_its_lack_go_apart() -> None:
    interval = Interval(median=1.0, low=0.9, high=1.1)
    result = FullSize(
        num_nodes=8,
        num_trial_nodes=2,
        iteration_s=interval,
        baseline_iteration_s=interval,
        speedup=interval,
        unconfirmed="no time",
    )
    confirmed = Confirmation(iteration_s=(1.0,), baseline_iteration_s=(1.2,), speedup=1.2)
    with pytest.raises(ConfigError, match="must be set if and only if"):
        replace(result, confirmation=confirmed)
