"""How likely plans run: what did not fit speaks for its neighbours, and so does expected memory."""

import random
from dataclasses import replace

import pytest

from quartet_plugin.calibration.feasibility import (
    OVER_CHANCE,
    SAME_LAYOUT,
    SAME_SCHEDULE,
    TIGHT,
    TIGHT_CHANCE,
    FeasibilityModel,
)
from quartet_plugin.calibration.machine_prior import machine_model_of
from quartet_plugin.model.plan import NodeInfo, Plan
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord
from quartet_plugin.space.param_sources import RandomParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape


def space_of(nodes: tuple[NodeInfo, ...], **shape: int) -> Space:
    config = parse_config(
        {"search": {"schedule": ["no-pipelining", "1f1b", "interleaved"]}}, where="test"
    ).search
    layout = make_layout(pipeline_parallel=sum(node.num_slots for node in nodes))
    job = make_job(layout=layout, shape=make_shape(**shape))
    return build_space(job, nodes=nodes, search=config, run="r", seed=0)


def gpus(*, num: int) -> tuple[NodeInfo, ...]:
    return tuple(replace(node, node_class=f"NVIDIA H100 80GB HBM3 x{num}") for node in make_nodes(num))


def trial(plan: Plan, verdict: str, *, peak: int = 0, untracked: int = 0) -> FinishedTrial:
    record = TrialRecord(
        verdict=verdict,  # type: ignore[arg-type]
        outcome="",
        reason="",
        attempt_id="",
        peak_memory_bytes=peak,
        untracked_memory_bytes=untracked,
    )
    return FinishedTrial(number=1, plan=plan, record=record)


def test_neighbours_of_what_did_not_fit_are_less_likely_to() -> None:
    space = space_of(make_nodes(2))
    odds = FeasibilityModel(machine_model_of(space.nodes, precision="fp32"))
    generator = random.Random(0)
    plans = [space.decode(RandomParams(generator), trial=0) for _ in range(60)]
    bad = next(plan for plan in plans if plan.layout.virtual_stages > 1)
    assert odds.chance(bad) == 1.0
    odds.learn(trial(bad, "infeasible"))
    assert odds.chance(bad) == SAME_SCHEDULE
    assert odds.chance(space.baseline) == 1.0
    odds.learn(trial(bad, "measured"))
    assert odds.chance(bad) == SAME_LAYOUT


def test_plans_that_need_more_memory_than_there_is_are_unlikely() -> None:
    small, large = (
        space_of(gpus(num=2)),
        space_of(gpus(num=2), num_layers=80, hidden_size=8192, ffn_hidden_size=32768),
    )
    odds = FeasibilityModel(machine_model_of(small.nodes, precision="bf16"))
    assert odds.chance(small.baseline) == 1.0
    assert odds.chance(large.baseline) == OVER_CHANCE


def test_measured_memory_corrects_what_is_expected() -> None:
    space = space_of(gpus(num=2))
    odds = FeasibilityModel(machine_model_of(space.nodes, precision="bf16"))
    expected = odds.peak_bytes(space.baseline)
    assert expected is not None
    odds.learn(trial(space.baseline, "measured", peak=round(1.5 * expected)))
    assert odds.peak_bytes(space.baseline) == pytest.approx(1.5 * expected, rel=1e-6)


def test_what_the_allocator_does_not_hold_leaves_less_room(monkeypatch: pytest.MonkeyPatch) -> None:
    space = space_of(gpus(num=2))
    odds = FeasibilityModel(machine_model_of(space.nodes, precision="bf16"))
    memory = odds.memory(space.baseline)
    assert memory is not None
    near = replace(memory, parameters=memory.parameters + (TIGHT - 0.02) * memory.available - memory.total)
    monkeypatch.setattr(FeasibilityModel, "memory", lambda *_: near)
    assert odds.chance(space.baseline) == 1.0
    # Half of the device is another program's.
    for share, chance in ((0.5, 1.0), (0.1, TIGHT_CHANCE)):
        untracked = round(share * memory.capacity)
        odds.learn(trial(space.baseline, "measured", peak=round(near.total), untracked=untracked))
        assert odds.chance(space.baseline) == chance


def test_where_the_device_is_not_known_nothing_is_said_of_memory() -> None:
    space = space_of(make_nodes(2), num_layers=80, hidden_size=8192, ffn_hidden_size=32768)
    odds = FeasibilityModel(machine_model_of(space.nodes, precision="fp32"))
    assert odds.chance(space.baseline) == 1.0
    assert odds.peak_bytes(space.baseline) is None
