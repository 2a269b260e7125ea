"""The iteration model of a plan as a function of its split and its mapping, everything else held.

A stage's actions take a fixed time and one that grows by its layers, so that an iteration is evaluated for
many splits without a plan for each. Processes that share cores are taken as busy all the time here; the
iteration model itself decides among what a search returns.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quartet_plugin.cost.coefficients import CAUSES, INDEX, Coefficient
from quartet_plugin.cost.iteration.kernel import UNSLOWED
from quartet_plugin.cost.iteration.orders import WeightedOrders
from quartet_plugin.cost.iteration.plan_terms import GroupsApart, are_apart, are_copies_apart, groups_apart
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.plan import Mapping, Plan

# Indices of slots, RANK 0's first.
type SlotOrder = Sequence[int] | IntArray

# The layers by which the fuller of two splits differs whose steps give the step's slope.
_MORE = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLine:
    """Seconds once an iteration, by what the pipeline rank with the most weights holds.

    `fixed_s`, plus `per_layer_s` times its weights in layers, plus `start_s` times its layers. Embedding and
    head count as `first` and `last` layers by their weights.
    """

    fixed_s: float
    per_layer_s: float
    start_s: float
    first: float
    last: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitTimes:
    """An iteration's times for any split under one mapping.

    A stage's action of direction k (forward, input gradient, weight gradient) takes `fixed_s[k, s]` plus
    `layer_s[k, s]` a layer; `sends_s` [S] is the transfer from each stage to the next. `orders` have weights.
    """

    fixed_s: FloatArray
    layer_s: FloatArray
    sends_s: FloatArray
    placement: IntArray
    orders: WeightedOrders
    is_blocking: bool
    step: StepLine


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawTimes:
    """Seconds under coefficients of 1, by what multiplies them.

    `compute_fixed` [num_causes, 3, S], `compute_layer` [num_causes, 3]: slowed down by slots. `other_fixed`
    [4, 3, S] and `other_layer` [4, 3]: what no slowdown touches, by `UNSLOWED`. `intra`, `inter` and
    `latency` are those of a transfer between stages. An iteration is `share` times its terms, of which
    `layer_start_s` starts the optimizer's kernels of one layer.
    """

    compute_fixed: FloatArray
    compute_layer: FloatArray
    other_fixed: FloatArray
    other_layer: FloatArray
    intra_s: float
    inter_s: float
    latency_s: float
    core_slowdown: FloatArray
    placement: IntArray
    orders: WeightedOrders
    is_blocking: bool
    share: float
    layer_start_s: float


class SplitModel:
    """One plan's `SplitTimes` under any coefficients and mapping; `step_terms_of` gives a plan's step."""

    def __init__(
        self,
        plan: Plan,
        *,
        raw_of: Callable[[GroupsApart], RawTimes],
        group_sizes: tuple[int, int],
        weights: tuple[float, float, float],
        slot_index: IntArray,
        node_of_slot: IntArray,
        step_terms_of: Callable[[Plan], FloatArray],
    ) -> None:
        self._plan = plan
        self._raw_of, self._group_sizes = raw_of, group_sizes
        # What is read of it does not depend on the nodes of groups.
        self._raw = raw_of((False, False))
        self._layer_weights, self._first_weights, self._last_weights = weights
        self._slot_index, self._node_of_slot = slot_index, node_of_slot
        self._step_terms_of = step_terms_of
        self._steps: dict[tuple[bool, bool], tuple[FloatArray, FloatArray]] = {}

    @property
    def plan(self) -> Plan:
        """The plan whose split and mapping are free."""
        return self._plan

    def slowdowns(self, log_coefficients: FloatArray) -> FloatArray:
        """The slowdown of every slot [num_slots]; 1 where the slot has none."""
        if (self._slot_index < 0).any():
            return np.ones(len(self._slot_index))
        slowdowns: FloatArray = np.exp(log_coefficients)[self._slot_index]
        return slowdowns

    def signature(self, slots: SlotOrder, slowdowns: FloatArray) -> tuple[object, ...]:
        """What an order of slots (indices) changes: equal for orders that take the same time."""
        layout = self._plan.layout
        by_rank = np.asarray(slots).reshape(layout.pipeline_parallel, -1)
        nodes = self._node_of_slot[by_rank]
        return (
            tuple(slowdowns[by_rank].max(axis=1).tolist()),
            tuple(self._crossings(nodes).tolist()),
            self._step_class(nodes),
            self._groups_apart(nodes),
        )

    def times(self, log_coefficients: FloatArray, slots: SlotOrder, mapping: Mapping) -> SplitTimes:
        """The times when slot `slots[r]` plays RANK r, as `mapping` says in other words."""
        layout, schedule = self._plan.layout, self._plan.schedule
        by_rank = np.asarray(slots).reshape(layout.pipeline_parallel, -1)
        nodes = self._node_of_slot[by_rank]
        raw, scale = self._raw_of(self._groups_apart(nodes)), np.exp(log_coefficients)
        slowdown = self.slowdowns(log_coefficients)[by_rank].max(axis=1) * raw.core_slowdown
        speed = scale[INDEX[Coefficient.SPEED]]
        if schedule.custom is not None:
            speed = speed * scale[INDEX[Coefficient.RUNTIME]]
        direction = np.array(
            [1.0, scale[INDEX[Coefficient.INPUT_GRAD]], scale[INDEX[Coefficient.WEIGHT_GRAD]]]
        )
        causes = scale[: len(CAUSES)]
        others = scale[UNSLOWED]
        stage_slowdown = slowdown[raw.placement]
        slowed = speed * direction[:, None] * stage_slowdown
        fixed = np.tensordot(causes, raw.compute_fixed, 1) * slowed
        layer = np.tensordot(causes, raw.compute_layer, 1)[:, None] * slowed
        crossing = self._crossings(nodes)
        transfer, network = scale[INDEX[Coefficient.TRANSFER]], scale[INDEX[Coefficient.NETWORK]]
        intra = transfer * raw.intra_s + scale[INDEX[Coefficient.LATENCY]] * raw.latency_s
        inter = network * raw.inter_s + scale[INDEX[Coefficient.LATENCY]] * raw.latency_s
        return SplitTimes(
            fixed_s=raw.share * (fixed + np.tensordot(others, raw.other_fixed, 1)),
            layer_s=raw.share * (layer + np.tensordot(others, raw.other_layer, 1)[:, None]),
            sends_s=raw.share * np.array([0.0, intra, inter])[crossing],
            placement=raw.placement,
            orders=raw.orders,
            is_blocking=raw.is_blocking,
            step=self._step_line(raw.share * scale, nodes, mapping),
        )

    def distinct(self, orders: IntArray, slowdowns: FloatArray) -> list[int]:
        """The indices of the first of the orders [orders, world size] with one signature each."""
        layout, placement = self._plan.layout, self._raw.placement
        by_rank = orders.reshape(len(orders), layout.pipeline_parallel, -1)
        nodes = self._node_of_slot[by_rank]
        num_copies = nodes.shape[-1] // layout.tensor_parallel
        rows = np.concatenate(
            [
                slowdowns[by_rank].max(axis=2),
                (nodes[:, placement[:-1]] == nodes[:, placement[1:]]).all(axis=2),
                (nodes[:, placement[0]] != nodes[:, placement[-1]]).any(axis=1)[:, None],
                *(
                    are_apart(nodes, size, tensor_parallel=layout.tensor_parallel)[:, None]
                    for size in (num_copies, *self._group_sizes)
                ),
            ],
            axis=1,
        )
        _, first = np.unique(rows, axis=0, return_index=True)
        return sorted(first.tolist())

    def link_s(self, log_coefficients: FloatArray) -> tuple[float, float, float]:
        """Seconds of a boundary tensor inside a node and between nodes, without latency, and the latency."""
        scale, raw = np.exp(log_coefficients), self._raw
        return (
            float(scale[INDEX[Coefficient.TRANSFER]] * raw.intra_s),
            float(scale[INDEX[Coefficient.NETWORK]] * raw.inter_s),
            float(scale[INDEX[Coefficient.LATENCY]] * raw.latency_s),
        )

    def gradient_boundaries(self, log_coefficients: FloatArray, slots: SlotOrder) -> float:
        """The exposed gradients of a step under an order of slots, in boundary tensors that take as long."""
        layout = self._plan.layout
        if layout.data_parallel * layout.context_parallel == 1:
            return 0.0
        nodes = self._node_of_slot[np.asarray(slots).reshape(layout.pipeline_parallel, -1)]
        is_inter_node, _ = self._step_class(nodes)
        terms, scale = self._step_terms_of(self._plan), np.exp(log_coefficients)
        intra_s, inter_s, _ = self.link_s(log_coefficients)
        if is_inter_node:
            index, unit_s = INDEX[Coefficient.NETWORK], inter_s
        else:
            index, unit_s = INDEX[Coefficient.GRADIENTS], intra_s
        return float(scale[index] * terms[index]) / max(unit_s, 1e-30)

    def _crossings(self, nodes: IntArray) -> IntArray:
        """The level of each stage's transfer to the next [S]: 0 none, 1 inside nodes, 2 between nodes."""
        placement = self._raw.placement
        sender, receiver = placement[:-1], placement[1:]
        is_inside = (nodes[sender] == nodes[receiver]).all(axis=1)
        crossing = np.where(sender == receiver, 0, np.where(is_inside, 1, 2))
        crossings: IntArray = np.append(crossing, 0)
        return crossings

    def _groups_apart(self, nodes: IntArray) -> GroupsApart:
        return groups_apart(nodes, self._group_sizes, tensor_parallel=self._plan.layout.tensor_parallel)

    def _step_class(self, nodes: IntArray) -> tuple[bool, bool]:
        placement = self._raw.placement
        is_inter_node = are_copies_apart(nodes, tensor_parallel=self._plan.layout.tensor_parallel)
        return is_inter_node, bool((nodes[placement[0]] != nodes[placement[-1]]).any())

    def _step_line(self, scale: FloatArray, nodes: IntArray, mapping: Mapping) -> StepLine:
        """A line through the steps of two splits whose fullest ranks differ by one layer."""
        key = self._step_class(nodes)
        fuller = self._fuller
        if key not in self._steps:
            plans = (replace(self._plan, mapping=mapping), replace(fuller, mapping=mapping))
            self._steps[key] = (self._step_terms_of(plans[0]), self._step_terms_of(plans[1]))
        first, second = (float(scale @ terms) for terms in self._steps[key])
        (low, low_layers), (high, high_layers) = self._fullest(self._plan), self._fullest(fuller)
        start_s = float(scale[INDEX[Coefficient.OPTIMIZER]]) * self._raw.layer_start_s
        more_s = second - first - start_s * (high_layers - low_layers)
        slope = 0.0 if high <= low else max(0.0, more_s / (high - low))
        return StepLine(
            fixed_s=first - slope * low - start_s * low_layers,
            per_layer_s=slope,
            start_s=start_s,
            first=self._first_weights / self._layer_weights,
            last=self._last_weights / self._layer_weights,
        )

    def _fullest(self, plan: Plan) -> tuple[float, int]:
        """The weights of the pipeline rank with the most, in layers, and its layers."""
        weights = self._weights(plan)
        fullest = int(np.argmax(weights))
        counts = np.array(plan.split.transformer_layers_per_stage)
        return float(weights[fullest] / self._layer_weights), int(
            counts[self._raw.placement == fullest].sum()
        )

    def _weights(self, plan: Plan) -> FloatArray:
        counts = np.array(plan.split.transformer_layers_per_stage, dtype=np.float64)
        stages = counts * self._layer_weights
        stages[0] += self._first_weights
        stages[-1] += self._last_weights
        held: FloatArray = np.bincount(
            self._raw.placement, weights=stages, minlength=plan.layout.pipeline_parallel
        )
        return held

    @functools.cached_property
    def _fuller(self) -> Plan:
        """The plan with layers moved to its fullest rank from the fullest other stage."""
        counts = list(self._plan.split.transformer_layers_per_stage)
        fullest = int(np.argmax(self._weights(self._plan)))
        target = int(np.flatnonzero(self._raw.placement == fullest)[0])
        others = [s for s in range(len(counts)) if self._raw.placement[s] != fullest and counts[s] > _MORE]
        if not others:
            return self._plan
        source = max(others, key=lambda stage: counts[stage])
        counts[source] -= _MORE
        counts[target] += _MORE
        split = replace(self._plan.split, transformer_layers_per_stage=tuple(counts))
        return replace(self._plan, split=split)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CalibratedSplits:
    """A plan's split model at one point of the coefficients (logarithms)."""

    model: SplitModel
    point: FloatArray

    @property
    def slowdowns(self) -> FloatArray:
        """The slowdown of every slot [num_slots]."""
        return self.model.slowdowns(self.point)

    def signature(self, slots: SlotOrder) -> tuple[object, ...]:
        """What an order of slots (indices) changes: equal for orders that take the same time."""
        return self.model.signature(slots, self.slowdowns)

    def times(self, slots: SlotOrder, mapping: Mapping) -> SplitTimes:
        """The times under an order of slots."""
        return self.model.times(self.point, slots, mapping)

    @property
    def link_s(self) -> tuple[float, float, float]:
        """Seconds of a boundary tensor inside a node and between nodes, without latency, and the latency."""
        return self.model.link_s(self.point)

    def gradient_boundaries(self, slots: SlotOrder) -> float:
        """The exposed gradients of a step, in boundary tensors that take as long."""
        return self.model.gradient_boundaries(self.point, slots)

    def distinct(self, orders: IntArray) -> list[int]:
        """The first of the orders [orders, world size] that take the same time, by their indices."""
        return self.model.distinct(orders, self.slowdowns)
