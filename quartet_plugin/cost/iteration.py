"""What an iteration of a plan is made of, as the cost model has it, and how long it takes under corrections.

Every cause of a stage's time is the cost model's own; a `Coefficient` multiplies it. The actions are run in
the plan's own order, on the paces of the slots that its mapping gives it, so that any plan of a space has a
time and its slopes by every coefficient's logarithm: all that their posterior needs. See docs/search.md.
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
from quartet_plugin.cost.jobs import run_of
from quartet_plugin.cost.memory import Weights, weights_of_stages
from quartet_plugin.cost.predict import layer_parts, optimizer_s
from quartet_plugin.cost.run import ScheduleKind, TrainingRun
from quartet_plugin.cost.software import ON_CPU
from quartet_plugin.errors import PlanError
from quartet_plugin.mapping.orders import slots_of
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.shape import ModelShape

# What starting an action takes beside its layers: the loop, data, the loss.
ACTION_S = 2e-4
_NO_ORDER = np.zeros(0, dtype=np.int64)

_LAYER_CAUSES = {
    Coefficient.PRODUCTS: "gemm",
    Coefficient.ATTENTION: "attention",
    Coefficient.ELEMENTWISE: "elementwise",
    Coefficient.LAUNCH: "launch",
    Coefficient.RECOMPUTE: "recompute",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCosts:
    """Seconds of one microbatch by cause and direction (forward, input gradient, weight gradient).

    `layer` [num_causes, 3] is one transformer layer's; `tensor` and `context` [3] its collectives;
    `embedding` and `head` [3] the ends' own, `ends` [2, 3] their collectives.
    """

    layer: FloatArray
    tensor: FloatArray
    context: FloatArray
    embedding: FloatArray
    head: FloatArray
    ends: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoads:
    """What the ends weigh under given factors, in layers, and the pace of every pipeline rank."""

    embedding: float
    head: float
    paces: tuple[float, ...]


class IterationModelCache:
    """The iteration_model of any plan of a run; what plans share is computed once."""

    def __init__(self, machine_model: MachineModel) -> None:
        self.machine_model = machine_model
        self._layers: dict[tuple[ModelShape, Layout], LayerCosts] = {}
        self._links: dict[tuple[ModelShape, Layout], tuple[float, float, float]] = {}
        self._orders: dict[object, tuple[tuple[OrderedActions, float], ...]] = {}

    def of(self, plan: Plan) -> "IterationModel":
        """The plan's iteration_model."""
        return IterationModel(
            plan,
            machine_model=self.machine_model,
            run=run_of_plan(plan, self.machine_model),
            layers=self._layers_of(plan),
            links=self._links_of(plan),
            orders=self._orders_of(plan),
        )

    def end_loads(self, plan: Plan, theta: FloatArray) -> StageLoads:
        """What the plan's ends weigh under the factors whose logarithms are `theta`."""
        costs = self._layers_of(plan)
        scale = np.exp(theta)
        directions = np.array(
            [1.0, scale[INDEX[Coefficient.INPUT_GRAD]], scale[INDEX[Coefficient.WEIGHT_GRAD]]]
        )
        speed = scale[INDEX[Coefficient.SPEED]]
        tensor = scale[INDEX[Coefficient.TENSOR]]
        layer = speed * float(scale[: len(CAUSES)] @ costs.layer @ directions)
        layer += float(tensor * costs.tensor.sum() + scale[INDEX[Coefficient.CONTEXT]] * costs.context.sum())
        first = speed * scale[INDEX[Coefficient.EMBEDDING]] * float(costs.embedding @ directions)
        last = speed * scale[INDEX[Coefficient.HEAD]] * float(costs.head @ directions)
        ends = tensor * costs.ends.sum(axis=1)
        members = _members(plan, self.machine_model)
        paces = np.ones(plan.layout.pipeline_parallel) if members is None else scale[_slowest(members, scale)]
        crowding = core_sharing_of(plan, self.machine_model.nodes)
        if crowding is not None:
            paces = paces * crowding.most
        return StageLoads(
            embedding=(first + float(ends[0])) / layer,
            head=(last + float(ends[1])) / layer,
            paces=tuple(paces.tolist()),
        )

    def _layers_of(self, plan: Plan) -> LayerCosts:
        key = (plan.shape, plan.layout)
        if key not in self._layers:
            self._layers[key] = layer_costs(
                run_of_plan(plan, self.machine_model), self.machine_model.constants
            )
        return self._layers[key]

    def _links_of(self, plan: Plan) -> tuple[float, float, float]:
        """Seconds of a boundary tensor inside a node and between nodes, without latency, and the latency."""
        key = (plan.shape, plan.layout)
        if key not in self._links:
            run, constants = run_of_plan(plan, self.machine_model), self.machine_model.constants
            latency = communication.transfer_latency_s(constants)
            near = communication.transfer_s(run, constants, sender=0, receiver=1)
            far = communication.transfer_s(
                replace(run, machines=self.machine_model.inter_node), constants, sender=0, receiver=1
            )
            self._links[key] = (near - latency, far - latency, latency)
        return self._links[key]

    def _orders_of(self, plan: Plan) -> tuple[tuple[OrderedActions, float], ...]:
        """The plan's orders with their weights: many microbatches are two shorter runs, extrapolated."""
        if plan.layout.pipeline_parallel == 1:
            return ()
        layout, schedule, count = plan.layout, plan.schedule, plan.num_microbatches
        key = (
            layout.pipeline_parallel,
            layout.virtual_stages,
            count,
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
    """The plan in the cost model's terms, every link inside a node."""
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
    """The layers of a run as the cost model has them."""
    rates = compute.Rates(run, constants)
    parts = layer_parts(run, constants, rates)
    ends = communication.tensor_parallel_ends(run, constants)
    layer = np.zeros((len(CAUSES), 3))
    for factor, name in _LAYER_CAUSES.items():
        layer[INDEX[factor]] = parts[name]
    return LayerCosts(
        layer=layer,
        tensor=np.array(parts["tp_comm"]),
        context=np.array(parts["cp_comm"]),
        embedding=_whole(compute.embedding_times(run, rates)),
        head=_whole(compute.head_times(run, constants, rates)),
        ends=np.array([tuple(ends[0]), tuple(ends[1])]),
    )


def _whole(times: compute.LayerTimes) -> FloatArray:
    found: FloatArray = np.sum([times.gemm, times.attention, times.elementwise, times.launch], axis=0)
    return found


def _slowest(members: IntArray, scale: FloatArray) -> IntArray:
    """The pace factor of each pipeline rank's slowest slot [pp]."""
    found: IntArray = members[np.arange(len(members)), np.argmax(scale[members], axis=1)]
    return found


def _members(plan: Plan, machine_model: MachineModel) -> IntArray | None:
    """The pace factors of each pipeline rank's slots [pp, slots a rank]; None where none are told apart."""
    if (machine_model.slowdown_index_of_slot < 0).any():
        return None
    index = {slot: at for at, slot in enumerate(slots_of(machine_model.nodes))}
    each = machine_model.slowdown_index_of_slot[[index[slot] for slot in plan.mapping.slots]]
    # Megatron numbers pipeline ranks slowest.
    return each.reshape(plan.layout.pipeline_parallel, -1)


class IterationModel:
    """One plan's iteration, taken apart."""

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
        self._is_own = plan.schedule.custom is not None
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
        tensor[:, 0] += layers.ends[0]
        tensor[:, -1] += layers.ends[1]
        action = np.array([[ACTION_S], [ACTION_S], [0.0]]) * np.ones(num_stages)
        self._beside = np.stack([tensor, layers.context[:, None] * counts, action])
        self._crowding = core_sharing_of(plan, machine_model.nodes)
        self._alone = np.ones(ranks)
        self._stretched: tuple[bytes, FloatArray] | None = None
        members = _members(plan, machine_model)
        self._members = np.zeros((0, 0), dtype=np.int64) if members is None else members
        self._sends = _sends(plan, placement, links)
        self._step = np.zeros(machine_model.num_coefficients)
        for factor, seconds in _step_terms(plan, run, placement, machine_model, compute_s).items():
            self._step[INDEX[factor]] = seconds
        self._always = np.full((3, num_stages), float(plan.num_microbatches))

    def evaluate(self, theta: FloatArray) -> tuple[float, FloatArray]:
        """Seconds an iteration, and their slopes by the factors' logarithms `theta` [num_coefficients].

        Raises PlanError for orders that do not run.
        """
        return self._evaluate(np.exp(theta), stretch=self._stretch(theta))

    def _evaluate(self, scale: FloatArray, *, stretch: FloatArray) -> tuple[float, FloatArray]:
        slopes = scale * self._step
        seconds = float(slopes.sum())
        if not self._orders:
            seconds += self._time(scale, slopes, stretch=stretch, counts=self._always)
            return seconds, slopes
        for order, weight in self._orders:
            each = np.zeros(len(scale))
            span = self._time(scale, each, stretch=stretch, order=order)
            if span < 0.0:
                raise PlanError("orders: they wait for each other; take another schedule")
            seconds += weight * span
            slopes += weight * each
        return seconds, slopes

    def _stretch(self, theta: FloatArray) -> FloatArray:
        """How many times as long each rank's compute takes beside others on the same cores [pp]."""
        if self._crowding is None:
            return self._alone
        key = theta.tobytes()
        if self._stretched is None or self._stretched[0] != key:
            scale = np.exp(theta)
            found = self._crowding.settle(
                self._work(scale), span_s=lambda one: self._evaluate(scale, stretch=one)[0]
            )
            self._stretched = (key, found)
        return self._stretched[1]

    def _work(self, scale: FloatArray) -> FloatArray:
        """Seconds of compute of each pipeline rank in an iteration, alone on its cores [pp]."""
        found = np.zeros(len(self._alone))
        for stage, rank in enumerate(self._placement):
            counts = np.zeros_like(self._always)
            counts[:, stage] = self._always[:, stage]
            found[rank] += self._time(scale, np.zeros(len(scale)), stretch=self._alone, counts=counts)
        return found

    def is_crowded(self, stage: int) -> bool:
        """Whether a stage's processes share cores: an action then has a time slice to itself, or not."""
        return self._crowding is not None and bool(self._crowding.most[self._placement[stage]] > 1.0)

    def stage(self, theta: FloatArray, *, stage: int, directions: Sequence[int]) -> tuple[float, FloatArray]:
        """Seconds of one action of a stage, of those directions (0 forward, 1, 2), and the slopes."""
        counts = np.zeros_like(self._always)
        counts[list(directions), stage] = 1.0
        slopes = np.zeros(len(theta))
        seconds = self._time(np.exp(theta), slopes, stretch=self._stretch(theta), counts=counts)
        return seconds, slopes

    def _time(
        self,
        scale: FloatArray,
        slopes: FloatArray,
        *,
        stretch: FloatArray,
        counts: FloatArray | None = None,
        order: OrderedActions | None = None,
    ) -> float:
        return pipeline_time(
            scale,
            self._compute,
            self._beside,
            self._members,
            stretch,
            self._placement,
            self._sends,
            self._is_blocking,
            self._is_own,
            self._always if counts is None else counts,
            _NO_ORDER if order is None else order.orders,
            _NO_ORDER if order is None else order.offsets,
            0 if order is None else order.num_microbatches,
            slopes,
        )


def _sends(plan: Plan, placement: IntArray, links: tuple[float, float, float]) -> FloatArray:
    """Seconds of the transfer from each stage to the next: near, far, latency [3, S]."""
    near_s, far_s, latency_s = links
    nodes = np.array([slot.node for slot in plan.mapping.slots]).reshape(plan.layout.pipeline_parallel, -1)
    near, far, latency = (np.zeros(len(placement)) for _ in range(3))
    for stage in range(len(placement) - 1):
        sender, receiver = int(placement[stage]), int(placement[stage + 1])
        if sender == receiver:
            continue
        latency[stage] = latency_s
        if (nodes[sender] == nodes[receiver]).all():
            near[stage] = near_s
        else:
            far[stage] = far_s
    return np.stack([near, far, latency])


def _step_terms(
    plan: Plan, run: TrainingRun, placement: IntArray, machine_model: MachineModel, compute_s: FloatArray
) -> Mapping[Coefficient, float]:
    """Seconds once an iteration, by the factor that corrects them."""
    layout, constants = plan.layout, machine_model.constants
    ranks = layout.pipeline_parallel
    weights = weights_of_stages(run)
    held = [
        Weights(
            dense=sum(one.dense for one, rank in zip(weights, placement, strict=True) if rank == at),
            expert=sum(one.expert for one, rank in zip(weights, placement, strict=True) if rank == at),
        )
        for at in range(ranks)
    ]
    fullest = max(held, key=lambda one: one.total)
    nodes = np.array([slot.node for slot in plan.mapping.slots]).reshape(
        ranks, layout.data_parallel * layout.context_parallel, layout.tensor_parallel
    )
    is_far = bool((nodes != nodes[:, :1]).any())
    per_stage = compute_s.sum(axis=0)
    linked = replace(run, machines=machine_model.inter_node) if is_far else run
    gradients = communication.data_parallel(
        linked,
        constants,
        dense=fullest.dense,
        expert=fullest.expert,
        forward_s=float(per_stage[0].sum()) / ranks,
        backward_s=float(per_stage[1:].sum()) / ranks,
    )
    if placement[0] != placement[-1]:
        apart = bool((nodes[placement[0]] != nodes[placement[-1]]).any())
        gradients += communication.tied_ends_s(
            replace(run, machines=machine_model.inter_node) if apart else run, constants
        )
    found = {
        Coefficient.GRADIENTS: 0.0,
        Coefficient.OPTIMIZER: optimizer_s(run, constants, fullest),
        Coefficient.STEP: constants.step_s,
    }
    found[Coefficient.NETWORK if is_far else Coefficient.GRADIENTS] = gradients
    return found
