"""The exact search against methods that share nothing with it, and the golden optima."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from quartet_plugin.errors import ConfigError, InfeasibleError
from quartet_plugin.model.costs import Costs, StageCosts, stage_costs
from quartet_plugin.schedule.action import Action, ActionKind
from quartet_plugin.schedule.exact import exact_optimum
from quartet_plugin.schedule.files import costs_from_json, parse_order
from quartet_plugin.schedule.schedule import Schedule
from tests.schedule.reference_simulator import duration, simulate_reference

GOLDEN = Path(__file__).parent.parent / "golden" / "tiny_optima.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]
# Those that take half a minute to prove.
LONG = ("48-p4-m8-v",)


def make_costs(
    seed: int, *, num_devices: int, num_microbatches: int, num_stages: int, limit: float = 0
) -> Costs:
    """One layer a stage, small whole numbers; `limit` in bytes, where a layer has 2 to 4; 0 for none."""
    rng = np.random.default_rng(seed)
    transfer = rng.integers(0, 3, size=(num_devices, num_devices))
    np.fill_diagonal(transfer, 0)
    return costs_from_json(
        {
            "schema_version": 1,
            "num_devices": num_devices,
            "num_microbatches": num_microbatches,
            "layers": [
                {
                    "name": f"layer.{index}",
                    "forward_s": float(rng.integers(1, 7)),
                    "input_grad_s": float(rng.integers(1, 7)),
                    "weight_grad_s": float(rng.integers(0, 6)),
                    "activation_bytes": float(rng.integers(2, 5)),
                }
                for index in range(num_stages)
            ],
            "device_slowdown": rng.choice([1.0, 1.0, 1.5], size=num_devices).tolist(),
            "transfer_s": transfer.astype(float).tolist(),
            "memory_limit_bytes": [limit] * num_devices if limit else None,
            "weight_grad_held_fraction": float(rng.choice([0.0, 0.5, 1.0])),
        }
    )


class BruteForce:
    """Tries every order of every device, forgetting only states that were reached no earlier before."""

    def __init__(self, costs: Costs, placement: list[int], whole: bool) -> None:
        self.costs = costs
        self.stages: StageCosts = stage_costs(
            costs, placement=placement, layers_per_stage=[1] * len(placement)
        )
        self.placement = placement
        self.kinds = (ActionKind.F, ActionKind.B) if whole else (ActionKind.F, ActionKind.I, ActionKind.W)
        self.seen: dict[frozenset[Action], list[dict[Action, float]]] = {}
        self.best = float("inf")

    def solve(self) -> float:
        self._extend({}, [0.0] * self.costs.num_devices)
        return self.best

    def _extend(self, end: dict[Action, float], free: list[float]) -> None:
        todo = [
            Action(s, k, i)
            for s in range(len(self.placement))
            for i in range(self.costs.num_microbatches)
            for k in self.kinds
            if Action(s, k, i) not in end
        ]
        if not todo:
            self.best = min(self.best, max(end.values()))
            return
        left = list(free)
        for action in todo:
            left[self.placement[action.stage]] += duration(action, self.stages)
        if max(left) >= self.best - 1e-9:
            return
        for other in self.seen.setdefault(frozenset(end), []):
            if all(other[a] <= end[a] for a in end):
                return
        self.seen[frozenset(end)].append(end)
        for action in todo:
            ready = self._ready(action, end)
            if ready is None or not self._fits(action, end):
                continue
            device = self.placement[action.stage]
            done = max(ready, free[device]) + duration(action, self.stages)
            self._extend({**end, action: done}, [done if d == device else t for d, t in enumerate(free)])

    def _ready(self, action: Action, end: dict[Action, float]) -> float | None:
        stage, kind, i = action
        if kind == ActionKind.W:
            return end.get(Action(stage, ActionKind.I, i))
        if kind == ActionKind.F:
            if stage == 0:
                return 0.0
            before = end.get(Action(stage - 1, ActionKind.F, i))
            return None if before is None else before + float(self.stages.forward_transfer_s[stage - 1])
        own = end.get(Action(stage, ActionKind.F, i))
        if own is None or stage == len(self.placement) - 1:
            return own
        after = end.get(Action(stage + 1, kind, i))
        return None if after is None else max(own, after + float(self.stages.backward_transfer_s[stage + 1]))

    def _fits(self, action: Action, end: dict[Action, float]) -> bool:
        if action.kind != ActionKind.F or self.costs.memory_limit_bytes is None:
            return True
        device, held = self.placement[action.stage], self.costs.weight_grad_held_fraction
        freed = {ActionKind.F: -1.0, ActionKind.I: 1 - held, ActionKind.W: held, ActionKind.B: 1.0}
        used = 0.0
        for other in (*end, action):
            if self.placement[other.stage] == device:
                used -= freed[other.kind] * float(self.stages.activation_bytes[other.stage])
        return used <= float(self.costs.memory_limit_bytes[device]) + 1e-9


@pytest.mark.slow
@settings(deadline=None, max_examples=10)
@given(
    seed=st.integers(0, 10_000),
    shape=st.sampled_from([([0, 1], 2), ([0, 1], 3), ([0, 1, 2], 2), ([0, 1, 1, 0], 1), ([0, 1, 0, 1], 1)]),
    limit=st.sampled_from([0.0, 5.0, 8.0]),
    whole=st.booleans(),
)
def test_optimum_is_what_trying_everything_finds(
    seed: int, shape: tuple[list[int], int], limit: float, whole: bool
) -> None:
    placement, num_microbatches = shape
    costs = make_costs(
        seed,
        num_devices=max(placement) + 1,
        num_microbatches=num_microbatches,
        num_stages=len(placement),
        limit=limit,
    )
    expected = BruteForce(costs, placement, whole).solve()
    options: dict[str, Any] = {"placement": placement, "layers_per_stage": [1] * len(placement)}
    if expected == float("inf"):
        with pytest.raises(InfeasibleError, match="memory_limit_bytes"):
            exact_optimum(costs, split_backward=not whole, **options)
        return
    result = exact_optimum(costs, split_backward=not whole, **options)
    assert result.proven
    assert result.makespan_s == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_two_chunks_under_a_limit_are_what_trying_everything_finds(seed: int) -> None:
    placement = [0, 1, 1, 0]
    costs = make_costs(seed, num_devices=2, num_microbatches=2, num_stages=4, limit=9.0)
    result = exact_optimum(costs, placement=placement, layers_per_stage=[1] * 4, split_backward=False)
    assert result.makespan_s == pytest.approx(BruteForce(costs, placement, True).solve(), rel=1e-9)


def milp_optimum(costs: Costs, placement: list[int]) -> float:
    """The disjunctive program: start times, one binary for each pair of actions that share a device."""
    stages = stage_costs(costs, placement=placement, layers_per_stage=[1] * len(placement))
    actions = [
        Action(s, k, i)
        for s in range(len(placement))
        for k in (ActionKind.F, ActionKind.I, ActionKind.W)
        for i in range(costs.num_microbatches)
    ]
    index = {action: n for n, action in enumerate(actions)}
    pairs = [(a, b) for a in actions for b in actions if a < b and placement[a.stage] == placement[b.stage]]
    last, size = len(actions), len(actions) + 1 + len(pairs)
    big = sum(duration(a, stages) for a in actions) + 3.0 * len(actions)
    rows, lower = [], []

    def at_least(
        after: int, before: int, seconds: float, binary: int | None = None, sign: float = 0.0
    ) -> None:
        row = np.zeros(size)
        row[after], row[before] = 1.0, -1.0
        if binary is not None:
            row[binary] = sign * big
        rows.append(row)
        lower.append(seconds - (big if sign < 0 else 0.0))

    for a in actions:
        at_least(last, index[a], duration(a, stages))
        if a.kind != ActionKind.F:
            before = a._replace(kind=ActionKind(a.kind - 1))
            at_least(index[a], index[before], duration(before, stages))
        if a.kind == ActionKind.F and a.stage > 0:
            before = a._replace(stage=a.stage - 1)
            wait = duration(before, stages) + float(stages.forward_transfer_s[before.stage])
            at_least(index[a], index[before], wait)
        if a.kind == ActionKind.I and a.stage + 1 < len(placement):
            before = a._replace(stage=a.stage + 1)
            wait = duration(before, stages) + float(stages.backward_transfer_s[before.stage])
            at_least(index[a], index[before], wait)
    for n, (a, b) in enumerate(pairs, start=last + 1):
        at_least(index[b], index[a], duration(a, stages), n, 1.0)  # unless the binary is 1, a before b
        at_least(index[a], index[b], duration(b, stages), n, -1.0)
    cost = np.zeros(size)
    cost[last] = 1.0
    integral = np.concatenate((np.zeros(last + 1), np.ones(len(pairs))))
    top = np.where(integral, 1.0, np.inf)
    found = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), np.array(lower), np.inf),
        bounds=Bounds(0.0, top),
        integrality=integral,
    )
    assert found.success
    return float(found.fun)


@pytest.mark.parametrize(
    ("seed", "placement", "num_microbatches"), [(1, [0, 1, 2], 2), (2, [0, 1], 3), (3, [0, 1, 2], 2)]
)
def test_optimum_is_the_one_of_an_integer_program(
    seed: int, placement: list[int], num_microbatches: int
) -> None:
    costs = make_costs(
        seed, num_devices=max(placement) + 1, num_microbatches=num_microbatches, num_stages=len(placement)
    )
    result = exact_optimum(costs, placement=placement, layers_per_stage=[1] * len(placement))
    assert result.proven
    assert result.makespan_s == pytest.approx(milp_optimum(costs, placement), rel=1e-6)


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_golden_orders_have_the_golden_makespan_and_keep_the_limits(case: dict[str, Any]) -> None:
    costs = costs_from_json(case["costs"])
    num_stages = len(case["placement"])
    schedule = Schedule(
        num_devices=costs.num_devices,
        num_microbatches=costs.num_microbatches,
        placement=tuple(case["placement"]),
        orders=tuple(
            parse_order(row, num_stages=num_stages, num_microbatches=costs.num_microbatches)
            for row in case["orders"]
        ),
    )
    stages = stage_costs(costs, placement=case["placement"], layers_per_stage=case["layers_per_stage"])
    outcome = simulate_reference(schedule, stages)
    assert outcome.makespan_s == pytest.approx(case["optimum_s"], abs=1e-8)
    if costs.memory_limit_bytes is not None:
        assert (np.array(outcome.peak_activation_bytes) <= costs.memory_limit_bytes + 1e-6).all()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case["id"], marks=[pytest.mark.nightly] * (case["id"] in LONG))
        for case in CASES[::4]
    ],
)
def test_golden_optima_are_proven_again(case: dict[str, Any]) -> None:
    costs = costs_from_json(case["costs"])
    result = exact_optimum(
        costs,
        placement=case["placement"],
        layers_per_stage=case["layers_per_stage"],
        split_backward=["B" not in "".join(case["orders"][d]) for d in case["placement"]],
    )
    assert result.proven
    assert result.makespan_s == pytest.approx(case["optimum_s"], abs=1e-8)


def test_golden_covers_what_it_says() -> None:
    assert len(CASES) >= 40
    costs = [costs_from_json(case["costs"]) for case in CASES]
    assert {c.num_devices for c in costs} == {2, 3, 4}
    assert max(c.num_microbatches for c in costs) == 8
    assert {len(case["placement"]) // c.num_devices for case, c in zip(CASES, costs, strict=True)} == {1, 2}
    assert sum(c.memory_limit_bytes is not None for c in costs) >= 20
    assert {c.weight_grad_held_fraction for c in costs} == {0.0, 0.5, 1.0}
    assert sum(bool(c.transfer_s.any()) for c in costs) >= 10
    assert sum(bool((c.device_slowdown > 1).any()) for c in costs) >= 5


def test_a_whole_stage_runs_whole_backwards() -> None:
    costs = make_costs(4, num_devices=2, num_microbatches=3, num_stages=2)
    result = exact_optimum(costs, placement=[0, 1], layers_per_stage=[1, 1], split_backward=[True, False])
    assert {a.kind for a in result.schedule.actions(0)} == {ActionKind.F, ActionKind.I, ActionKind.W}
    assert {a.kind for a in result.schedule.actions(1)} == {ActionKind.F, ActionKind.B}


def test_a_pass_that_dropped_states_proves_nothing_it_did_not_see() -> None:
    case = next(c for c in CASES if c["id"] == "32-p4-m5-v")
    costs = costs_from_json(case["costs"])
    result = exact_optimum(
        costs, placement=case["placement"], layers_per_stage=case["layers_per_stage"], widths=(3,)
    )
    assert not result.proven
    assert result.lower_bound_s < case["optimum_s"] <= result.makespan_s + 1e-9


def test_too_many_actions_are_refused() -> None:
    costs = make_costs(5, num_devices=2, num_microbatches=100, num_stages=2)
    with pytest.raises(ConfigError, match="600 actions"):
        exact_optimum(costs, placement=[0, 1], layers_per_stage=[1, 1])
