"""The iteration model: an iteration's seconds and their slopes by the logarithms of the coefficients.

A `Coefficient` multiplies each cause of a stage's time. The actions run in the plan's order, slowed down as
the slots of the plan's mapping are, so that every plan of a space has seconds and slopes: all that the
posterior of the coefficients needs. `log_coefficients` [num_coefficients] are logarithms throughout. See
docs/search.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quartet_plugin.cost import communication, compute
from quartet_plugin.cost.coefficients import CAUSES, INDEX, Coefficient, MachineModel
from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.core_sharing import core_sharing_of
from quartet_plugin.cost.critical_path import OrderedActions, orders_of
from quartet_plugin.cost.iteration_kernel import pipeline_time
from quartet_plugin.cost.memory import Weights, weights_of_stages
from quartet_plugin.cost.predict import layer_parts, optimizer_s
from quartet_plugin.cost.run import ON_CPU, ScheduleKind, TrainingRun, run_of
from quartet_plugin.errors import PlanError
from quartet_plugin.mapping.orders import slots_of
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.split.layers import EndLoads, end_loads_with_slowdowns

# Seconds to start an action, beside its layers: the loop, data, the loss.
ACTION_S = 2e-4
_NO_ORDER = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCosts:
    """Seconds of one microbatch by cause and direction (forward, input gradient, weight gradient).

    `layer` [num_causes, 3] is one transformer layer's compute; `tensor` and `context` [3] are its tensor and
    context parallel collectives; `embedding` and `head` [3] are the ends' compute, `end_collectives` [2, 3]
    their tensor parallel collectives.
    """

    layer: FloatArray
    tensor: FloatArray
    context: FloatArray
    embedding: FloatArray
    head: FloatArray
    end_collectives: FloatArray


class IterationModelCache:
    """Makes the iteration model of any plan of a run; what plans share is computed once."""

    def __init__(self, machine_model: MachineModel) -> None:
        self.machine_model = machine_model
        self._layers: dict[tuple[ModelShape, Layout], LayerCosts] = {}
        self._links: dict[tuple[ModelShape, Layout], tuple[float, float, float]] = {}
        self._orders: dict[object, tuple[tuple[OrderedActions, float], ...]] = {}

    def of(self, plan: Plan) -> "IterationModel":
        """The plan's iteration model."""
        return IterationModel(
            plan,
            machine_model=self.machine_model,
            run=run_of_plan(plan, self.machine_model),
            layers=self._layers_of(plan),
            links=self._links_of(plan),
            orders=self._orders_of(plan),
        )

    def end_loads(self, plan: Plan, log_coefficients: FloatArray) -> EndLoads:
        """The end loads that balance the plan's pipeline: of embedding and head, and of slower end ranks."""
        costs = self._layers_of(plan)
        scale = np.exp(log_coefficients)
        directions = np.array(
            [1.0, scale[INDEX[Coefficient.INPUT_GRAD]], scale[INDEX[Coefficient.WEIGHT_GRAD]]]
        )
        speed = scale[INDEX[Coefficient.SPEED]]
        tensor = scale[INDEX[Coefficient.TENSOR]]
        layer = speed * float(scale[: len(CAUSES)] @ costs.layer @ directions)
        layer += float(tensor * costs.tensor.sum() + scale[INDEX[Coefficient.CONTEXT]] * costs.context.sum())
        first = speed * scale[INDEX[Coefficient.EMBEDDING]] * float(costs.embedding @ directions)
        last = speed * scale[INDEX[Coefficient.HEAD]] * float(costs.head @ directions)
        collectives = tensor * costs.end_collectives.sum(axis=1)
        indices = _slowdown_indices(plan, self.machine_model)
        slowdowns = np.ones(plan.layout.pipeline_parallel)
        if indices is not None:
            slowdowns = scale[indices[np.arange(len(indices)), np.argmax(scale[indices], axis=1)]]
        core_sharing = core_sharing_of(plan, self.machine_model.nodes)
        if core_sharing is not None:
            slowdowns = slowdowns * core_sharing.greatest_slowdown
        ends = EndLoads(
            embedding=(first + float(collectives[0])) / layer, head=(last + float(collectives[1])) / layer
        )
        return end_loads_with_slowdowns(ends, slowdowns=slowdowns.tolist(), num_layers=plan.shape.num_layers)

    def _layers_of(self, plan: Plan) -> LayerCosts:
        key = (plan.shape, plan.layout)
        if key not in self._layers:
            run = run_of_plan(plan, self.machine_model)
            self._layers[key] = layer_costs(run, self.machine_model.constants)
        return self._layers[key]

    def _links_of(self, plan: Plan) -> tuple[float, float, float]:
        """Seconds of a boundary tensor inside a node and between nodes, without latency, and the latency."""
        key = (plan.shape, plan.layout)
        if key not in self._links:
            run, constants = run_of_plan(plan, self.machine_model), self.machine_model.constants
            latency = communication.transfer_latency_s(constants)
            intra_node = communication.transfer_s(run, constants, sender=0, receiver=1)
            run = replace(run, machines=self.machine_model.inter_node)
            inter_node = communication.transfer_s(run, constants, sender=0, receiver=1)
            self._links[key] = (intra_node - latency, inter_node - latency, latency)
        return self._links[key]

    def _orders_of(self, plan: Plan) -> tuple[tuple[OrderedActions, float], ...]:
        layout, schedule = plan.layout, plan.schedule
        key = (
            layout.pipeline_parallel,
            layout.virtual_stages,
            plan.num_microbatches,
            schedule.name,
            schedule.group,
            schedule.custom,
            # The points of a family compare by what they are made of.
            None if schedule.custom is None else repr(schedule.custom.family),
        )
        if key not in self._orders:
            self._orders[key] = orders_of(plan)
        return self._orders[key]


def run_of_plan(
    plan: Plan, machine_model: MachineModel, *, schedule: ScheduleKind | None = None
) -> TrainingRun:
    """The plan as a training run, every link inside a node."""
    return run_of(
        plan.shape,
        plan.layout,
        global_batch_size=plan.made_for.global_batch_size,
        layers_per_stage=plan.split.transformer_layers_per_stage,
        machines=machine_model.intra_node,
        schedule=schedule,
        precision=machine_model.precision,
        software=ON_CPU if machine_model.on_cpu else None,
    )


def layer_costs(run: TrainingRun, constants: Constants) -> LayerCosts:
    """The costs of a run's layers, embedding and head."""
    rates = compute.Rates(run, constants)
    parts = layer_parts(run, constants, rates)
    layer = np.zeros((len(CAUSES), 3))
    layer[INDEX[Coefficient.PRODUCTS]] = parts["gemm"]
    for cause in (Coefficient.ATTENTION, Coefficient.ELEMENTWISE, Coefficient.LAUNCH, Coefficient.RECOMPUTE):
        layer[INDEX[cause]] = parts[cause.value]
    return LayerCosts(
        layer=layer,
        tensor=np.array(parts["tp_comm"]),
        context=np.array(parts["cp_comm"]),
        embedding=np.array(compute.embedding_times(run, rates).total),
        head=np.array(compute.head_times(run, constants, rates).total),
        end_collectives=np.array(communication.tensor_parallel_ends(run, constants)),
    )


def _slowdown_indices(plan: Plan, machine_model: MachineModel) -> IntArray | None:
    """The coefficients' indices of the slots' slowdowns [pp, slots a rank]; None where no slot has one."""
    if (machine_model.slowdown_index_of_slot < 0).any():
        return None
    number = {slot: index for index, slot in enumerate(slots_of(machine_model.nodes))}
    indices = machine_model.slowdown_index_of_slot[[number[slot] for slot in plan.mapping.slots]]
    # Megatron numbers pipeline ranks slowest.
    return indices.reshape(plan.layout.pipeline_parallel, -1)


class IterationModel:
    """One plan's iteration: evaluated under any coefficients."""

    def __init__(
        self,
        plan: Plan,
        *,
        machine_model: MachineModel,
        run: TrainingRun,
        layers: LayerCosts,
        links: tuple[float, float, float],
        orders: tuple[tuple[OrderedActions, float], ...],
    ) -> None:
        self._orders = orders
        self._is_custom = plan.schedule.custom is not None
        self._is_blocking = plan.schedule.name == "1f1b"
        ranks, num_stages = plan.layout.pipeline_parallel, plan.layout.num_stages
        placement = orders[0][0].placement if orders else np.arange(num_stages, dtype=np.int64) % ranks
        self._placement = placement
        counts = np.array(plan.split.transformer_layers_per_stage, dtype=np.float64)
        compute_s = layers.layer[:, :, None] * counts
        compute_s[INDEX[Coefficient.EMBEDDING], :, 0] += layers.embedding
        compute_s[INDEX[Coefficient.HEAD], :, -1] += layers.head
        self._compute = compute_s
        tensor = layers.tensor[:, None] * counts
        tensor[:, 0] += layers.end_collectives[0]
        tensor[:, -1] += layers.end_collectives[1]
        action = np.array([[ACTION_S], [ACTION_S], [0.0]]) * np.ones(num_stages)
        self._unslowed = np.stack([tensor, layers.context[:, None] * counts, action])
        self._core_sharing = core_sharing_of(plan, machine_model.nodes)
        self._no_core_slowdown = np.ones(ranks)
        self._last_core_slowdown: tuple[bytes, FloatArray] | None = None
        indices = _slowdown_indices(plan, machine_model)
        self._slot_indices = np.zeros((0, 0), dtype=np.int64) if indices is None else indices
        self._sends = _sends(plan, placement, links)
        self._step = np.zeros(machine_model.num_coefficients)
        for coefficient, seconds in _step_terms(plan, run, placement, machine_model, compute_s).items():
            self._step[INDEX[coefficient]] = seconds
        self._counts = np.full((3, num_stages), float(plan.num_microbatches))

    def evaluate(self, log_coefficients: FloatArray) -> tuple[float, FloatArray]:
        """Seconds an iteration, and their slopes by `log_coefficients`.

        Raises PlanError for orders that do not run.
        """
        return self._evaluate(np.exp(log_coefficients), core_slowdown=self._core_slowdown(log_coefficients))

    def _evaluate(self, scale: FloatArray, *, core_slowdown: FloatArray) -> tuple[float, FloatArray]:
        slopes = scale * self._step
        seconds = float(slopes.sum())
        if not self._orders:
            seconds += self._time(scale, slopes, core_slowdown=core_slowdown, counts=self._counts)
            return seconds, slopes
        for order, weight in self._orders:
            slopes_of_order = np.zeros(len(scale))
            span = self._time(scale, slopes_of_order, core_slowdown=core_slowdown, order=order)
            if span < 0.0:
                raise PlanError("orders: they wait for each other; take another schedule")
            seconds += weight * span
            slopes += weight * slopes_of_order
        return seconds, slopes

    def _core_slowdown(self, log_coefficients: FloatArray) -> FloatArray:
        """The slowdown of each rank's compute by core sharing [pp]."""
        if self._core_sharing is None:
            return self._no_core_slowdown
        key = log_coefficients.tobytes()
        if self._last_core_slowdown is None or self._last_core_slowdown[0] != key:
            scale = np.exp(log_coefficients)
            slowdown = self._core_sharing.consistent_slowdown(
                self._work(scale),
                span_s=lambda core_slowdown: self._evaluate(scale, core_slowdown=core_slowdown)[0],
            )
            self._last_core_slowdown = (key, slowdown)
        return self._last_core_slowdown[1]

    def _work(self, scale: FloatArray) -> FloatArray:
        """Seconds of compute of each pipeline rank in an iteration, alone on its cores [pp]."""
        work = np.zeros(len(self._no_core_slowdown))
        for stage, rank in enumerate(self._placement):
            counts = np.zeros_like(self._counts)
            counts[:, stage] = self._counts[:, stage]
            slopes = np.zeros(len(scale))
            work[rank] += self._time(scale, slopes, core_slowdown=self._no_core_slowdown, counts=counts)
        return work

    def shares_cores(self, stage: int) -> bool:
        """Whether a stage's processes share cores, so that an action's time depends on other processes."""
        sharing = self._core_sharing
        return sharing is not None and bool(sharing.greatest_slowdown[self._placement[stage]] > 1.0)

    def evaluate_action(
        self, log_coefficients: FloatArray, *, stage: int, directions: Sequence[int]
    ) -> tuple[float, FloatArray]:
        """Seconds of a stage's action that computes `directions` (0 forward, 1 input, 2 weight gradient).

        The second value is their slopes by `log_coefficients`.
        """
        counts = np.zeros_like(self._counts)
        counts[list(directions), stage] = 1.0
        slopes = np.zeros(len(log_coefficients))
        core_slowdown = self._core_slowdown(log_coefficients)
        seconds = self._time(np.exp(log_coefficients), slopes, core_slowdown=core_slowdown, counts=counts)
        return seconds, slopes

    def _time(
        self,
        scale: FloatArray,
        slopes: FloatArray,
        *,
        core_slowdown: FloatArray,
        counts: FloatArray | None = None,
        order: OrderedActions | None = None,
    ) -> float:
        return pipeline_time(
            scale,
            self._compute,
            self._unslowed,
            self._slot_indices,
            core_slowdown,
            self._placement,
            self._sends,
            self._is_blocking,
            self._is_custom,
            self._counts if counts is None else counts,
            _NO_ORDER if order is None else order.orders,
            _NO_ORDER if order is None else order.offsets,
            0 if order is None else order.num_microbatches,
            slopes,
        )


def _sends(plan: Plan, placement: IntArray, links: tuple[float, float, float]) -> FloatArray:
    """Seconds of the transfer from each stage to the next: intra-node, inter-node, latency [3, S]."""
    intra_node_s, inter_node_s, latency_s = links
    nodes = np.array([slot.node for slot in plan.mapping.slots]).reshape(plan.layout.pipeline_parallel, -1)
    sends = np.zeros((3, len(placement)))
    for stage in range(len(placement) - 1):
        sender, receiver = int(placement[stage]), int(placement[stage + 1])
        if sender == receiver:
            continue
        if (nodes[sender] == nodes[receiver]).all():
            sends[:, stage] = intra_node_s, 0.0, latency_s
        else:
            sends[:, stage] = 0.0, inter_node_s, latency_s
    return sends


def _step_terms(
    plan: Plan, run: TrainingRun, placement: IntArray, machine_model: MachineModel, compute_s: FloatArray
) -> Mapping[Coefficient, float]:
    """Seconds once an iteration, by the coefficient that multiplies them."""
    layout, constants = plan.layout, machine_model.constants
    ranks = layout.pipeline_parallel
    weights = weights_of_stages(run)
    fullest = max(
        (
            Weights.total_of(held for held, rank in zip(weights, placement, strict=True) if rank == holder)
            for holder in range(ranks)
        ),
        key=lambda held: held.total,
    )
    nodes = np.array([slot.node for slot in plan.mapping.slots]).reshape(
        ranks, layout.data_parallel * layout.context_parallel, layout.tensor_parallel
    )
    is_inter_node = bool((nodes != nodes[:, :1]).any())
    per_stage = compute_s.sum(axis=0)
    inter_node_run = replace(run, machines=machine_model.inter_node)
    gradients = communication.data_parallel(
        inter_node_run if is_inter_node else run,
        constants,
        dense=fullest.dense,
        expert=fullest.expert,
        forward_s=float(per_stage[0].sum()) / ranks,
        backward_s=float(per_stage[1:].sum()) / ranks,
    )
    if placement[0] != placement[-1]:
        ends_apart = bool((nodes[placement[0]] != nodes[placement[-1]]).any())
        gradients += communication.tied_ends_s(inter_node_run if ends_apart else run, constants)
    return {
        Coefficient.OPTIMIZER: optimizer_s(run, constants, fullest),
        Coefficient.STEP: constants.step_s,
        Coefficient.NETWORK if is_inter_node else Coefficient.GRADIENTS: gradients,
    }
