"""The search: never worse than named schedules, repeatable, within its limits, near proven optima."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from quartet_plugin.errors import ConfigError, InfeasibleError
from quartet_plugin.model.costs import Costs
from quartet_plugin.model.files import read_json
from quartet_plugin.schedule import placement as places
from quartet_plugin.schedule.compilation import compilation_time
from quartet_plugin.schedule.exact import exact_optimum
from quartet_plugin.schedule.files import costs_from_json
from quartet_plugin.schedule.named import named
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.search import SearchResult, search
from quartet_plugin.schedule.search.effort import stopped_by
from quartet_plugin.schedule.search.insertion import improve_orders
from quartet_plugin.schedule.search.limits import FamilyLimits
from quartet_plugin.schedule.search.refinement import NoisyCosts
from quartet_plugin.schedule.simulate import flatten, lanes_of, simulate, simulate_costs
from quartet_plugin.split.entries import even_entries
from tests.schedule.sample_costs import random_costs, uneven

GOLDEN = Path(__file__).parents[1] / "golden"


def costs_for(
    p: int, m: int, seed: int, cap: float | None = None, layers: int | None = None, head: float = 2.0
) -> Costs:
    return random_costs(
        num_devices=p,
        num_microbatches=m,
        num_layers=3 * p if layers is None else layers,
        seed=seed,
        cap_shares=cap,
        head=head,
    )


def same(first: Schedule, second: Schedule) -> bool:
    return (first.placement, first.layers_per_stage) == (second.placement, second.layers_per_stage) and all(
        np.array_equal(a, b) for a, b in zip(first.orders, second.orders, strict=True)
    )


@pytest.mark.slow
@given(
    p=st.integers(2, 5),
    m=st.integers(1, 9),
    seed=st.integers(0, 999),
    cap=st.one_of(st.none(), st.floats(2.5, 6.0)),
    split=st.sampled_from(["auto", "even"]),
)
@settings(deadline=None, max_examples=15)
def test_never_worse_than_the_best_named_and_legal(
    p: int, m: int, seed: int, cap: float | None, split: str
) -> None:
    costs = costs_for(p, m, seed, cap)
    result = search(costs, split=split, evaluations=400, seed=seed)
    again = simulate_costs(result.schedule, costs)
    assert again.makespan_s == result.simulation.makespan_s
    if result.named_best is not None:
        assert result.simulation.makespan_s <= result.named_best.score_s * (1 + 1e-9)
        best = simulate_costs(result.named_best.schedule, costs)
        assert best.makespan_s == pytest.approx(result.named_best.score_s)


def test_beats_the_named_schedules_under_tight_memory() -> None:
    costs = costs_for(6, 12, seed=4, cap=4.5)
    result = search(costs, split="even", evaluations=4000)
    assert result.named_best is not None
    assert result.simulation.makespan_s < 0.97 * result.named_best.score_s
    assert "family" in result.schedule.origin


@pytest.mark.parametrize("split", ["auto", "even"])
def test_a_seed_and_a_number_of_evaluations_decide_the_result(
    split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = costs_for(4, 8, seed=7)
    first = search(costs, split=split, evaluations=1500, seed=3)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    ticks = itertools.count()
    second = search(costs, split=split, evaluations=1500, seed=3, clock=lambda: float(next(ticks)))
    assert same(first.schedule, second.schedule)
    assert first.num_evaluations == second.num_evaluations
    assert first.num_evaluations == pytest.approx(1500, rel=0.3)


def test_a_search_without_a_limit_does_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quartet_plugin.schedule.search.engine._DEFAULT_WORK", 100_000)
    costs = costs_for(4, 8, seed=7)
    slow = itertools.count(step=1_000)
    results = [search(costs, clock=clock) for clock in (lambda: 0.0, lambda: float(next(slow)))]
    assert same(results[0].schedule, results[1].schedule)
    assert 300 < results[0].num_evaluations == results[1].num_evaluations < 600


@pytest.mark.parametrize("cap", [2.0, 2.5, 3.0])
def test_a_tight_cap_is_never_worse_than_v_half_and_v_min(cap: float) -> None:
    costs = replace(
        costs_for(4, 16, seed=3, layers=16, cap=cap), device_slowdown=np.ones(4), transfer_s=np.zeros((4, 4))
    )
    result = search(costs, placement="v", split="even", evaluations=300)
    assert result.named_best is None or (
        result.simulation.makespan_s <= result.named_best.score_s * (1 + 1e-9)
    )
    assert costs.memory_limit_bytes is not None
    assert (result.simulation.peak_activation_bytes <= costs.memory_limit_bytes * (1 + 1e-9)).all()


def test_the_time_limit_is_kept() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.01
        return now[0]

    result = search(costs_for(4, 8, seed=1), time_limit_s=1.0, clock=clock)
    assert result.elapsed_s < 2.0


def test_a_limit_ends_the_start_of_a_search_with_the_best_named_schedule() -> None:
    """A long pipeline's start is most of its search: it ends between its tasks, too."""
    result = search(costs_for(4, 8, seed=1), split="even", time_limit_s=0.0)
    assert result.is_cut
    assert result.num_evaluations == 0  # no order of the family
    assert result.named_best is not None
    assert result.named_best.score_s == result.simulation.makespan_s
    whole = search(costs_for(4, 8, seed=1), split="even", evaluations=1)
    assert not whole.is_cut
    assert whole.num_evaluations > 0
    assert whole.named_best is not None
    assert whole.named_best.score_s == result.named_best.score_s


def test_a_limit_leaves_an_order_where_no_named_schedule_fits() -> None:
    limits = FamilyLimits(slacks=(1.0,))
    result = search(costs_for(4, 8, seed=1), split="even", time_limit_s=0.0, limits=limits)
    assert result.is_cut
    assert result.named_best is None
    assert result.num_evaluations > 0


def test_a_limit_that_is_not_reached_changes_nothing() -> None:
    costs = costs_for(4, 8, seed=7)
    free, limited = (search(costs, evaluations=300, time_limit_s=limit) for limit in (None, 1e6))
    assert same(free.schedule, limited.schedule)
    assert (free.num_evaluations, free.best_score_s) == (limited.num_evaluations, limited.best_score_s)
    assert not limited.is_cut


class StoppedError(Exception):
    """Raised to end a search."""


@pytest.mark.parametrize("num_checks", [1, 10, 60])
def test_a_stop_ends_a_search_in_its_middle_and_leaves_later_ones_alone(num_checks: int) -> None:
    costs = costs_for(4, 8, seed=7)
    expected = search(costs, evaluations=300).schedule
    asked = itertools.count(1)

    def check_stop() -> None:
        if next(asked) == num_checks:
            raise StoppedError

    with pytest.raises(StoppedError), stopped_by(check_stop):
        search(costs, evaluations=300)
    assert next(asked) == num_checks + 1
    assert same(search(costs, evaluations=300).schedule, expected)


def random_problem(seed: int) -> tuple[Costs, str]:
    rng = np.random.default_rng(seed)
    p, m = int(rng.integers(2, 6)), int(rng.integers(2, 25))
    costs = costs_for(p, m, seed, cap=None if rng.random() < 0.4 else float(rng.uniform(p / 2 + 1, 2 * p)))
    return costs, "auto" if rng.random() < 0.5 else "even"


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(20, 50))]
)
def test_ten_times_the_evaluations_or_the_time_never_find_a_longer_one(seed: int) -> None:
    costs, split = random_problem(seed)

    def makespan(limit: int, *, in_ticks: bool) -> float:
        if not in_ticks:
            return search(costs, split=split, evaluations=limit, seed=seed).simulation.makespan_s
        # A clock of its own, so that a round is cut off anywhere and the machine's speed does not matter.
        ticks = itertools.count()
        result = search(costs, split=split, time_limit_s=limit, seed=seed, clock=lambda: float(next(ticks)))
        return result.simulation.makespan_s

    few = 30 + 2 * seed
    assert makespan(10 * few, in_ticks=False) <= makespan(few, in_ticks=False)
    few = 2 + seed // 8
    assert makespan(10 * few, in_ticks=True) <= makespan(few, in_ticks=True)


def test_what_a_round_has_reached_is_told_and_never_gets_longer() -> None:
    reached: list[float] = []
    result = search(
        costs_for(4, 8, seed=7),
        evaluations=2_000,
        on_round=lambda so_far: reached.append(so_far.simulation.makespan_s),
    )
    assert len(reached) > 5
    assert reached == sorted(reached, reverse=True)
    assert reached[-1] == result.simulation.makespan_s


@pytest.mark.parametrize(("kind", "m"), [("linear", 5), ("v", 3), ("loop", 3), ("linear", 8), ("v", 2)])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_tiny_cases_reach_the_proven_optimum(kind: str, m: int, cap: float | None) -> None:
    placement = places.build(kind, num_devices=4)
    costs = costs_for(4, m, seed=11 * m, cap=cap, layers=14)
    split = even_entries(costs, len(placement))
    optimum = exact_optimum(costs, placement=placement, layers_per_stage=split, time_limit_s=30.0)
    assert optimum.proven
    result = search(costs, placement=placement, split=split, evaluations=20_000)
    assert result.best_score_s >= optimum.makespan_s * (1 - 1e-9)
    assert result.best_score_s <= optimum.makespan_s * 1.005


def golden_cases() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = read_json(GOLDEN / "tiny_optima.json")["cases"]
    return [case for case in cases if "-p4-" in case["id"]]


@pytest.mark.nightly
def test_tiny_pipelines_of_four_devices_reach_their_golden_optima() -> None:
    """Within 0.5 % everywhere, equal in nine of ten; placement, split and memory limits as in the file."""
    gaps = []
    for case in golden_cases():
        costs = costs_from_json(case["costs"])
        result = search(costs, placement=case["placement"], split=case["layers_per_stage"], evaluations=4_000)
        gaps.append(result.best_score_s / case["optimum_s"] - 1)
        assert result.lower_bound_s <= case["optimum_s"] * (1 + 1e-9)
    assert len(gaps) >= 50
    assert min(gaps) > -1e-8
    assert max(gaps) <= 0.005
    assert sum(gap < 1e-7 for gap in gaps) >= 0.9 * len(gaps)


def test_a_reached_bound_ends_the_search() -> None:
    costs = costs_for(4, 6, seed=1)
    full = search(costs, split="even", evaluations=3_000, seed=2)
    named_best = full.named_best
    assert named_best is not None
    early = search(costs, split="even", evaluations=3_000, seed=2, lower_bound_s=named_best.score_s)
    assert early.num_evaluations < 0.2 * full.num_evaluations
    assert early.lower_bound_s == named_best.score_s
    assert early.best_score_s <= named_best.score_s * (1 + 1e-9)


def test_the_proven_optimum_of_a_fixed_split_is_a_bound_and_of_a_free_one_is_not() -> None:
    costs = costs_for(3, 3, seed=4, layers=7)
    fixed = search(costs, placement="linear", split="even", evaluations=3_000)
    assert fixed.lower_bound_s == pytest.approx(fixed.best_score_s)
    assert search(costs, placement="linear", evaluations=3_000).lower_bound_s == 0.0


def test_compilation_time_counts_compiling_only() -> None:
    kernel = njit(lambda x: x + 1)
    with compilation_time() as watched:
        assert watched() == 0.0
        kernel(1)
        once = watched()
        kernel(1)
    assert watched() == once > 0.0


def test_what_a_search_does_not_run_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    # As a kernel would be that is compiled where it is first called.
    for kernel in ("refinement.improve_orders", "problem.climb_family"):
        monkeypatch.setattr(f"quartet_plugin.schedule.search.{kernel}", None)
    monkeypatch.setattr("quartet_plugin.schedule.exact.expand", None)
    costs = costs_for(2, 4, seed=0)
    bound = search(costs, placement="linear", split="even", evaluations=1).best_score_s
    ended = search(costs, placement="linear", split="even", evaluations=5_000, lower_bound_s=bound)
    assert ended.best_score_s == bound


def test_a_found_order_must_win_under_noise() -> None:
    costs = costs_for(4, 6, seed=9, cap=3.0)
    result = search(costs, evaluations=2000, seed=5)
    assert result.named_best is not None
    draws = [NoisyCosts.draw(costs, np.random.default_rng(k)) for k in range(3)]
    ours = np.mean([d.mean_makespan(result.schedule) for d in draws])
    theirs = np.mean([d.mean_makespan(result.named_best.schedule) for d in draws])
    assert "name" in result.schedule.origin or ours < theirs


def test_noise_scales_costs_by_at_most_a_tenth() -> None:
    costs = costs_for(3, 5, seed=2)
    schedule = replace(
        named("1f1b", num_devices=3, num_microbatches=5), layers_per_stage=even_entries(costs, 3)
    )
    plain = simulate_costs(schedule, replace(costs, transfer_s=np.zeros((3, 3)))).makespan_s
    noisy = NoisyCosts.draw(replace(costs, transfer_s=np.zeros((3, 3))), np.random.default_rng(0))
    ratios = noisy.prefix[:, :3, :, -1] / noisy.prefix[:, :3, :, -1].mean(axis=0)
    assert 0.9 < ratios.min() < ratios.max() < 1.1
    assert noisy.mean_makespan(schedule) == pytest.approx(plain, rel=0.1)


@given(
    name=st.sampled_from(["1f1b", "zb-h1", "zb-v", "interleaved", "hanayo", "v-half"]),
    p=st.integers(2, 4),
    k=st.integers(1, 3),
    seed=st.integers(0, 999),
    room=st.floats(1.0, 1.5),
)
@settings(deadline=None, max_examples=40)
def test_insertion_keeps_orders_legal_and_within_memory(
    name: str, p: int, k: int, seed: int, room: float
) -> None:
    schedule = named(name, num_devices=p, num_microbatches=p * k)
    costs = uneven(schedule.placement, seed)
    before = simulate(schedule, costs)
    limit = before.peak_activation_bytes * room
    orders, offsets = flatten(schedule)
    best = np.empty_like(orders)
    makespan = improve_orders(
        orders,
        offsets,
        lanes_of(schedule, costs),
        limit * (1 + 1e-12),
        400,
        0.0,
        seed,
        best,
    )
    for flat in (best, orders):
        moved = replace(schedule, orders=tuple(np.split(flat, offsets[1:-1])))
        after = simulate(moved, costs, memory_limit_bytes=limit)
        if flat is best:
            assert after.makespan_s == pytest.approx(makespan)
            assert makespan <= before.makespan_s * (1 + 1e-12)


def test_placements_chunks_and_splits_are_obeyed() -> None:
    costs = costs_for(3, 4, seed=1, layers=16)

    def run(**options: object) -> SearchResult:
        return search(costs, evaluations=150, **options)  # type: ignore[arg-type]

    assert run(placement="v").schedule.placement == places.v_shape(3)
    assert run(placement="loop", chunks=3).schedule.placement == places.loop(3, 3)
    assert run(placement=[0, 1, 2, 1, 0, 2]).schedule.placement == (0, 1, 2, 1, 0, 2)
    assert len(run(chunks=1).schedule.placement) == 3
    assert run(split=[4, 2, 3, 3, 3, 3]).schedule.layers_per_stage == (4, 2, 3, 3, 3, 3)
    assert run(objective="period").simulation.period_s > 0


def test_the_period_objective_lowers_the_period() -> None:
    costs = costs_for(4, 8, seed=6)
    short = search(costs, split="even", evaluations=1500, objective="period")
    assert short.named_best is not None
    assert short.simulation.period_s <= short.named_best.score_s * (1 + 1e-9)
    named_period = simulate_costs(short.named_best.schedule, costs).period_s
    assert named_period == pytest.approx(short.named_best.score_s)


def test_empty_stages_only_when_asked() -> None:
    costs = costs_for(4, 4, seed=1, layers=2, head=3.0)
    strict = search(costs, evaluations=300)
    assert strict.schedule.layers_per_stage is not None
    assert min(strict.schedule.layers_per_stage) >= 1
    free = search(costs, placement="v", evaluations=300, allow_empty=True)
    assert free.schedule.layers_per_stage is not None
    assert min(free.schedule.layers_per_stage) == 0
    with pytest.raises(ConfigError, match="allow-empty"):
        search(costs, placement="v", evaluations=300)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"placement": "ring"}, "ring"),
        ({"placement": [1, 0, 2]}, "start with device 0"),
        ({"chunks": 2, "placement": "linear"}, "exactly 1"),
        ({"split": [1, 2, 3]}, "sums to"),
        ({"split": [5, 5]}, "match no allowed placement"),
        ({"split": "best"}, "best"),
        ({"objective": "memory"}, "memory"),
    ],
)
def test_refuses_impossible_arguments(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        search(costs_for(3, 4, seed=1), evaluations=50, **options)  # type: ignore[arg-type]


def test_too_little_memory_for_one_microbatch_is_infeasible() -> None:
    with pytest.raises(InfeasibleError, match="memory_limit_bytes"):
        search(costs_for(3, 4, seed=1, cap=0.3), evaluations=200)
