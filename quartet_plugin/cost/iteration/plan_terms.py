"""What a plan's iteration is made of: its run, its units, links, and terms of a step, by coefficient."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.cost.coefficients import CAUSES, INDEX, Coefficient, MachineModel
from quartet_plugin.cost.iteration.kernel import UNSLOWED
from quartet_plugin.cost.iteration.orders import (
    device_of_stages,
    stages_of_devices,
)
from quartet_plugin.cost.iteration.step import (
    busiest_rank,
    step_terms,
)
from quartet_plugin.cost.iteration.terms import UnitParts
from quartet_plugin.cost.run import (
    ON_CPU,
    Software,
    TrainingRun,
    UniformCluster,
    run_of,
    schedule_group,
    schedule_kind,
)
from quartet_plugin.cost.software import imbalance_of, with_features, with_settings
from quartet_plugin.cost.times import Times
from quartet_plugin.mapping.orders import slots_of
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.job_description import mean_layers
from quartet_plugin.model.layout import SettingValue
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.recompute_modules import modules_of

# The coefficient of each compute part of a layer, and of each collective's part.
PART_OF = {
    "gemm": Coefficient.PRODUCTS,
    "attention": Coefficient.ATTENTION,
    "elementwise": Coefficient.ELEMENTWISE,
    "launch": Coefficient.LAUNCH,
    "recompute": Coefficient.RECOMPUTE,
}
# Whether context and expert parallel groups are on several nodes.
type GroupsApart = tuple[bool, bool]
UNSLOWED_PARTS = ("tp_comm", "cp_comm", "ep_comm", "action")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitArrays:
    """`UnitParts` as arrays: `compute` [4, num_causes, 3], `unslowed` [4, 4, 3].

    The first axis has a dense layer, one with experts, the embedding and the head; the last the directions
    (forward, input gradient, weight gradient). `action` [3] are the seconds of a stage's actions.
    """

    parts: UnitParts
    compute: FloatArray
    unslowed: FloatArray
    action: FloatArray


def unit_arrays(parts: UnitParts) -> UnitArrays:
    """The seconds of the units of a stage as arrays [unit, cause, direction], in the order of INDEX."""
    compute, unslowed = np.zeros((4, len(CAUSES), 3)), np.zeros((4, len(UNSLOWED), 3))
    units = (parts.dense, parts.routed, parts.embedding, parts.head)
    ends = (None, None, Coefficient.EMBEDDING, Coefficient.HEAD)
    for unit, (named, end) in enumerate(zip(units, ends, strict=True)):
        for name, times in named.items():
            if name in UNSLOWED_PARTS:
                unslowed[unit, UNSLOWED_PARTS.index(name)] += times
            else:
                compute[unit, INDEX[end or PART_OF[name]]] += times
    action = np.array(parts.action.get("action", Times()))
    return UnitArrays(parts=parts, compute=compute, unslowed=unslowed, action=action)


def run_of_plan(plan: Plan, machine_model: MachineModel) -> TrainingRun:
    """The plan as a training run, every link inside a node."""
    settings = (*machine_model.settings, *(plan.layout.settings or ()))
    known = {setting.name: setting.value for setting in settings}
    shape, experts = mean_layers(plan.shape, machine_model.experts)
    # A hybrid model's mean layer has plain attention.
    latent = machine_model.latent if plan.shape.layer_kinds is None else None
    run = run_of(
        shape,
        plan.layout,
        global_batch_size=plan.made_for.global_batch_size,
        layers_per_stage=plan.split.transformer_layers_per_stage,
        cluster=machine_model.intra_node,
        schedule=schedule_kind(plan.schedule),
        group=schedule_group(plan.schedule),
        custom=plan.schedule.custom,
        precision=machine_model.precision,
        software=with_settings(
            with_features(ON_CPU if machine_model.on_cpu else Software(), machine_model.features), known
        ),
    )
    run = with_recompute(run, known)
    mtp_layers = plan.made_for.mtp_layers or 0
    if experts is None and latent is None and not mtp_layers:
        return replace(run, normalization=machine_model.normalization)
    return replace(
        run,
        experts=experts,
        latent=latent,
        normalization=machine_model.normalization,
        mtp_layers=mtp_layers,
        has_whole_experts=known.get("expert_tensor_parallel") == 1,
        imbalance=imbalance_of(machine_model.features),
    )


def with_recompute(run: TrainingRun, settings: Mapping[str, SettingValue]) -> TrainingRun:
    """The run with the settings of its recompute; an absent one is Megatron's."""
    if run.layout.recompute == "none":
        return run
    layers = int(settings.get("recompute_num_layers") or 1)
    is_block = settings.get("recompute_method") == "block"
    return replace(
        run,
        recomputed_layers=layers if is_block else None,
        recomputed_together=1 if is_block else layers,
        recomputed_modules=modules_of(str(settings.get("recompute_modules") or "core_attn")),
    )


def slowdown_indices(plan: Plan, machine_model: MachineModel) -> IntArray | None:
    """The coefficients' indices of the slots' slowdowns [pp, slots a rank]; None where no slot has one."""
    if (machine_model.slowdown_index_of_slot < 0).any():
        return None
    indices = machine_model.slowdown_index_of_slot[slot_numbers(plan, machine_model)]
    # Megatron numbers pipeline ranks slowest.
    return indices.reshape(plan.layout.pipeline_parallel, -1)


def slot_numbers(plan: Plan, machine_model: MachineModel) -> IntArray:
    """The number of each rank's slot among the machine's slots [world size]."""
    number = {slot: index for index, slot in enumerate(slots_of(machine_model.nodes))}
    return np.array([number[slot] for slot in plan.mapping.slots], dtype=np.int64)


def sends_of(plan: Plan, placement: IntArray, links: tuple[float, float, float]) -> FloatArray:
    """Seconds of the transfer from each stage to the next: intra-node, inter-node, latency [3, S]."""
    intra_node_s, inter_node_s, latency_s = links
    nodes = nodes_of(plan)
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


def step_terms_of(
    plan: Plan, run: TrainingRun, machine_model: MachineModel, work_s: FloatArray
) -> dict[Coefficient, dict[str, float]]:
    """Seconds once an iteration by cause, by the coefficient that multiplies them.

    `work_s` [3, num_stages] are the stages' seconds of a microbatch with every coefficient at 1.
    """
    constants = machine_model.constants
    busiest = list(stages_of_devices(run)[busiest_rank(run, work_s.sum(axis=0).tolist())])
    passes = work_s[:, busiest].sum(axis=1)
    nodes = nodes_of(plan)
    placement = device_of_stages(run)
    is_inter_node = are_copies_apart(nodes, tensor_parallel=plan.layout.tensor_parallel)
    ends_apart = bool((nodes[placement[0]] != nodes[placement[-1]]).any())

    def terms_on(cluster: UniformCluster) -> dict[str, float]:
        here = run if cluster is run.cluster else replace(run, cluster=cluster)
        forward_s, backward_s = float(passes[0]), float(passes[1:].sum())
        return step_terms(here, constants, forward_s=forward_s, backward_s=backward_s)

    intra_node = terms_on(machine_model.intra_node)
    inter_node = terms_on(machine_model.inter_node) if is_inter_node or ends_apart else intra_node
    gradients = {
        name: (inter_node if is_inter_node else intra_node)[name] for name in ("fsdp_comm_s", "dp_comm_s")
    }
    if "ends_comm_s" in intra_node:
        gradients["ends_comm_s"] = (inter_node if ends_apart else intra_node)["ends_comm_s"]
    return {
        Coefficient.NETWORK if is_inter_node else Coefficient.GRADIENTS: gradients,
        Coefficient.OPTIMIZER: {"optimizer_s": intra_node["optimizer_s"]},
        Coefficient.STEP: {"step_overhead_s": intra_node["step_overhead_s"]},
    }


def nodes_of(plan: Plan) -> IntArray:
    """The node of each rank [pp, copies * tp]: Megatron numbers pipeline ranks slowest."""
    nodes = np.array([slot.node for slot in plan.mapping.slots], dtype=np.int64)
    return nodes.reshape(plan.layout.pipeline_parallel, -1)


def group_sizes(run: TrainingRun) -> tuple[int, int]:
    """The neighbouring data- and context-parallel ranks that a context and an expert parallel group has.

    Ranks of whole experts lie beside each other, tensor-parallel ones among them.
    """
    layout = run.layout
    experts = max(1, layout.expert_parallel * run.expert_shards // layout.tensor_parallel)
    return layout.context_parallel, experts


def groups_apart(nodes: IntArray, sizes: tuple[int, int], *, tensor_parallel: int) -> GroupsApart:
    """Whether a context and an expert parallel group, of `group_sizes`, is on several nodes.

    `nodes` [pp, copies * tp] are the ranks'.
    """
    context, experts = (bool(are_apart(nodes[None], size, tensor_parallel=tensor_parallel)) for size in sizes)
    return context, experts


def are_copies_apart(nodes: IntArray, *, tensor_parallel: int) -> bool:
    """Whether the copies of a stage are on several nodes; `nodes` [pp, copies * tp] are the ranks'."""
    num_copies = nodes.shape[-1] // tensor_parallel
    return bool(are_apart(nodes[None], num_copies, tensor_parallel=tensor_parallel))


def are_apart(nodes: IntArray, size: int, *, tensor_parallel: int) -> NDArray[np.bool_]:
    """Of orders' nodes [num, pp, copies * tp], whether a group of `size` is on several nodes [num]."""
    groups = nodes.reshape(len(nodes), -1, size, tensor_parallel)
    apart: NDArray[np.bool_] = (groups != groups[:, :, :1]).any(axis=(1, 2, 3))
    return apart
