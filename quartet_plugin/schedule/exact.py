"""The exact optimum of tiny pipelines, by breadth-first branch and bound with a rising width.

For tests and for judging heuristics: placement, split and the form of each stage's backward are fixed,
the order on every device is free. Microbatches may be taken in ascending order inside each class (stage,
kind) (`relaxation`'s docstring), so a partial schedule is known by how far every class has come. Each
pass keeps the `width` best partial schedules of every level; a pass that had to drop none for lack of
width has looked at everything that could beat the incumbent, which is the proof.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.errors import ConfigError, InfeasibleError
from quartet_plugin.model.costs import Costs, FloatArray, StageCosts, stage_costs
from quartet_plugin.schedule.action import Action, ActionKind
from quartet_plugin.schedule.exact_kernel import BoolArray, ExactProblem, Level, empty_level, expand
from quartet_plugin.schedule.relaxation import Relaxation, relaxation, root_bounds, tails
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.simulate import simulate

MAX_ACTIONS_EXACT = 512
PROOF_TOLERANCE = 1e-9
WIDTHS = (20, 200, 2_000, 20_000, 100_000)
ROOM = 3
ROWS_A_CALL = 2_000
RowArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactResult:
    """The best schedule found; `proven` when no schedule is shorter by more than a 1e-9 of it.

    `lower_bound_s` is a proven lower bound, equal to `makespan_s` when `proven`.
    """

    makespan_s: float
    lower_bound_s: float
    schedule: Schedule
    proven: bool


@dataclass(slots=True)
class _Incumbent:
    makespan: float
    actions: list[int]


def exact_optimum(
    costs: Costs,
    *,
    placement: Sequence[int],
    layers_per_stage: Sequence[int],
    split_backward: bool | Sequence[bool] = True,
    time_limit_s: float = 60.0,
    widths: Sequence[int] = WIDTHS,
) -> ExactResult:
    """Find the shortest schedule of a tiny pipeline and prove it.

    `split_backward`, one value or one a stage, says whether a stage's backwards run as I and W (True) or
    in full (False). The device limits of `costs` are kept, with the held fraction. Raises ConfigError above
    512 actions and InfeasibleError when no order fits the limits or none was found in time.
    """
    stages = stage_costs(costs, placement=placement, layers_per_stage=layers_per_stage)
    full_backward = ~np.broadcast_to(np.asarray(split_backward, dtype=np.bool_), (stages.num_stages,))
    num_actions = int(costs.num_microbatches * (3 * stages.num_stages - full_backward.sum()))
    if num_actions > MAX_ACTIONS_EXACT:
        raise ConfigError(
            f"{num_actions} actions: the exact optimum takes at most {MAX_ACTIONS_EXACT}; use search"
        )
    relaxed = _of_modes(costs, stages, full_backward)
    device_s, path_s = root_bounds(relaxed)
    unit_s = max(float(device_s.max()), path_s) or 1.0
    problem = _problem(costs, stages, relaxed, full_backward, unit_s)
    # A pass that keeps one row per level compiles the kernel, which the time limit does not include.
    _search(problem, full_backward, 1, np.inf, deadline=np.inf)
    started = time.monotonic()
    best: _Incumbent | None = None
    proven = False
    for width in widths:
        upper = np.inf if best is None else best.makespan * (1 - PROOF_TOLERANCE)
        incumbent, complete = _search(problem, full_backward, width, upper, deadline=started + time_limit_s)
        best = incumbent or best
        proven = complete or (best is not None and best.makespan <= 1 + PROOF_TOLERANCE)
        if proven or time.monotonic() - started > time_limit_s:
            break
    if best is None:
        reason = "no order fits" if proven else "no order that fits was found within the time limit"
        raise InfeasibleError(f"memory_limit_bytes: {reason} the device limits; raise them or the time limit")
    schedule = _schedule(best.actions, costs, full_backward, placement, layers_per_stage)
    makespan_s = simulate(schedule, stages, memory_limit_bytes=costs.memory_limit_bytes).makespan_s
    assert abs(makespan_s / unit_s - best.makespan) < PROOF_TOLERANCE, (makespan_s, best.makespan * unit_s)
    return ExactResult(
        makespan_s=makespan_s,
        lower_bound_s=makespan_s if proven else unit_s,
        schedule=schedule,
        proven=proven,
    )


def _of_modes(costs: Costs, stages: StageCosts, full_backward: BoolArray) -> Relaxation:
    """The relaxation with exact durations: I and W as they are, or B in I's place."""
    exact = replace(
        stages,
        input_grad_s=np.where(full_backward, stages.backward_s, stages.input_grad_s),
        weight_grad_s=np.where(full_backward, 0.0, stages.weight_grad_s),
        backward_s=np.where(full_backward, stages.backward_s, stages.input_grad_s + stages.weight_grad_s),
    )
    relaxed = relaxation(costs, exact)
    relaxed.needs_w[full_backward] = -1
    return relaxed


def _problem(
    costs: Costs, stages: StageCosts, relaxed: Relaxation, full_backward: BoolArray, unit_s: float
) -> ExactProblem:
    """The kernel's form, with `unit_s` seconds as the unit of time."""
    scaled = relaxed._replace(
        **{name: getattr(relaxed, name) / unit_s for name in ("f_s", "i_s", "w_s", "send_f_s", "send_i_s")}
    )
    limit = costs.memory_limit_bytes
    num_chunks = np.bincount(relaxed.device, minlength=costs.num_devices)
    return ExactProblem(
        relaxed=scaled,
        tail=tails(scaled),
        num_bytes=stages.activation_bytes,
        held=np.where(full_backward, 0.0, stages.held_fraction),
        limit=np.full(costs.num_devices, np.inf) if limit is None else limit,
        may_wait=(num_chunks > 1) & (limit is not None),
    )


def _search(
    problem: ExactProblem,
    full_backward: BoolArray,
    width: int,
    upper: float,
    *,
    deadline: float,
) -> tuple[_Incumbent | None, bool]:
    """One pass over the levels: the best schedule below `upper`, if any, and whether nothing was dropped."""
    relaxed = problem.relaxed
    num_actions = int(relaxed.num_microbatches * (3 * len(full_backward) - full_backward.sum()))
    level, child = (
        empty_level(
            width * ROOM + 200,
            num_stages=len(relaxed.device),
            num_microbatches=relaxed.num_microbatches,
            num_devices=relaxed.num_devices,
        )
        for _ in range(2)
    )
    level.counts[0, full_backward, 2] = relaxed.num_microbatches
    rows, complete = 1, True
    history: list[tuple[RowArray, RowArray]] = []
    buckets = np.empty(1 << (len(child.bound) * 2 - 1).bit_length(), dtype=np.int64)
    chain = np.empty(len(child.bound), dtype=np.int64)
    for _ in range(num_actions):
        buckets.fill(-1)
        num, row = 0, 0
        while row < rows:
            if time.monotonic() > deadline:
                return None, False
            stop = min(rows, row + ROWS_A_CALL)
            num, row = expand(problem, level, row, stop, child, num, upper, buckets, chain)
            if row < stop:
                complete = False
                break
        complete &= num <= width
        rows = min(num, width)
        if rows == 0:
            return None, complete
        order = np.argsort(_rank(child, num), kind="stable")[:rows].astype(np.int32)
        _take(child, order, level)
        history.append((level.parent[:rows].copy(), level.action[:rows].copy()))
    return _trace(level, history), complete


def _take(source: Level, rows: RowArray, target: Level) -> None:
    arrays: Sequence[NDArray[Any]] = source
    into: Sequence[NDArray[Any]] = target
    for old, new in zip(arrays, into, strict=True):
        new[: len(rows)] = old[rows]


def _rank(child: Level, num: int) -> FloatArray:
    """Smaller is more promising: the bound, then how early the devices are free."""
    return child.bound[:num] + 1e-3 * child.ready[:num].mean(axis=1)


def _trace(level: Level, history: list[tuple[RowArray, RowArray]]) -> _Incumbent:
    row = int(level.bound[: len(history[-1][0])].argmin())
    makespan = float(level.bound[row])
    actions = []
    for parent, action in reversed(history):
        actions.append(int(action[row]))
        row = int(parent[row])
    return _Incumbent(makespan, actions[::-1])


def _schedule(
    actions: Sequence[int],
    costs: Costs,
    full_backward: BoolArray,
    placement: Sequence[int],
    layers_per_stage: Sequence[int],
) -> Schedule:
    """Number each class's actions and hand them to their devices."""
    count = np.zeros((len(placement), 3), dtype=np.int64)
    rows: list[list[Action]] = [[] for _ in range(costs.num_devices)]
    for code in actions:
        stage, kind = divmod(code, 3)
        shown = ActionKind.B if kind == ActionKind.I and full_backward[stage] else ActionKind(kind)
        rows[placement[stage]].append(Action(stage, shown, int(count[stage, kind])))
        count[stage, kind] += 1
    return Schedule.of_actions(
        rows,
        num_microbatches=costs.num_microbatches,
        placement=placement,
        layers_per_stage=tuple(layers_per_stage),
        origin={"name": "exact"},
    )
