"""The search with all-to-all to hide: neighbours become pairs only where that is shorter."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quartet_plugin.model.costs import Costs, without_exchanges
from quartet_plugin.schedule.bound import lower_bound
from quartet_plugin.schedule.files import costs_from_json
from quartet_plugin.schedule.named import named
from quartet_plugin.schedule.search import SearchResult, search
from quartet_plugin.schedule.search.pairing import fuse
from quartet_plugin.schedule.search.problem import ScheduleProblem
from quartet_plugin.schedule.simulate import simulate_costs
from quartet_plugin.schedule.validate import validate
from tests.cli.quartet_schedule import cost_table
from tests.schedule.pipelines import random_costs, random_placement, random_schedule, with_random_pairs

EVALUATIONS = 60


def table(exchange_s: float = 0.2, **others: Any) -> Costs:
    """Four devices, eight layers; F, I and W take 0.5 each, of F and I `exchange_s` is all-to-all."""
    return costs_from_json(cost_table(exchange_s=[[exchange_s, exchange_s]] * 8, **others))


def run(costs: Costs, **options: object) -> SearchResult:
    return search(costs, evaluations=EVALUATIONS, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("placement", ["auto", "v", "loop"])
def test_pairs_are_found_and_never_longer_than_the_best_named_schedule(placement: str) -> None:
    costs = table()
    result = run(costs, placement=placement, split="even")
    validate(result.schedule)
    assert result.schedule.pairs
    assert result.named_best is not None
    assert result.simulation.makespan_s <= result.named_best.score_s * (1 + 1e-9)
    for name in ("interleaved", "dualpipev"):
        known = replace(
            named(name, num_devices=4, num_microbatches=8, with_pairs=True), layers_per_stage=(1,) * 8
        )
        if placement == "auto" or (placement == "v") == (name == "dualpipev"):
            assert result.simulation.makespan_s <= simulate_costs(known, costs).makespan_s * (1 + 1e-9)
            assert any(each.label.startswith(name) and "pairs" in each.label for each in result.named)
    apart = run(replace(costs, exchange_s=None), placement=placement, split="even")
    assert result.simulation.makespan_s < apart.simulation.makespan_s
    bound = lower_bound(costs, placement=result.schedule.placement, layers_per_stage=(1,) * 8).makespan_s
    assert bound <= result.simulation.makespan_s


def test_without_all_to_all_there_are_no_pairs_and_nothing_changes() -> None:
    plain = run(costs_from_json(cost_table()), split="even")
    none = run(table(0.0), split="even")
    assert not plain.schedule.pairs
    assert not none.schedule.pairs
    assert none.simulation.makespan_s == plain.simulation.makespan_s
    assert all(map(np.array_equal, plain.schedule.orders, none.schedule.orders))


def test_a_seed_and_the_evaluations_decide_and_more_are_never_worse() -> None:
    costs = table(0.15)
    first, second = (run(costs, placement="v", split="even", seed=3) for _ in range(2))
    assert all(map(np.array_equal, first.schedule.orders, second.schedule.orders))
    assert all(map(np.array_equal, first.schedule.pairs, second.schedule.pairs))
    told: list[float] = []
    more = search(
        costs,
        placement="v",
        split="even",
        seed=3,
        evaluations=5 * EVALUATIONS,
        on_round=lambda result: told.append(result.simulation.makespan_s),
    )
    assert more.simulation.makespan_s <= first.simulation.makespan_s
    assert told == sorted(told, reverse=True)


def test_pairs_keep_the_memory_limit() -> None:
    costs = table(0.2, memory_limit_bytes=[4.5] * 4)
    result = run(costs, placement="v", split="even")
    assert (result.simulation.peak_activation_bytes <= 4.5 * (1 + 1e-9)).all()


def test_the_period_is_shortened_where_it_is_the_objective() -> None:
    result = run(table(), placement="v", split="even", objective="period")
    assert result.schedule.pairs
    assert result.named_best is not None
    assert result.simulation.period_s <= result.named_best.score_s * (1 + 1e-6)


def test_fusing_a_named_order_shortens_it() -> None:
    costs = table()
    order = replace(named("dualpipev", num_devices=4, num_microbatches=8), layers_per_stage=(1,) * 8)
    score, fused = fuse(order, ScheduleProblem.of(costs), seed=0)
    validate(fused)
    assert score == pytest.approx(simulate_costs(fused, costs).makespan_s)
    assert score < simulate_costs(order, costs).makespan_s
    # Time that has run out leaves what was made at once.
    assert fuse(order, ScheduleProblem.of(costs), seed=0, time_left_s=lambda: 0.0)[0] >= score


@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_with_pairs_is_shorter_than_the_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    placement = random_placement(rng, int(rng.integers(2, 4)), int(rng.integers(1, 3)))
    stages, m = len(placement), int(rng.integers(2, 6))
    costs = random_costs(rng, num_devices=max(placement) + 1, num_microbatches=m, num_layers=stages)
    share = rng.uniform(0.2, 1.0)
    costs = replace(
        costs,
        exchange_s=tuple((share * layer.forward_s, share * layer.input_grad_s) for layer in costs.layers),
    )
    bound = lower_bound(costs, placement=placement, layers_per_stage=(1,) * stages).makespan_s
    for _ in range(5):
        schedule = with_random_pairs(rng, random_schedule(rng, placement=placement, num_microbatches=m))
        schedule = replace(schedule, layers_per_stage=(1,) * stages)
        assert simulate_costs(schedule, costs).makespan_s >= bound * (1 - 1e-9)
        assert simulate_costs(schedule, costs).makespan_s >= simulate_costs(
            replace(schedule, pairs=()), without_exchanges(costs)
        ).makespan_s * (1 - 1e-9)
