"""What a plan's iteration is made of: its run, its units, links, and terms of a step, by coefficient."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

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
    fullest_rank,
    step_terms,
)
from quartet_plugin.cost.iteration.terms import UnitParts
from quartet_plugin.cost.layer_kinds import priced_layers
from quartet_plugin.cost.memory import weights_of_stages
from quartet_plugin.cost.run import (
    ON_CPU,
    Software,
    TrainingRun,
    UniformCluster,
    mtp_depth_of,
    run_of,
    schedule_group,
    schedule_kind,
    with_layers,
)
from quartet_plugin.cost.software import (
    imbalance_of,
    precision_of_products,
    with_features,
    with_settings,
)
from quartet_plugin.cost.times import Times
from quartet_plugin.mapping.orders import slot_indices
from quartet_plugin.mapping.topology import expert_blocks
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.layout import Setting, SettingValue
from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.model.recompute_modules import modules_of
from quartet_plugin.model.training_job import TrainingJob

# The coefficient of each compute part of a layer, and of each collective's part.
PART_OF = {
    "gemm": Coefficient.PRODUCTS,
    "attention": Coefficient.ATTENTION,
    "elementwise": Coefficient.ELEMENTWISE,
    "launch": Coefficient.LAUNCH,
    "recompute": Coefficient.RECOMPUTE,
    # Copies to and from the host are bound by memory, too.
    "offload": Coefficient.ELEMENTWISE,
}
UNSLOWED_PARTS = ("tp_comm", "cp_comm", "ep_comm", "action")


class RankGroups(NamedTuple):
    """The groups of tensor and context parallelism, and of ranks that exchange experts' tokens, or heads.

    `heads` is None where no rings join ranks that exchange heads.
    """

    # (size, stride) of each kind of group: its ranks, and the distance of neighbours in Megatron's order.
    tensor: tuple[int, int]
    context: tuple[int, int]
    experts: tuple[int, int]
    heads: tuple[int, int] | None = None

    @property
    def present(self) -> tuple[tuple[int, int], ...]:
        """The groups of the kinds that there are."""
        return tuple(group for group in self if group is not None)


class GroupsApart(NamedTuple):
    """Whether the groups of each kind of `RankGroups` span several domains; `heads` is None without them."""

    tensor: bool = False
    context: bool = False
    experts: bool = False
    heads: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitArrays:
    """`UnitParts` as arrays: `compute` [num_kinds + 2, num_causes, 3], `unslowed` [num_kinds + 2, 4, 3].

    The first axis has a layer of each kind, the embedding and the head; the last the directions
    (forward, input gradient, weight gradient). `action` [3] are the seconds of a stage's actions.
    `further_compute` [num_causes, 3] and `further_unslowed` [4, 3] are those of multi-token prediction on the
    stage before the last one.
    """

    parts: UnitParts
    compute: FloatArray
    unslowed: FloatArray
    action: FloatArray
    further_compute: FloatArray
    further_unslowed: FloatArray


def unit_arrays(parts: UnitParts) -> UnitArrays:
    """The seconds of the units of a stage as arrays [unit, cause, direction], in the order of INDEX."""
    units = (*parts.layers, parts.embedding, parts.head, parts.further)
    ends = (*(None for _ in parts.layers), Coefficient.EMBEDDING, Coefficient.HEAD, None)
    compute, unslowed = np.zeros((len(units), len(CAUSES), 3)), np.zeros((len(units), len(UNSLOWED), 3))
    for unit, (named, end) in enumerate(zip(units, ends, strict=True)):
        for name, times in named.items():
            if name in UNSLOWED_PARTS:
                unslowed[unit, UNSLOWED_PARTS.index(name)] += times
            else:
                compute[unit, INDEX[end or PART_OF[name]]] += times
    action = np.array(parts.action.get("action", Times()))
    return UnitArrays(
        parts=parts,
        compute=compute[:-1],
        unslowed=unslowed[:-1],
        action=action,
        further_compute=compute[-1],
        further_unslowed=unslowed[-1],
    )


def run_of_plan(plan: Plan, machine_model: MachineModel) -> TrainingRun:
    """The plan as a training run, every link inside a node."""
    return run_of_job(
        plan,
        machine_model,
        split=plan.split,
        global_batch_size=plan.made_for.global_batch_size,
        mtp_layers=plan.made_for.mtp_layers or 0,
        on_cpu=machine_model.on_cpu,
        cluster=machine_model.intra_node,
    )


def run_of_job(
    source: Plan | TrainingJob,
    job: MachineModel | TrainingJob,
    *,
    split: Split,
    global_batch_size: int,
    mtp_layers: int,
    on_cpu: bool,
    cluster: UniformCluster,
) -> TrainingRun:
    """The run of a job on `cluster`, with the shape, layout and schedule of `source`: a plan, or its own.

    What no plan changes is that of `job`: precision, features, experts, attention, norms and packed
    documents, and the settings that the layout of `source` does not have.
    """
    settings = (*(job.settings or ()), *(source.layout.settings or ()))
    known = {setting.name: setting.value for setting in settings}
    software = _software(on_cpu, job.features, settings)
    layers = priced_layers(source.shape, job.experts, job.latent)
    run = run_of(
        layers.shape,
        source.layout,
        global_batch_size=global_batch_size,
        layers_per_stage=split.transformer_layers_per_stage,
        cluster=cluster,
        schedule=schedule_kind(source.schedule),
        group=schedule_group(source.schedule),
        custom=source.schedule.custom,
        precision=job.precision,
        software=software,
    )
    run = replace(
        with_recompute(run, known),
        matmul=precision_of_products(job.features, cluster.device, precision=job.precision),
        normalization=job.normalization,
        packed=job.packed,
    )
    run = with_layers(run, layers)
    if layers.experts is None and layers.latent is None and not mtp_layers:
        return run
    return replace(
        run,
        mtp_layers=mtp_layers,
        mtp_depth=mtp_depth_of(source.shape, job.experts, job.latent, job.mtp_kinds) if mtp_layers else None,
        is_mtp_before_last=bool(split.mtp_before_last),
        has_whole_experts=known.get("expert_tensor_parallel") == 1,
        imbalance=imbalance_of(job.features),
    )


@lru_cache(maxsize=512)
def _software(on_cpu: bool, features: tuple[str, ...], settings: tuple[Setting, ...]) -> Software:
    known = {setting.name: setting.value for setting in settings}
    return with_settings(with_features(ON_CPU if on_cpu else Software(), features), known)


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
    indices = machine_model.slowdown_index_of_slot[slot_indices(machine_model.nodes, plan.mapping)]
    # Megatron numbers pipeline ranks slowest.
    return indices.reshape(plan.layout.pipeline_parallel, -1)


def sends_of(
    plan: Plan,
    run: TrainingRun,
    placement: IntArray,
    links: tuple[float, float, float],
    machine_model: MachineModel,
) -> FloatArray:
    """Seconds of the transfer from each stage to the next: intra-node, inter-node, latency [3, S]."""
    intra_node_s, inter_node_s, latency_s = links
    domains = domains_of(plan, machine_model)
    by_crossing = np.array([[0.0, intra_node_s, 0.0], [0.0, 0.0, inter_node_s], [0.0, latency_s, latency_s]])
    sends: FloatArray = by_crossing[:, crossings_of(domains, placement)]
    if run.is_mtp_before_last:
        sends[:2, -2] *= run.num_sent_tensors(len(placement) - 2)
    return sends


def crossings_of(domains: IntArray, placement: IntArray) -> IntArray:
    """The level of each stage's transfer to the next [S]: 0 none, 1 inside domains, 2 between domains.

    `domains` [pp, copies * tp] are the ranks'.
    """
    sender, receiver = placement[:-1], placement[1:]
    crossings = np.zeros(len(placement), dtype=np.int64)
    crossings[:-1] = np.where((domains[sender] == domains[receiver]).all(axis=1), 1, 2)
    crossings[:-1][sender == receiver] = 0
    return crossings


def stage_seconds(run: TrainingRun, units: UnitArrays) -> tuple[FloatArray, FloatArray]:
    """The seconds of each stage: by cause [num_causes, 3, S], and by what no slowdown touches [4, 3, S]."""
    # The units of each stage: layers of each kind, the embedding, the head.
    held = np.zeros((len(units.compute), len(run.layers_per_stage)))
    held[:-2] = np.array(run.layer_counts, dtype=np.float64).T
    held[-2, 0] = held[-1, -1] = 1.0
    compute = np.einsum("ucd,us->cds", units.compute, held)
    unslowed = np.einsum("urd,us->rds", units.unslowed, held)
    if run.is_mtp_before_last:
        compute[:, :, -2] += units.further_compute
        unslowed[:, :, -2] += units.further_unslowed
    unslowed[-1] += units.action[:, None]
    return compute, unslowed


def step_seconds(terms: Mapping[Coefficient, Mapping[str, float]], machine_model: MachineModel) -> FloatArray:
    """Seconds once an iteration under coefficients of 1 [num_coefficients], from the terms of a step."""
    seconds = np.zeros(machine_model.num_coefficients)
    for coefficient, by_cause in terms.items():
        seconds[INDEX[coefficient]] += sum(by_cause.values())
    return seconds


def step_terms_of(
    plan: Plan, run: TrainingRun, machine_model: MachineModel, work_s: FloatArray
) -> dict[Coefficient, dict[str, float]]:
    """Seconds once an iteration by cause, by the coefficient that multiplies them.

    `work_s` [3, num_stages] are the stages' seconds of a microbatch with every coefficient at 1.
    """
    constants = machine_model.constants
    busiest = list(stages_of_devices(run)[busiest_rank(run, work_s.sum(axis=0).tolist())])
    passes = work_s[:, busiest].sum(axis=1)
    domains = domains_of(plan, machine_model)
    placement = device_of_stages(run)
    is_inter_node = are_copies_apart(domains, tensor_parallel=plan.layout.tensor_parallel)
    ends_apart = bool((domains[placement[0]] != domains[placement[run.embedding_stage]]).any())

    forward_s, backward_s = float(passes[0]), float(passes[1:].sum())
    weights = weights_of_stages(run)
    fullest = fullest_rank(run, weights)

    def terms_on(cluster: UniformCluster) -> dict[str, float]:
        return step_terms(
            run if cluster is run.cluster else replace(run, cluster=cluster),
            constants,
            forward_s=forward_s,
            backward_s=backward_s,
            weights=weights,
            fullest=fullest,
        )

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


def domains_of(plan: Plan, machine_model: MachineModel) -> IntArray:
    """The domain of each rank [pp, copies * tp], as `MachineModel.domain_of_slot` numbers them.

    Megatron numbers pipeline ranks slowest.
    """
    by_rank = machine_model.domain_of_slot[slot_indices(machine_model.nodes, plan.mapping)]
    return by_rank.reshape(plan.layout.pipeline_parallel, -1)


def groups_of(run: TrainingRun) -> RankGroups:
    """The groups of tensor parallelism, of context parallelism, and of ranks that exchange experts' tokens.

    Ranks of whole experts lie beside each other, tensor-parallel ones among them, and so do those that gather
    all tokens.
    """
    tensor, context = run.layout.tensor_parallel, run.layout.context_parallel
    blocks = expert_blocks(run.layout, has_whole_experts=run.has_whole_experts)
    are_beside = run.has_whole_experts or run.software.gathers_tokens
    experts = (blocks * tensor, 1) if are_beside else (blocks, tensor)
    heads = None if run.exchanging_ranks in (1, context) else (run.exchanging_ranks, tensor)
    return RankGroups(tensor=(tensor, 1), context=(context, tensor), experts=experts, heads=heads)


def groups_apart(domains: IntArray, groups: RankGroups) -> GroupsApart:
    """Whether one of the groups of each kind is in several domains.

    `domains` [pp, copies * tp] are the ranks'.
    """

    def is_apart(group: tuple[int, int]) -> bool:
        return bool(are_apart(domains[None], *group))

    return GroupsApart(
        tensor=is_apart(groups.tensor),
        context=is_apart(groups.context),
        experts=is_apart(groups.experts),
        heads=None if groups.heads is None else is_apart(groups.heads),
    )


def are_copies_apart(domains: IntArray, *, tensor_parallel: int) -> bool:
    """Whether the copies of a stage are in several domains; `domains` [pp, copies * tp] are the ranks'."""
    num_copies = domains.shape[-1] // tensor_parallel
    return bool(are_apart(domains[None], num_copies, tensor_parallel))


def are_apart(domains: IntArray, size: int, stride: int) -> NDArray[np.bool_]:
    """Whether a group of `size` ranks, `stride` apart, spans several domains [num_orders].

    `domains` is [num_orders, pp, copies * tp].
    """
    groups = domains.reshape(len(domains), -1, size, stride)
    apart: NDArray[np.bool_] = (groups != groups[:, :, :1]).any(axis=(1, 2, 3))
    return apart
