"""The best split, mapping and schedule are those of exhaustive search, and what limits cut off is said."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quartet_plugin.calibration.machine_prior import KnownMachine
from quartet_plugin.cost.iteration.split_model import CalibratedSplits
from quartet_plugin.mapping.orders import is_legal, slots_of
from quartet_plugin.model.plan import Mapping, Plan, Split
from quartet_plugin.planner import best_moves as module
from quartet_plugin.planner.candidate_plans import PlanCandidates
from quartet_plugin.planner.order_candidates import OrderCandidates
from quartet_plugin.planner.space_request import request_of_space
from quartet_plugin.planner.split_search import best_splits
from quartet_plugin.space.order_exchanges import RUN
from quartet_plugin.space.param_sources import FixedParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.space.split_shifts import SHIFT
from quartet_plugin.split.layers import is_legal_split
from quartet_plugin.tuner.config import parse_config
from tests.calibration.truth import Truth
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape

# Choices that the exhaustive search makes itself.
FREE = (SHIFT, RUN, "mapping")


def space_of(
    *nodes: int,
    num_layers: int,
    batch: int = 16,
    search: dict[str, Any] | None = None,
    mtp_layers: int | None = None,
) -> Space:
    config = parse_config({"search": search or {}}, where="test").search
    job = make_job(
        layout=make_layout(pipeline_parallel=sum(nodes), micro_batch_size=2),
        shape=make_shape(num_layers=num_layers),
        global_batch_size=batch,
        features=("mtp",) if mtp_layers else (),
    )
    job = replace(job, mtp_layers=mtp_layers)
    return build_space(job, nodes=make_nodes(*nodes), search=config, run="r", seed=0)


def truth_of(space: Space, seed: int) -> Truth:
    draw = np.random.default_rng(seed)
    num = sum(node.num_slots for node in space.nodes)
    return Truth(
        space.nodes,
        slowdowns=draw.uniform(0.8, 1.8, num).tolist(),
        head=float(draw.uniform(0.3, 2.0)),
        transfer=float(draw.uniform(1.0, 20.0)),
        network=float(draw.uniform(1.0, 20.0)),
    )


def any_plan(_: Plan) -> bool:
    """Every plan fits in memory."""
    return True


def candidates_of(
    space: Space, truth: Truth, may_fit: Callable[[Plan], bool] = any_plan
) -> tuple[float, Plan, PlanCandidates]:
    """The least time among the planner's candidates that may fit, its plan, and the candidates."""

    def splits_of(plan: Plan) -> CalibratedSplits | None:
        if plan.layout.pipeline_parallel == 1:
            return None
        return CalibratedSplits(model=truth._iteration_models.split_model(plan), point=truth.theta)

    def costs_of(plans: Sequence[Plan]) -> list[float]:
        return [truth(plan) for plan in plans]

    candidates = PlanCandidates(
        space, is_predictable=lambda plan: True, request=request_of_space(space, machine=KnownMachine())
    )
    found = candidates.best(
        costs_of=costs_of,
        splits_of=splits_of,
        order_of=lambda plan: None,
        may_fit=may_fit,
    )
    fitting = [candidate for candidate in found if may_fit(candidate.plan)]
    best = min(fitting, key=lambda candidate: truth(candidate.plan))
    assert space.decode(FixedParams(best.params), trial=0).key == best.plan.key
    return truth(best.plan), best.plan, candidates


@pytest.mark.parametrize("feature", ["moe_flex_dispatcher", "tp_comm_overlap"])
@pytest.mark.parametrize("nodes", [(2, 2, 2), (4, 4, 4)])
def test_no_order_of_the_planner_breaks_the_rule_of_a_feature(nodes: tuple[int, ...], feature: str) -> None:
    """Permutations of few slots, and the solver's orders of more."""
    layout = make_layout(pipeline_parallel=3, data_parallel=sum(nodes) // 3, expert_parallel=2)
    space = build_space(
        make_job(layout=layout, features=("moe", feature), global_batch_size=48),
        nodes=make_nodes(*nodes),
        search=parse_config({"search": {"schedule": "1f1b", "pipeline_parallel": 3}}, where="test").search,
        run="r",
        seed=0,
    )
    truth = truth_of(space, 3)

    model = truth._iteration_models.split_model(space.baseline)
    orders = OrderCandidates(space).of(space.baseline, CalibratedSplits(model=model, point=truth.theta))
    assert len(orders) > 1
    for _, mapping in orders:
        assert is_legal(mapping.slots, layout=layout, rules=space.order_rules)


def test_the_solver_keeps_the_replicas_of_a_stage_in_a_network() -> None:
    """Equal slots of one host, whose networks no named order knows; in one network all orders are alike."""
    networks = ((0, 3, 5, 6), (1, 2, 4, 7))
    layout = make_layout(pipeline_parallel=2, data_parallel=4, micro_batch_size=1)
    shape = make_shape(seq_length=16, max_position_embeddings=16, tied_embeddings=False)

    def best_of(networks: tuple[tuple[int, ...], ...] | None) -> tuple[Space, list[Mapping], Mapping]:
        """The space, the orders of its baseline's layout, and the fastest of them."""
        space = build_space(
            make_job(layout=layout, shape=shape),
            nodes=(replace(make_nodes(8)[0], network_namespaces=networks),),
            search=parse_config({"search": {"schedule": "1f1b"}}, where="test").search,
            run="r",
            seed=0,
        )
        truth = Truth(space.nodes)
        model = truth._iteration_models.split_model(space.baseline)
        orders = OrderCandidates(space).of(space.baseline, CalibratedSplits(model=model, point=truth.theta))
        mappings = [mapping for _, mapping in orders]
        return space, mappings, min(mappings, key=lambda order: truth(replace(space.baseline, mapping=order)))

    space, orders, best = best_of(networks)
    stages = {frozenset(slot.local for slot in best.slots[first : first + 4]) for first in (0, 4)}
    assert stages == set(map(frozenset, networks))
    named = {order.mapping for order in space.orders_of(layout)}
    assert best in set(orders) - named
    assert set(best_of(None)[1]) == named


class Walker:
    """Makes the choices of a path, then the first ones; splits and mappings stay at their first."""

    def __init__(self, path: list[int]) -> None:
        self.path, self.counts = path, [0] * 0

    def category(self, name: str, choices: Sequence[str]) -> str:
        if name.partition("[")[0] in FREE:
            return choices[0]
        depth = len(self.counts)
        self.counts.append(len(choices))
        if depth == len(self.path):
            self.path.append(0)
        return choices[self.path[depth]]

    def integer(self, name: str, low: int, high: int) -> int:
        raise AssertionError(name)

    def unit_float(self, name: str) -> float:
        return 0.0

    def attribute(self, name: str) -> None:
        return None


def every_choice(space: Space) -> Iterator[Plan]:
    """One plan for each choice beside split and mapping."""
    path: list[int] = []
    while True:
        walker = Walker(path)
        yield space.decode(walker, trial=0)
        while path and path[-1] + 1 == walker.counts[len(path) - 1]:
            path.pop()
        if not path:
            return
        path[-1] += 1


def every_split(
    num_layers: int, num_stages: int, *, is_mtp_before_last: bool = False
) -> Iterator[tuple[int, ...]]:
    for edges in itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1):
        split = tuple(b - a for a, b in itertools.pairwise((0, *edges, num_layers)))
        if is_legal_split(
            split, num_layers=num_layers, num_stages=num_stages, is_mtp_before_last=is_mtp_before_last
        ):
            yield split


def every_plan(space: Space) -> Iterator[Plan]:
    """Every split and every order of slots of every choice."""
    slots = slots_of(space.nodes)
    for plan in every_choice(space):
        for order in itertools.permutations(slots):
            if is_legal(order, layout=plan.layout):
                num_stages, is_before = plan.layout.num_stages, bool(plan.split.mtp_before_last)
                for split in every_split(plan.shape.num_layers, num_stages, is_mtp_before_last=is_before):
                    yield replace(
                        plan,
                        mapping=Mapping(slots=order),
                        split=Split.of(split, is_mtp_before_last=is_before),
                    )


SPACES: list[tuple[tuple[int, ...], int, dict[str, Any]]] = [
    ((3,), 6, {"pipeline_parallel": 3, "schedule": ["1f1b", "zb-h1"], "recompute": ["none", "full"]}),
    ((2, 2), 5, {"pipeline_parallel": 4, "schedule": ["1f1b", "gpipe"]}),
    ((3,), 6, {"pipeline_parallel": 3, "virtual_stages": [1, 2], "schedule": ["1f1b", "interleaved"]}),
    ((4,), 5, {"pipeline_parallel": 2, "data_parallel": 2, "schedule": ["1f1b", "interleaved"]}),
    ((5,), 5, {"pipeline_parallel": 5, "schedule": ["1f1b"], "recompute": ["none", "full"]}),
]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("nodes", "num_layers", "search"), SPACES)
def test_the_best_is_that_of_exhaustive_search(
    nodes: tuple[int, ...], num_layers: int, search: dict[str, Any], seed: int
) -> None:
    search = {"micro_batch_size": 2, "tensor_parallel": 1, **search}
    space = space_of(*nodes, num_layers=num_layers, batch=12, search=search)
    assert_exhaustive(space, truth_of(space, seed))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("ranks", "search"),
    [
        (4, {"pipeline_parallel": 4, "virtual_stages": 1, "schedule": ["1f1b", "zb-h1"]}),
        (3, {"pipeline_parallel": 3, "virtual_stages": [1, 2], "schedule": ["1f1b", "interleaved"]}),
    ],
)
def test_of_both_stages_of_multi_token_prediction_the_best_is_that_of_exhaustive_search(
    ranks: int, search: dict[str, Any], seed: int
) -> None:
    search = {
        "micro_batch_size": 2,
        "tensor_parallel": 1,
        "mtp_stage": ["last", "before_last"],
        **search,
    }
    space = space_of(ranks, num_layers=5, batch=12, search=search, mtp_layers=1)
    assert {plan.split.mtp_before_last for plan in every_choice(space)} == {None, True}
    assert_exhaustive(space, truth_of(space, seed))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_six_unequal_devices_in_any_order() -> None:
    search = {
        "pipeline_parallel": 6, "micro_batch_size": 2, "schedule": ["1f1b"], "recompute": ["none", "full"]
    }  # fmt: skip
    space = space_of(6, num_layers=6, batch=16, search={**search, "tensor_parallel": 1})
    assert_exhaustive(space, truth_of(space, 2), least=15_000)


def assert_exhaustive(space: Space, truth: Truth, *, least: int = 100) -> None:
    times = [truth._iteration_models.of(plan).evaluate(truth.theta)[0] for plan in every_plan(space)]
    assert least <= len(times) <= 20_000 * 2
    found_s, _, candidates = candidates_of(space, truth)
    assert found_s == pytest.approx(min(times), rel=1e-9)
    assert candidates.limits == ()


@pytest.mark.parametrize("parts", [["mapping"], ["split"], ["split", "mapping"]])
@pytest.mark.parametrize("seed", [0, 2])
def test_a_forbidden_plan_hides_no_slower_one(parts: list[str], seed: int) -> None:
    search = {"pipeline_parallel": 4, "micro_batch_size": 2, "schedule": ["1f1b"], "tensor_parallel": 1}

    def space_with(rules: list[dict[str, str]]) -> Space:
        return space_of(4, num_layers=5, batch=12, search={**search, "forbid": rules})

    truth = truth_of(space_with([]), seed)
    fastest = candidates_of(space_with([]), truth)[1]
    texts = {
        "split": fastest.split.label,
        "mapping": ",".join(str(slot.local) for slot in fastest.mapping.slots),
    }
    space = space_with([{part: texts[part] for part in parts}])
    assert space.refusal_of(fastest) is not None
    allowed = [plan for plan in every_plan(space) if space.refusal_of(plan) is None]
    found_s, found, _ = candidates_of(space, truth)
    assert space.refusal_of(found) is None
    assert found_s == pytest.approx(min(map(truth, allowed)), rel=1e-9)


def test_a_slow_device_in_the_middle_gets_fewer_layers() -> None:
    search = {"pipeline_parallel": 4, "schedule": ["1f1b"], "mapping": "stock", "virtual_stages": 1}
    space = space_of(4, num_layers=24, search=search)
    truth = Truth(space.nodes, slowdowns=(1.0, 1.5, 1.0, 1.0), head=0.1)
    counts = candidates_of(space, truth)[1].split.transformer_layers_per_stage
    assert counts[1] < min(counts[0], counts[2], counts[3])
    even = replace(space.baseline, split=Split(transformer_layers_per_stage=(6, 6, 6, 6)))
    assert candidates_of(space, truth)[0] < 0.9 * truth(even)


def test_a_later_choice_is_left_by_its_bound() -> None:
    space = space_of(4, num_layers=24, search={"pipeline_parallel": 4, "schedule": ["1f1b"]})
    truth = truth_of(space, 0)
    model = truth._iteration_models.split_model(space.baseline)
    calibrated = CalibratedSplits(model=model, point=truth.theta)
    own = [((0, 1, 2, 3), space.baseline.mapping)]
    free = best_splits(calibrated, own, num_layers=24)
    bounded = best_splits(calibrated, own, num_layers=24, incumbent_s=0.5 * free.splits[0].seconds)
    assert bounded.splits == ()
    assert bounded.work < free.work


def test_what_a_limit_cuts_off_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    search = {"pipeline_parallel": 4, "micro_batch_size": 2, "recompute": ["none", "full"]}
    space = space_of(4, num_layers=24, search={**search, "schedule": ["1f1b"]})
    monkeypatch.setattr(module, "MAX_WORK", 1)
    _, _, candidates = candidates_of(space, truth_of(space, 0))
    assert any(
        line.startswith("splits: 1 slower combinations keep the balanced split") for line in candidates.limits
    )


# What fits: no split that is the fastest, and where recompute saves memory a split that is faster than it.
LIMITS: dict[str, Callable[[Plan], bool]] = {
    "a first stage of two layers": lambda plan: plan.split.transformer_layers_per_stage[0] <= 2,
    "less of it without recompute": lambda plan: (
        plan.split.transformer_layers_per_stage[0] <= (1 if plan.layout.recompute == "none" else 4)
    ),
    "a last stage of three layers": lambda plan: plan.split.transformer_layers_per_stage[-1] >= 3,
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("schedules", [["1f1b"], ["1f1b", "gpipe", "zb-h1"]])
def test_the_best_that_fits_is_that_of_exhaustive_search(schedules: list[str], seed: int, limit: str) -> None:
    search = {"pipeline_parallel": 3, "micro_batch_size": 2, "mapping": "stock", "schedule": schedules}
    space = space_of(3, num_layers=12, batch=12, search={**search, "recompute": ["none", "full"]})
    truth, fits = truth_of(space, seed), LIMITS[limit]
    times = [
        truth(replace(plan, split=Split(transformer_layers_per_stage=split)))
        for plan in every_choice(space)
        for split in every_split(12, 3)
        if fits(replace(plan, split=Split(transformer_layers_per_stage=split)))
    ]
    found_s, _, _ = candidates_of(space, truth, fits)
    assert found_s == pytest.approx(min(times), rel=1e-9)


def test_the_splits_of_few_combinations_that_do_not_fit_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    search = {"pipeline_parallel": 4, "micro_batch_size": [1, 2], "recompute": ["none", "full"]}
    space = space_of(4, num_layers=24, search={**search, "schedule": ["1f1b"]})
    monkeypatch.setattr(module, "MAX_UNFIT", 0)
    _, _, candidates = candidates_of(space, truth_of(space, 0), lambda plan: plan.layout.recompute == "full")
    assert any(
        line.startswith("splits: 2 combinations keep a balanced split that does not fit")
        for line in candidates.limits
    )
