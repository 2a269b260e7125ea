"""The gain of each axis of the winner, by the calibrated model: over the best plan without the axis.

A plan without an axis has the command's own value of that axis, and any value of the others. The best of
these plans is what a search that keeps the axis would propose, by the same model.
"""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from quartet_plugin.model.axis_gains import AxisGain, AxisGains, AxisName
from quartet_plugin.model.plan import STOCK, Plan
from quartet_plugin.space.knobs.registry import BEFORE_SCHEDULE, OPTIONS
from quartet_plugin.space.moved_plans import moved
from quartet_plugin.space.plan_label import plan_label
from quartet_plugin.space.plan_space import Space
from quartet_plugin.split.layers import even_split
from quartet_plugin.tuner.tune_result import TuneResult

if TYPE_CHECKING:
    from quartet_plugin.tuner.proposer import Proposer

# Plans of the model's ranking whose split and mapping are also taken back.
NUM_TAKEN_BACK = 12
# The least chance that a plan fits.
LEAST_CHANCE = 0.5
_OTHERS = tuple(
    knob for knob in (*BEFORE_SCHEDULE, *OPTIONS) if knob.name not in ("virtual_stages", "micro_batch_size")
)


def axis_gains_of(space: Space, search: TuneResult, *, proposer: "Proposer | None") -> AxisGains | None:
    """The gains of a search that has ended, or why its winner has none; None without a winner."""
    if search.winner is None:
        return None
    if proposer is None:
        return _no_gains(search, "study.starts: none leaves out the cost model, which predicts them")
    predictor = proposer.predictor
    predictor.learn(search.trials)
    winner, command = search.best, search.baseline
    for name, plan in (("best plan", winner), ("baseline", command)):
        if not predictor.is_ready or not predictor.knows(plan):
            return _no_gains(search, f"the cost model cannot predict the {name}")
    plans = [winner, command]
    plans += [
        plan
        for plan in _plans_to_compare(space, search, proposer)
        if predictor.knows(plan)
        and space.refusal_of(plan) is None
        and predictor.feasibility.chance(plan) >= LEAST_CHANCE
    ]
    values = [
        proposer.log_speedup(plan, prediction)
        for plan, prediction in zip(plans, predictor.predict(plans), strict=True)
    ]
    gains = []
    for axis, is_kept in _AXES.items():
        if is_kept(winner, command):
            continue
        # The command itself is one of them. Another model answers for the shape alone, where it can.
        kept = [index for index, plan in enumerate(plans) if is_kept(plan, command)]
        of_model = [index for index in kept if plans[index].shape == winner.shape]
        best = max((axis != "shape" and of_model) or kept, key=values.__getitem__)
        gain = math.exp(values[0] - values[best])
        gains.append(AxisGain(axis=axis, gain=gain, best_without=plan_label(plans[best])[:400]))
    if not gains:
        return _no_gains(search, "the best plan has each of these axes as the baseline has it")
    return AxisGains(objective=search.objective, gains=tuple(gains))


def _no_gains(search: TuneResult, reason: str) -> AxisGains:
    return AxisGains(objective=search.objective, gains=(), why_none=reason)


def _plans_to_compare(space: Space, search: TuneResult, proposer: "Proposer") -> Iterator[Plan]:
    """The plans of the model's ranking and of the trials, and the best with split and mapping taken back."""
    yield from (trial.plan for trial in search.trials)
    scored = proposer.final_plans()
    yield from (plan.candidate.plan for plan in scored)
    ranked = sorted(scored, key=lambda plan: -proposer.log_speedup(plan.candidate.plan, plan.prediction))
    taken_back = [(plan.candidate.params, plan.candidate.plan) for plan in ranked[:NUM_TAKEN_BACK]]
    of_winner = space.params_of(search.best)
    if of_winner is not None:
        taken_back.append((of_winner, search.best))
    for params, plan in taken_back:
        split = _even(plan)
        mapping = space.orders_of(plan.layout)[0].mapping
        now = plan.split.transformer_layers_per_stage
        for pair in ((split, plan.mapping), (now, mapping), (split, mapping)):
            made = moved(space, params, plan, split=pair[0], mapping=pair[1])
            if made is not None:
                yield made[1]


# Whether a plan has an axis as the command has it


def _has_degrees(plan: Plan, command: Plan) -> bool:
    return plan.layout.degrees == command.layout.degrees


def _has_schedule(plan: Plan, command: Plan) -> bool:
    """A schedule of the framework, in groups of the command's size or of the usual one."""
    if plan.schedule.custom is not None or command.schedule.custom is not None:
        return plan.schedule == command.schedule
    usual = plan.layout.pipeline_parallel if plan.schedule.group else None
    return plan.schedule.group in (command.schedule.group, usual)


def _even(plan: Plan) -> tuple[int, ...]:
    """The even split of the plan's stages, with multi-token prediction on the plan's own."""
    return even_split(
        plan.shape.num_layers,
        num_stages=plan.layout.num_stages,
        is_mtp_before_last=bool(plan.split.mtp_before_last),
    )


def _has_split(plan: Plan, command: Plan) -> bool:
    is_even = plan.split.transformer_layers_per_stage == _even(plan)
    return plan.split == command.split or (
        is_even and plan.split.mtp_before_last == command.split.mtp_before_last
    )


def _has_mapping(plan: Plan, command: Plan) -> bool:
    return plan.mapping == command.mapping or plan.mapping.label == STOCK


def _has_options(plan: Plan, command: Plan) -> bool:
    return all(knob.in_layout(plan.layout) == knob.in_layout(command.layout) for knob in _OTHERS)


_AXES: dict[AxisName, Callable[[Plan, Plan], bool]] = {
    "shape": lambda plan, command: plan.shape == command.shape,
    "degrees": _has_degrees,
    "micro-batch": lambda plan, command: plan.layout.micro_batch_size == command.layout.micro_batch_size,
    "schedule": _has_schedule,
    "split": _has_split,
    "mapping": _has_mapping,
    "options": _has_options,
}
