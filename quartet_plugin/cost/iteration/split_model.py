"""The iteration model of a plan as a function of its split and its mapping, everything else held.

A stage's actions take a fixed time and one that grows by its layers, so that an iteration is evaluated for
many splits without a plan for each. Processes that share cores are taken as busy all the time here; the
iteration model itself decides among what a search returns.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from quartet_plugin.cost.coefficients import CAUSES, INDEX, Coefficient
from quartet_plugin.cost.iteration.kernel import UNSLOWED
from quartet_plugin.cost.iteration.orders import WeightedOrders
from quartet_plugin.cost.iteration.plan_terms import (
    GroupsApart,
    RankGroups,
    are_apart,
    are_copies_apart,
    crossings_of,
    groups_apart,
)
from quartet_plugin.cost.iteration.split_kernel import counts_by_kind
from quartet_plugin.cost.layer_kinds import layers_before, letters_of
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.plan import Mapping, Plan

# Indices of slots, RANK 0's first.
type SlotOrder = Sequence[int] | IntArray

# Layers of weights by which the fullest ranks of two splits differ at least where their steps give the step's
# slope.
_LEAST_DIFFERENCE = 0.01
# `SplitTimes.before` of layers that are all alike.
_OF_ONE_KIND: IntArray = np.zeros((1, 0), dtype=np.int64)


class StepLine(NamedTuple):
    """Seconds once an iteration, by what the pipeline rank with the most weights holds, as kernels take it.

    `fixed_s`, plus `per_layer_s` times its weights in layers, plus `start_s` [num_kinds] times its layers. A
    layer of each kind counts as `weights` [num_kinds] of the mean one, embedding and head as `first` and
    `last`, multi-token prediction on the stage before the last one as `mtp`.
    """

    fixed_s: float
    per_layer_s: float
    start_s: FloatArray
    weights: FloatArray
    first: float
    last: float
    mtp: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitTimes:
    """An iteration's times for any split under one mapping.

    A stage's action of direction k (forward, input gradient, weight gradient) takes `fixed_s[k, s]` plus
    `layer_s[j, k, s]` for each layer of kind j; `sends_s` [S] is the transfer from each stage to the next.
    `orders` have weights. `before` [num_kinds, num_layers + 1] are the layers of each kind before each layer;
    of one kind it has no columns. The first `num_layer_stages` stages may have layers: all, or all but a last
    one that has the head alone.
    """

    fixed_s: FloatArray
    layer_s: FloatArray
    sends_s: FloatArray
    placement: IntArray
    orders: WeightedOrders
    is_blocking: bool
    step: StepLine
    before: IntArray
    num_layer_stages: int

    def counts(self, split: Sequence[int]) -> IntArray:
        """The layers of each kind on each stage of a split [num_kinds, S]."""
        return counts_by_kind(np.array(split, dtype=np.int64), self.before)

    def action_s(self, split: Sequence[int]) -> FloatArray:
        """Seconds of the actions of each direction on each stage of a split [3, S]."""
        seconds = self.fixed_s
        for layer_s, counts in zip(self.layer_s, self.counts(split), strict=True):
            seconds = seconds + layer_s * counts
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """The weights of a layer of each kind [num_kinds], and those that the ends have beside their layers.

    `mtp` are those of multi-token prediction on the stage before the last one.
    """

    layers: FloatArray
    first: float
    last: float
    mtp: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawTimes:
    """Seconds under coefficients of 1, by what multiplies them.

    `compute_fixed` [num_causes, 3, S], `compute_layer` [num_kinds, num_causes, 3]: slowed down by slots.
    `other_fixed` [4, 3, S] and `other_layer` [num_kinds, 4, 3]: what no slowdown touches, by `UNSLOWED`.
    `intra`, `inter` and `latency` are those of a transfer between stages. An iteration is `share` times its
    terms, of which `layer_start_s` [num_kinds] starts the optimizer's kernels of one layer.
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
    layer_start_s: FloatArray


class SplitModel:
    """One plan's `SplitTimes` under any coefficients and mapping; `step_terms_of` gives a plan's step."""

    def __init__(
        self,
        plan: Plan,
        *,
        run: TrainingRun,
        raw_of: Callable[[GroupsApart], RawTimes],
        groups: RankGroups,
        weights: LayerWeights,
        slot_index: IntArray,
        domain_of_slot: IntArray,
        step_terms_of: Callable[[Plan], FloatArray],
    ) -> None:
        self._plan, self._run = plan, run
        self._raw_of, self._groups = raw_of, groups
        # What is read of it does not depend on the domains of groups.
        self._raw = raw_of(GroupsApart(heads=None if groups.heads is None else False))
        self._weights_of_layers = weights
        self._before = layers_before(run.pattern, letters_of(None, run.kinds)) if run.kinds else _OF_ONE_KIND
        self._layer_weights = float(weights.layers[0])
        if run.kinds:
            self._layer_weights = float(weights.layers @ self._before[:, -1]) / plan.shape.num_layers
        self._slot_index, self.domain_of_slot = slot_index, domain_of_slot
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
        domains = self.domain_of_slot[by_rank]
        return (
            tuple(slowdowns[by_rank].max(axis=1).tolist()),
            tuple(crossings_of(domains, self._raw.placement).tolist()),
            self._step_class(domains),
            groups_apart(domains, self._groups),
        )

    def times(self, log_coefficients: FloatArray, slots: SlotOrder, mapping: Mapping) -> SplitTimes:
        """The times when slot `slots[r]` plays RANK r, as `mapping` says in other words."""
        layout, schedule = self._plan.layout, self._plan.schedule
        by_rank = np.asarray(slots).reshape(layout.pipeline_parallel, -1)
        domains = self.domain_of_slot[by_rank]
        raw, scale = self._raw_of(groups_apart(domains, self._groups)), np.exp(log_coefficients)
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
        layers = [
            np.tensordot(causes, compute, 1)[:, None] * slowed + np.tensordot(others, other, 1)[:, None]
            for compute, other in zip(raw.compute_layer, raw.other_layer, strict=True)
        ]
        crossing = crossings_of(domains, self._raw.placement)
        transfer, network = scale[INDEX[Coefficient.TRANSFER]], scale[INDEX[Coefficient.NETWORK]]
        intra = transfer * raw.intra_s + scale[INDEX[Coefficient.LATENCY]] * raw.latency_s
        inter = network * raw.inter_s + scale[INDEX[Coefficient.LATENCY]] * raw.latency_s
        sends_s = np.array([0.0, intra, inter])[crossing]
        if self._run.is_mtp_before_last:
            more = self._run.num_sent_tensors(len(crossing) - 2) - 1
            sends_s[-2] += more * (0.0, transfer * raw.intra_s, network * raw.inter_s)[crossing[-2]]
        return SplitTimes(
            fixed_s=raw.share * (fixed + np.tensordot(others, raw.other_fixed, 1)),
            layer_s=raw.share * np.array(layers),
            sends_s=raw.share * sends_s,
            placement=raw.placement,
            orders=raw.orders,
            is_blocking=raw.is_blocking,
            step=self._step_line(raw.share * scale, domains, mapping),
            before=self._before,
            num_layer_stages=self._num_layer_stages,
        )

    @property
    def _num_layer_stages(self) -> int:
        """The stages that may have layers, the first ones."""
        return self._plan.layout.num_stages - self._run.is_mtp_before_last

    def distinct(self, orders: IntArray, slowdowns: FloatArray) -> list[int]:
        """The indices of the first of the orders [orders, world size] with one signature each."""
        layout, placement = self._plan.layout, self._raw.placement
        by_rank = orders.reshape(len(orders), layout.pipeline_parallel, -1)
        domains = self.domain_of_slot[by_rank]
        num_copies = domains.shape[-1] // layout.tensor_parallel
        rows = np.concatenate(
            [
                slowdowns[by_rank].max(axis=2),
                (domains[:, placement[:-1]] == domains[:, placement[1:]]).all(axis=2),
                (domains[:, placement[0]] != domains[:, self._embedding_rank]).any(axis=1)[:, None],
                *(
                    are_apart(domains, *group)[:, None]
                    for group in ((num_copies, layout.tensor_parallel), *self._groups.present)
                ),
            ],
            axis=1,
        )
        _, first = np.unique(rows, axis=0, return_index=True)
        return sorted(first.tolist())

    def link_s(self, log_coefficients: FloatArray) -> tuple[float, float, float]:
        """Seconds of a boundary tensor inside a domain and between two, without latency, and the latency."""
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
        domains = self.domain_of_slot[np.asarray(slots).reshape(layout.pipeline_parallel, -1)]
        is_inter_node, _ = self._step_class(domains)
        terms, scale = self._step_terms_of(self._plan), np.exp(log_coefficients)
        intra_s, inter_s, _ = self.link_s(log_coefficients)
        if is_inter_node:
            index, unit_s = INDEX[Coefficient.NETWORK], inter_s
        else:
            index, unit_s = INDEX[Coefficient.GRADIENTS], intra_s
        return float(scale[index] * terms[index]) / max(unit_s, 1e-30)

    def _step_class(self, domains: IntArray) -> tuple[bool, bool]:
        placement = self._raw.placement
        is_inter_node = are_copies_apart(domains, tensor_parallel=self._plan.layout.tensor_parallel)
        return is_inter_node, bool((domains[placement[0]] != domains[self._embedding_rank]).any())

    @property
    def _embedding_rank(self) -> int:
        """The pipeline rank that sums gradients of the embedding with the first one, where a model does."""
        return int(self._raw.placement[self._run.embedding_stage])

    def _step_line(self, scale: FloatArray, domains: IntArray, mapping: Mapping) -> StepLine:
        """A line through the steps of two splits whose fullest ranks have other weights."""
        key = self._step_class(domains)
        if key not in self._steps:
            plans = [replace(plan, mapping=mapping) for plan in (self._plan, self._other_split)]
            self._steps[key] = (self._step_terms_of(plans[0]), self._step_terms_of(plans[1]))
        first, second = (float(scale @ terms) for terms in self._steps[key])
        (held, layers), (other_held, other_layers) = self._fullest_of_both
        start_s = float(scale[INDEX[Coefficient.OPTIMIZER]]) * self._raw.layer_start_s
        more_s, more = second - first - float(start_s @ (other_layers - layers)), other_held - held
        # Without another split nothing depends on the slope.
        slope = 0.0 if abs(more) < _LEAST_DIFFERENCE else max(0.0, more_s / more)
        return StepLine(
            fixed_s=first - slope * held - float(start_s @ layers),
            per_layer_s=slope,
            start_s=start_s,
            weights=self._weights_of_layers.layers / self._layer_weights,
            first=self._weights_of_layers.first / self._layer_weights,
            last=self._weights_of_layers.last / self._layer_weights,
            mtp=self._weights_of_layers.mtp / self._layer_weights,
        )

    @functools.cached_property
    def _fullest_of_both(self) -> tuple[tuple[float, IntArray], tuple[float, IntArray]]:
        """The weights in layers, and the layers of each kind, of the fullest rank under both splits."""
        plans = self._plan, self._other_split
        splits = np.array([plan.split.transformer_layers_per_stage for plan in plans])
        counts = self._counts(splits)
        first, other = (
            (
                float(held.max() / self._layer_weights),
                counts[:, index, self._raw.placement == held.argmax()].sum(axis=1),
            )
            for index, held in enumerate(self._weights(splits))
        )
        return first, other

    def _counts(self, splits: IntArray) -> IntArray:
        """The layers of each kind on each stage [num_kinds, num, S] under each of the `splits` [num, S]."""
        if not self._run.kinds:
            return splits[None]
        ends = splits.cumsum(axis=1)
        counts: IntArray = self._before[:, ends] - self._before[:, ends - splits]
        return counts

    def _weights(self, splits: IntArray) -> FloatArray:
        """The weights of each pipeline rank [num, pp] under each of the `splits` [num, S]."""
        stages = np.zeros(splits.shape)
        for counts, weights in zip(self._counts(splits), self._weights_of_layers.layers, strict=True):
            stages += counts * weights
        stages[:, 0] += self._weights_of_layers.first
        stages[:, -1] += self._weights_of_layers.last
        if self._run.is_mtp_before_last:
            stages[:, -2] += self._weights_of_layers.mtp
        held = np.zeros((len(splits), self._plan.layout.pipeline_parallel))
        for stage, rank in enumerate(self._raw.placement.tolist()):
            held[:, rank] += stages[:, stage]
        return held

    @functools.cached_property
    def _other_split(self) -> Plan:
        """The plan with a layer moved to its fullest rank from the fullest stage elsewhere that has several.

        Where no stage has, the layer moves from an end stage, which may be left empty, or from the fullest
        rank: the fullest ranks then differ the most. The plan itself where no layer can move.
        """
        counts = np.array(self._plan.split.transformer_layers_per_stage)
        weights = self._weights(counts[None])[0]
        fullest, num_stages = weights.argmax(), self._num_layer_stages
        targets = np.flatnonzero(self._raw.placement[:num_stages] == fullest)
        others = np.flatnonzero((self._raw.placement != fullest) & (counts > 1))
        if len(others) and len(targets):
            return self._with_counts(_moved(counts, int(others[counts[others].argmax()]), int(targets[0])))
        least = np.ones(num_stages)
        least[[0, -1]] = 0
        pairs = [
            (giver, taker)
            for giver in np.flatnonzero(counts[:num_stages] > least).tolist()
            for taker in range(num_stages)
            if giver != taker
        ]
        if not pairs:
            return self._plan
        splits = np.array([_moved(counts, giver, taker) for giver, taker in pairs])
        fullest_held = self._weights(splits).max(axis=1) / self._layer_weights
        differences = np.abs(fullest_held - weights.max() / self._layer_weights)
        return self._with_counts(splits[differences.argmax()])

    def _with_counts(self, counts: IntArray) -> Plan:
        """The plan with these layers of each stage."""
        split = replace(self._plan.split, transformer_layers_per_stage=tuple(counts.tolist()))
        return replace(self._plan, split=split)


def _moved(counts: IntArray, source: int, target: int) -> IntArray:
    """The layers of each stage with one layer of stage `source` in stage `target`."""
    moved = counts.copy()
    moved[source] -= 1
    moved[target] += 1
    return moved


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CalibratedSplits:
    """A plan's split model at one point of the coefficients (logarithms)."""

    model: SplitModel
    point: FloatArray

    @property
    def slowdowns(self) -> FloatArray:
        """The slowdown of every slot [num_slots]."""
        return self.model.slowdowns(self.point)

    @property
    def domain_of_slot(self) -> IntArray:
        """The domain of every slot [num_slots], as `MachineModel.domain_of_slot` numbers them."""
        return self.model.domain_of_slot

    def signature(self, slots: SlotOrder) -> tuple[object, ...]:
        """What an order of slots (indices) changes: equal for orders that take the same time."""
        return self.model.signature(slots, self.slowdowns)

    def times(self, slots: SlotOrder, mapping: Mapping) -> SplitTimes:
        """The times under an order of slots."""
        return self.model.times(self.point, slots, mapping)

    @property
    def link_s(self) -> tuple[float, float, float]:
        """Seconds of a boundary tensor inside a domain and between two, without latency, and the latency."""
        return self.model.link_s(self.point)

    def gradient_boundaries(self, slots: SlotOrder) -> float:
        """The exposed gradients of a step, in boundary tensors that take as long."""
        return self.model.gradient_boundaries(self.point, slots)

    def distinct(self, orders: IntArray) -> list[int]:
        """The first of the orders [orders, world size] that take the same time, by their indices."""
        return self.model.distinct(orders, self.slowdowns)
