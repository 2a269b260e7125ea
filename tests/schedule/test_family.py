"""The family: it contains the named schedules, keeps memory caps, and its parameters survive JSON."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import InfeasibleError, PlanError
from quartet_plugin.schedule import placement as places
from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.schedule.family import Family, generate, run
from quartet_plugin.schedule.generator import NUM_SCALARS
from quartet_plugin.schedule.named import NAMED, named, refusal_of
from quartet_plugin.schedule.search.problem import FamilyCandidate, ScheduleProblem
from quartet_plugin.schedule.search.space import family_starts
from quartet_plugin.schedule.simulate import simulate, simulate_costs
from quartet_plugin.split.entries import balanced_entries, even_entries
from tests.schedule.sample_costs import random_costs, uneven, uniform

numbers = st.floats(0.0, 4.0)
rules = st.one_of(st.just(math.inf), st.floats(0.0, 6.0))


@st.composite
def families(draw: st.DrawFn, num_chunks: int, num_stages: int) -> Family:
    chunks = st.tuples(*[numbers] * num_chunks)
    return Family(
        stretch_forward=draw(chunks),
        stretch_backward=draw(chunks),
        shift_forward=draw(chunks),
        shift_backward=draw(chunks),
        w_gap=draw(rules),
        group=draw(st.integers(1, 8)),
        slack=draw(rules),
        memory_cap=draw(st.one_of(st.just(math.inf), st.floats(1.0, 6.0))),
        w_limit=draw(rules),
        w_fill=draw(st.floats(0.0, 1.0)),
        patience=draw(st.floats(0.0, 1.0)),
        full_backward=draw(st.tuples(*[st.booleans()] * num_stages)),
    )


@given(
    p=st.integers(1, 5),
    v=st.integers(1, 3),
    m=st.integers(1, 9),
    seed=st.integers(0, 99),
    tight=st.booleans(),
    data=st.data(),
)
@settings(deadline=None, max_examples=120)
def test_any_parameters_make_a_legal_order_within_the_cap(
    p: int, v: int, m: int, seed: int, tight: bool, data: st.DataObject
) -> None:
    placement = data.draw(st.sampled_from([places.loop(p, v), places.snake(p, v)]))
    family = data.draw(families(v, p * v))
    costs = uneven(placement, seed)
    share = np.bincount(placement, weights=costs.activation_bytes, minlength=p)
    limit = share * data.draw(st.floats(1.0, 3.0)) if tight else None
    schedule = generate(family, costs, m, memory_limit_bytes=limit)
    # Completeness, precedence and the limit are checked by the simulator.
    result = simulate(schedule, costs, memory_limit_bytes=limit)
    assert np.all(result.peak_activation_bytes <= share * family.memory_cap * (1 + 1e-9))
    makespan, _, _ = run(family, costs, m, memory_limit_bytes=limit)
    assert result.makespan_s <= makespan * (1 + 1e-9)
    for device in range(p):
        for stage in places.stages_of_device(placement, p)[device]:
            kinds = {a.kind for a in schedule.actions(device) if a.stage == stage}
            whole = family.full_backward[stage]
            assert kinds == (
                {ActionKind.F, ActionKind.B} if whole else {ActionKind.F, ActionKind.I, ActionKind.W}
            )


def test_a_cap_below_one_microbatch_is_refused() -> None:
    family = family_starts(1, 2, 4)[0]
    with pytest.raises(InfeasibleError, match="memory_limit_bytes"):
        generate(family, uniform((0, 1)), 4, memory_limit_bytes=np.array([0.9, 2.0]))


def test_no_slack_is_a_static_order_of_keys() -> None:
    family = Family(
        stretch_forward=(1.0,),
        stretch_backward=(1.0,),
        shift_forward=(0.0,),
        shift_backward=(0.0,),
        slack=0.0,
        full_backward=(True,) * 4,
    )
    slow = generate(family, uniform((0, 1, 2, 3), shares=(1.0, 5.0, 5.0)), 12)
    for device in range(4):
        kinds = "".join(a.kind.name for a in slow.actions(device))
        assert "FB" * (12 - 4) in kinds


@pytest.mark.parametrize("name", sorted(n for n, spec in NAMED.items() if spec.executable))
@pytest.mark.parametrize(("p", "k"), [(3, 3), (4, 2), (4, 4), (8, 4)])
def test_named_schedules_are_points_of_the_family(name: str, p: int, k: int) -> None:
    """A candidate reaches each one's makespan at its own placement and memory, full backwards kept full."""
    m = p * k
    assert refusal_of(name, num_devices=p, num_microbatches=m) is None
    schedule = named(name, num_devices=p, num_microbatches=m)
    costs = uniform(schedule.placement)
    aim = simulate(schedule, costs)
    whole = (not NAMED[name].split_backward,) * len(schedule.placement)
    limit = aim.peak_activation_bytes.max() * np.ones(p)
    best = math.inf
    for family in _candidates(name, p, m):
        made = run(replace(family, full_backward=whole), costs, m, memory_limit_bytes=limit)
        best = min(best, made[0])
        if best <= aim.makespan_s * (1 + 1e-9):
            return
    pytest.fail(f"best candidate {best}, {name} {aim.makespan_s}")


def _candidates(name: str, p: int, m: int) -> list[Family]:
    v = NAMED[name].default_num_chunks
    found = family_starts(v, p, m)
    if v == 2:
        found += [
            Family(
                stretch_forward=(1.0,) * v,
                stretch_backward=(backward,) * v,
                shift_forward=(0.0, forward_shift),
                shift_backward=(0.0, backward_shift),
                slack=slack,
            )
            for backward in (1.0, 1.5)
            for forward_shift in (-0.5, 0.0, 0.5)
            for backward_shift in (-0.5, 0.0, 0.5, 1.0)
            for slack in (0.34, 1.0, 2.0, math.inf)
        ]
    return found


@given(data=st.data(), v=st.integers(1, 3), stages=st.integers(1, 6))
@settings(deadline=None, max_examples=50)
def test_json_and_vector_are_exact_inverses(data: st.DataObject, v: int, stages: int) -> None:
    family = data.draw(families(v, stages))
    assert Family.from_json(json.loads(json.dumps(family.to_json(), allow_nan=False))) == family
    assert Family.from_vector(family.to_vector(), np.array(family.full_backward, dtype=np.int64)) == family


def test_json_refuses_unknown_keys() -> None:
    data = family_starts(1, 2, 4)[0].to_json()
    with pytest.raises(PlanError, match="unknown or missing"):
        Family.from_json(data | {"colour": 1})


@given(seed=st.integers(0, 99), v=st.integers(1, 3), data=st.data())
@settings(deadline=None, max_examples=40)
def test_the_climbs_evaluation_is_the_familys(seed: int, v: int, data: st.DataObject) -> None:
    costs = random_costs(num_devices=3, num_microbatches=6, num_layers=12, seed=seed, cap_shares=3.0)
    placement = places.snake(3, v)
    split = balanced_entries(costs, placement)
    family = data.draw(families(v, 3 * v))
    problem = ScheduleProblem.of(costs, has_period_objective=False, allow_empty=False, has_free_split=True)
    candidate = FamilyCandidate(
        placement=placement,
        split=split,
        params=family.to_vector(),
        full_backward=np.array(family.full_backward, dtype=np.int64),
    )
    stages = problem.stage_costs(placement, split)
    makespan, _, _ = run(family, stages, 6, memory_limit_bytes=costs.memory_limit_bytes)
    score = candidate.climb(problem, num_microbatches=6, steps=0, target=0.0, seed=0).score
    assert score == pytest.approx(makespan, rel=1e-9)
    climbed = candidate.climb(problem, num_microbatches=6, steps=30, target=0.0, seed=seed)
    assert climbed.score <= score * (1 + 1e-9)
    assert sum(climbed.split) == len(costs.layers)
    assert min(climbed.split) >= 1


def test_the_climb_can_minimize_the_period() -> None:
    costs = random_costs(num_devices=3, num_microbatches=6, num_layers=12, seed=3)
    split = even_entries(costs, 3)
    problem = ScheduleProblem.of(costs, has_period_objective=True, allow_empty=False, has_free_split=False)
    family = family_starts(1, 3, 6)[5]
    candidate = FamilyCandidate(
        placement=(0, 1, 2), split=split, params=family.to_vector(), full_backward=np.zeros(3, dtype=np.int64)
    )
    score = candidate.climb(problem, num_microbatches=6, steps=0, target=0.0, seed=0).score
    schedule = generate(family, problem.stage_costs((0, 1, 2), split), 6)
    result = simulate_costs(replace(schedule, layers_per_stage=split), costs)
    assert score == pytest.approx(result.period_s, rel=1e-9)


def test_the_vector_has_the_kernels_length() -> None:
    assert len(family_starts(2, 4, 8)[0].to_vector()) == 8 + NUM_SCALARS
