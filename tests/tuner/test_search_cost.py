"""The benchmark of the search's cost: it walks whole spaces, and what it replays is what was recorded."""

import random
import statistics
from functools import cache
from pathlib import Path

import pytest

from benchmarks.search_cost import grounds, replay
from benchmarks.search_cost.oracles import Constants, RecordedOracle, SyntheticOracle, schedule_of
from benchmarks.search_cost.record import EMBEDDING, HEAD, NEAR, _due, plans_of
from benchmarks.search_cost.recording import Entry, Recording, read_recording
from benchmarks.search_cost.walk import every_plan, key_of
from quartet_plugin.model.plan import Plan
from quartet_plugin.space.param_sources import RandomParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_nodes

FULL_SEARCHES = True  # read by `short_searches`

# Walking the whole recorded space takes minutes since splits are free.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def space_of(**search: object) -> Space:
    found = parse_config({"search": search}, where="x").search
    return build_space(make_job(), nodes=make_nodes(2), search=found, run="r", seed=0)


@cache
def recording() -> Recording:
    """A small space as a simulator has it, each plan launched three times with noise."""
    oracle = SyntheticOracle(constants=Constants(flops_per_s=3e10, half_speed_tokens=60.0, action_s=2e-4))
    ground = grounds.small()
    found = Recording(
        about="simulated",
        job=ground.job,
        nodes=ground.nodes,
        search={**ground.search, "virtual_stages": 1, "schedule": ["no-pipelining", "1f1b"]},
        environment={},
        entries={},
    )
    generator = random.Random(0)
    for key, plan in plans_of(found).items():
        for _ in range(3):
            times = oracle.measured_s(plan, generator, count=5)
            assert times is not None
            found.entries[key].launches.append(list(times))
    return found


@pytest.fixture
def ground(tmp_path: Path) -> replay.Ground:
    path = tmp_path / "recorded.json"
    recording().write(path)
    return grounds.recorded(path)


def test_walking_finds_every_plan_that_chance_does() -> None:
    space = space_of(schedule=["no-pipelining", "1f1b"], virtual_stages=1, micro_batch_size=[4, 8])
    walked = every_plan(space, embedding=EMBEDDING, head=HEAD)
    generator = random.Random(0)
    found: dict[str, Plan] = {}
    for _ in range(2000):
        plan = space.decode(RandomParams(generator), trial=0)
        found.setdefault(key_of(plan), plan)
    assert set(found) == set(walked)
    assert key_of(space.baseline) in walked


def test_plans_with_one_key_do_the_same() -> None:
    space = space_of(schedule=["zb-h1"], micro_batch_size=4, virtual_stages=1, mapping="stock")
    keys: dict[str, set[object]] = {}
    generator = random.Random(0)
    for _ in range(60):
        plan = space.decode(RandomParams(generator), trial=0)
        orders = tuple(tuple(order.tolist()) for order in schedule_of(plan).orders)
        keys.setdefault(key_of(plan), set()).add((plan.split, orders, plan.mapping))
    assert all(len(found) == 1 for found in keys.values())
    assert len(keys) > 3


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    recording().write(path)
    text = path.read_text()
    found = read_recording(path)
    found.write(path)
    assert path.read_text() == text
    assert "/" not in text
    assert (found.job, found.nodes, found.search) == (recording().job, recording().nodes, recording().search)


def test_launches_that_are_due_are_near_the_best_after_the_first_round() -> None:
    entries = {
        "fast": Entry(launches=[[1.0]]),
        "near": Entry(launches=[[1.2]]),
        "slow": Entry(launches=[[2.0]]),
        "refused": Entry(refused="no"),
        "new": Entry(),
    }
    one = Recording(about="", job=recording().job, nodes=(), search={}, environment={}, entries=dict(entries))
    assert _due(one, 0) == ["new"]
    one.entries["new"].launches.append([NEAR * 1.01])
    assert sorted(_due(one, 1)) == ["fast", "near"]


def test_replayed_launches_scatter_around_the_recorded_median() -> None:
    oracle = RecordedOracle(recording())
    plan = next(iter(plans_of(recording()).values()))
    truth = oracle.truth_s(plan)
    assert truth is not None
    generator = random.Random(0)
    medians = []
    for _ in range(400):
        times = oracle.measured_s(plan, generator, count=5)
        assert times is not None
        medians.append(statistics.median(times) / truth)
    assert statistics.median(medians) == pytest.approx(1.0, abs=0.01)
    assert statistics.stdev(medians) == pytest.approx(0.03, rel=0.5)


def test_a_plan_that_was_not_recorded_takes_its_nearest_splits_time() -> None:
    found = recording()
    plans = plans_of(found)
    key = next(key for key, plan in plans.items() if plan.split.transformer_layers_per_stage == (5, 3))
    parts = key.split(" | ")
    oracle = RecordedOracle(found)
    near = found.entries[" | ".join([*parts[:2], "6+2", *parts[3:]])]
    entries = {other: one for other, one in found.entries.items() if other != key}
    missing = RecordedOracle(
        Recording(
            about="", job=found.job, nodes=found.nodes, search=found.search, environment={}, entries=entries
        )
    )
    assert missing.truth_s(plans[key]) in (near.iteration_s, oracle.truth_s(plans[key.replace("5+3", "4+4")]))
    assert missing.stood_in == 1
    assert oracle.stood_in == 0


def test_both_sides_find_the_recorded_best(ground: replay.Ground) -> None:
    ours = replay.searched(ground, seed=0, limit=40)
    plain = replay.plain(ground, seed=0, limit=60)
    assert ours is not None
    assert plain.launched is not None
    assert plain.proposed is not None
    assert plain.launched <= plain.proposed
    assert (ours, plain) == (
        replay.searched(ground, seed=0, limit=40),
        replay.plain(ground, seed=0, limit=60),
    )


def test_a_limit_that_is_too_small_is_given_up(ground: replay.Ground) -> None:
    far = replay.Ground(
        name="far",
        job=ground.job,
        nodes=ground.nodes,
        search=ground.search,
        oracle=ground.oracle,
        best_s=ground.best_s / 2,
        num_plans=ground.num_plans,
    )
    assert replay.searched(far, seed=0, limit=4) is None
    assert replay.plain(far, seed=0, limit=4).launched is None


def test_the_regret_of_a_search_is_compared_with_what_it_missed(ground: replay.Ground) -> None:
    found = replay.regret_of(ground, seed=1, trials=6)
    assert found.low is not None
    assert found.high is not None
    assert 0.0 <= found.low <= found.high
    assert found.true >= 0.0
    assert not replay.RegretCheck(low=0.0, median=0.0, high=0.01, true=0.02).is_covered
    assert replay.RegretCheck(low=0.0, median=0.0, high=0.03, true=0.02).is_covered
