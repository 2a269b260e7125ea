"""How likely plans run: what did not fit speaks for its neighbours, and so does expected memory."""

import random
from dataclasses import replace

import pytest

from quartet_plugin.calibration.feasibility import (
    SAME_LAYOUT,
    SAME_SCHEDULE,
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


def trial(
    plan: Plan, verdict: str, *, peak: int = 0, untracked: int = 0, excess: float = 0.0
) -> FinishedTrial:
    record = TrialRecord(
        verdict=verdict,  # type: ignore[arg-type]
        outcome="",
        reason="",
        attempt_id="",
        peak_memory_bytes=peak,
        untracked_memory_bytes=untracked,
        excess=excess,
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
    assert odds.chance(large.baseline) < 0.01


def test_measured_memory_corrects_what_is_expected() -> None:
    space = space_of(gpus(num=2))
    odds = FeasibilityModel(machine_model_of(space.nodes, precision="bf16"))
    expected = odds.peak_bytes(space.baseline)
    assert expected is not None
    odds.learn(trial(space.baseline, "measured", peak=round(1.5 * expected)))
    assert odds.peak_bytes(space.baseline) == pytest.approx(1.5 * expected, rel=0.05)


def test_what_the_allocator_does_not_hold_leaves_less_room(monkeypatch: pytest.MonkeyPatch) -> None:
    space = space_of(gpus(num=2))
    odds = FeasibilityModel(machine_model_of(space.nodes, precision="bf16"))
    memory = odds.memory(space.baseline)
    assert memory is not None
    near = replace(
        memory, parameters_bytes=memory.parameters_bytes + 0.9 * memory.available_bytes - memory.total_bytes
    )
    monkeypatch.setattr(FeasibilityModel, "memory", lambda *_: near)
    odds.learn(trial(space.baseline, "measured", peak=round(near.total_bytes)))
    before = odds.chance(space.baseline)
    assert 0.8 < before < 1.0
    # Half of the device is another program's: that is not the context.
    for share, is_less in ((0.5, False), (0.1, True)):
        untracked = round(share * memory.capacity_bytes)
        odds.learn(trial(space.baseline, "measured", peak=round(near.total_bytes), untracked=untracked))
        assert (odds.chance(space.baseline) < before - 0.1) == is_less


def test_where_no_one_says_a_devices_memory_every_plan_fits_until_one_does_not() -> None:
    space = space_of(make_nodes(2), num_layers=80, hidden_size=8192, ffn_hidden_size=32768)
    odds = FeasibilityModel(machine_model_of(space.nodes, precision="fp32"))
    need = odds.peak_bytes(space.baseline)
    assert need is not None
    assert odds.chance(space.baseline) == 1.0
    assert odds.share_of_memory(space.baseline) is None
    odds.learn(trial(a_plan(space), "infeasible", peak=round(0.4 * need), excess=0.1 * need))
    assert odds.chance(space.baseline) < 0.05


def limited(space: Space, *, limit_bytes: float) -> FeasibilityModel:
    model = machine_model_of(space.nodes, precision="fp32")
    return FeasibilityModel(replace(model, memory_limit_bytes=round(limit_bytes)))


def a_plan(space: Space, **wanted: object) -> Plan:
    generator = random.Random(0)
    plans = (space.decode(RandomParams(generator), trial=0) for _ in range(1000))
    return next(
        plan
        for plan in plans
        if plan.layout != space.baseline.layout
        and all(getattr(plan.layout, name) == value for name, value in wanted.items())
    )


def test_on_the_cpu_the_bytes_of_a_process_are_learned_beside_its_tensors() -> None:
    space = space_of(make_nodes(2))
    odds = limited(space, limit_bytes=2**40)
    for plan in (space.baseline, a_plan(space)):
        memory = odds.memory(plan)
        assert memory is not None
        odds.learn(trial(plan, "measured", peak=round(1.2e9 + memory.total_bytes)))
    other = a_plan(space, virtual_stages=2)
    memory = odds.memory(other)
    assert memory is not None
    assert odds.peak_bytes(other) == pytest.approx(1.2e9 + memory.total_bytes, rel=0.03)


def test_peaks_above_the_users_limit_teach_what_fits() -> None:
    space = space_of(make_nodes(2), num_layers=24, hidden_size=1024, ffn_hidden_size=4096)
    need = limited(space, limit_bytes=2**40).peak_bytes(space.baseline)
    assert need is not None
    odds = limited(space, limit_bytes=1.05 * need)
    assert 0.2 < odds.chance(space.baseline) < 0.9
    # The user's command is measured above the limit, and so is a plan that did not fit.
    command = trial(space.baseline, "measured", peak=round(1.3 * need))
    assert odds.exceeds_limit(command)
    odds.learn(command)
    assert odds.chance(space.baseline) < 0.05
    bad = a_plan(space)
    odds.learn(trial(bad, "infeasible", peak=round(1.5 * need), excess=0.45 * need))
    assert odds.peak_bytes(bad) > 1.2 * need  # type: ignore[operator]
