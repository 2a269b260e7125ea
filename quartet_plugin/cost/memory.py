"""The peak memory of the fullest device: weights, gradients, optimizer, activations, buffers.

Activation bytes follow Korthikanti et al. (2022), with grouped queries, gated FFNs, fused attention, experts
and latent attention added; without fused kernels more is saved (`plain_operations`). The schedule determines
how many microbatches are held. Sizes are bytes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress

import numpy as np

from quartet_plugin.cost import (
    activation_offload,
    compute,
    held_bytes,
    layer_partition,
    plain_operations,
    state_space,
)
from quartet_plugin.cost.iteration.orders import activation_peak, stages_of_devices
from quartet_plugin.cost.plain_operations import SINGLE
from quartet_plugin.cost.run import HalfPrecision, Software, TrainingRun
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.job_description import Experts

# Bytes of a half-precision weight or activation.
HALF = 2.0
# Bytes of a master weight and two moments in fp32.
OPTIMIZER_BYTES = 12.0
# Bytes of the driver, its contexts and the collective library, beside the allocator.
CONTEXT_BYTES = 1.5 * 2**30
# Bytes of a training process on the CPU beside its tensors: libraries, the interpreter, the framework.
PROCESS_BYTES = 0.8 * 2**30
# What a process of a custom schedule holds beside these: the generator of schedules and its compiler.
RUNTIME_BYTES = 0.14 * 2**30
# The share of a data sheet's memory that programs can allocate.
USABLE = 0.985
# Holes that caching allocators before expandable segments leave between activations.
FRAGMENTATION = 1.08
# Megatron-FSDP's communication unit, at least (suggested_communication_unit_size in megatron_fsdp.py), in
# weights: two layers or this, whichever is more. It queues the gradients of one unit for their
# reduce-scatter, and prefetches the weights of half a unit.
LEAST_UNIT_WEIGHTS = 1e9
# The terms of `Memory`, in the order of its sum.
TERMS = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "temporary_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Parameters of one stage on one rank: those all data-parallel ranks share, and the experts'."""

    num_dense: float
    num_expert: float

    @classmethod
    def total_of(cls, stages: Iterable["Weights"]) -> "Weights":
        """The parameters of several stages on one rank."""
        held = list(stages)
        return cls(num_dense=sum(w.num_dense for w in held), num_expert=sum(w.num_expert for w in held))

    @property
    def num_total(self) -> float:
        """Dense and expert parameters together."""
        return self.num_dense + self.num_expert


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes at the peak of the fullest pipeline device, by what holds them; `fits` compares the sum."""

    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    temporary_bytes: float
    device: int
    capacity_bytes: float

    @property
    def total_bytes(self) -> float:
        """Bytes that the allocator holds at the peak."""
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.temporary_bytes
        )

    @property
    def available_bytes(self) -> float:
        """Bytes that the device has for the allocator, beside its driver's context."""
        return available_bytes(self.capacity_bytes)

    @property
    def fits(self) -> bool:
        """Whether the device can hold the peak."""
        return self.total_bytes <= self.available_bytes

    @property
    def terms(self) -> dict[str, float]:
        """The bytes by what holds them; the values sum to `total_bytes`."""
        return {name: getattr(self, name) for name in TERMS}


def distinct_numbers(first: float, second: float, *, digits: int) -> tuple[str, str]:
    """Two numbers with `digits` decimals, with more where different numbers would look the same."""
    texts = f"{first:.{digits}f}", f"{second:.{digits}f}"
    while texts[0] == texts[1] and first != second and digits < 9:
        digits += 1
        texts = f"{first:.{digits}f}", f"{second:.{digits}f}"
    return texts


def available_bytes(capacity_bytes: float, *, context_bytes: float = CONTEXT_BYTES) -> float:
    """Bytes that a device of `capacity_bytes` has for the allocator, beside a context of `context_bytes`."""
    return capacity_bytes * USABLE - context_bytes


def capacity_bytes_of(available_bytes: float) -> float:
    """The inverse of `available_bytes`: bytes of a device that has `available_bytes` for the allocator."""
    return (available_bytes + CONTEXT_BYTES) / USABLE


def layer_weights(run: TrainingRun, *, experts: Experts | None) -> Weights:
    """The parameters of one rank in a layer with a dense FFN, or with `experts`."""
    shape, layout = run.shape, run.layout
    tp, h = layout.tensor_parallel, shape.hidden_size
    width = 3 if shape.gated_ffn else 2
    common = sum(n * k for n, k in compute.products(run)) + 2 * run.num_sublayers * h
    if not run.has_ffn:
        return Weights(num_dense=common, num_expert=0.0)
    if experts is None:
        return Weights(num_dense=common + width * h * shape.ffn_hidden_size / tp, num_expert=0.0)
    shared = common + width * h * experts.shared_ffn_hidden_size / tp + experts.num_experts * h
    routed = width * h * experts.ffn_hidden_size / run.expert_shards * experts.num_experts
    return Weights(num_dense=shared, num_expert=routed / layout.expert_parallel)


def weights_of_stages(run: TrainingRun) -> list[Weights]:
    """The parameters of each stage on one rank, tensor and expert parallel shards taken."""
    shape, tp, h = run.shape, run.layout.tensor_parallel, run.shape.hidden_size
    layers = [layer_weights(kind_run, experts=experts) for kind_run, experts in run.runs_by_kind]
    depth = [(num, layer_weights(of_kind, experts=experts)) for of_kind, experts, num in run.further_layers]
    positions = shape.max_position_embeddings * (shape.position_embedding == "learned_absolute")
    vocabulary = shape.vocab_size * h / tp
    last = len(run.layers_per_stage) - 1
    mtp_stage = last - run.is_mtp_before_last

    def weights_of(stage: int, counts: tuple[int, ...]) -> Weights:
        held = list(zip(counts, layers, strict=True))
        total = sum(count * layer.num_dense for count, layer in held)
        if stage == 0:
            total += vocabulary + h * positions
        if stage == last and not (stage == 0 and shape.tied_embeddings):
            total += vocabulary
        mtp = run.mtp_layers if stage == mtp_stage else 0
        if mtp and stage > 0 and not (stage == last and shape.tied_embeddings):
            # A second copy of the embedding, of the further tokens.
            total += vocabulary
        total += mtp * (2.0 * h * h / tp + sum(count * layer.num_dense for count, layer in depth))
        routed = sum(count * layer.num_expert for count, layer in held)
        routed += mtp * sum(count * layer.num_expert for count, layer in depth)
        return Weights(num_dense=total, num_expert=routed)

    inner: dict[tuple[int, ...], Weights] = {}
    stages: list[Weights] = []
    for stage, counts in enumerate(run.layer_counts):
        if stage in (0, mtp_stage, last):
            stages.append(weights_of(stage, counts))
            continue
        if counts not in inner:
            inner[counts] = weights_of(stage, counts)
        stages.append(inner[counts])
    return stages


def layer_activation_bytes(run: TrainingRun, *, experts: Experts | None) -> float:
    """Bytes that one layer keeps of one microbatch from forward to backward, without recompute."""
    t, h, split = run.tokens_per_microbatch, run.shape.hidden_size, run.sequence_shards
    masks = 1.0 if run.software.has_dropout else 0.0
    # Norms, and their outputs to the products (gathered again from their shard).
    size = float(run.element_bytes)
    outside = run.num_sublayers * (_norm_bytes(run) + (size + masks) * h) / split
    inner = _attention_bytes(run) if run.has_attention else 0.0
    return t * (outside + inner) + _ffn_module_bytes(run, experts=experts)


def peak_memory(run: TrainingRun) -> Memory:
    """The fullest device's memory at the peak of a step."""
    return max(memory_by_device(run), key=lambda memory: memory.total_bytes)


def memory_by_device(run: TrainingRun) -> list[Memory]:
    """Each pipeline device's memory at its peak in a step."""
    last = len(run.layers_per_stage) - 1
    weights = weights_of_stages(run)
    stage_bytes, held = stage_activations(run)
    peaks = activation_peak(run, stage_bytes, held)
    if run.software.expert_overlap and run.num_microbatches > 1 and not run.is_custom:
        # The framework runs one forward more before the first backward (pipeline_parallel/schedules.py).
        peaks = peaks + [max(stage_bytes[stage] for stage in held_by) for held_by in stages_of_devices(run)]
    states: dict[tuple[float, float], tuple[float, float, float]] = {}
    temporary: dict[tuple[bool, bool], float] = {}
    fragmented = FRAGMENTATION if run.software.is_fragmenting else 1.0
    devices = []
    for device, stages in enumerate(stages_of_devices(run)):
        held_weights = Weights.total_of(weights[k] for k in stages)
        share = (held_weights.num_dense, held_weights.num_expert)
        if share not in states:
            states[share] = _states(run, *share)
        has_embedding = 0 in stages or (run.is_mtp_before_last and last - 1 in stages)
        ends = (has_embedding, last in stages)
        if ends not in temporary:
            temporary[ends] = _temporary(run, has_embedding=ends[0], is_last=ends[1])
        parameters, gradients, optimizer = states[share]
        activations = float(peaks[device]) * fragmented
        copied = max(_copied_bytes(run, weights[k]) for k in stages)
        # Activations are gone where gradients are reduced.
        buffers = max(temporary[ends], copied - activations) + _queued_gradient_bytes(
            run, held_weights, activations
        )
        at_start = _start_bytes(run, held_weights) - parameters - gradients - optimizer - activations
        devices.append(
            Memory(
                parameters_bytes=parameters,
                gradients_bytes=gradients,
                optimizer_bytes=optimizer,
                activations_bytes=activations,
                temporary_bytes=max(buffers, at_start),
                device=device,
                capacity_bytes=float(run.cluster.memory_bytes),
            )
        )
    return devices


def bytes_per_weight(precision: HalfPrecision, software: Software) -> tuple[float, float, float]:
    """Bytes of a weight, of its summed gradient, and of its optimizer state, all unsharded.

    An fp32 weight is its own master weight: the optimizer keeps its moments alone. The part that is on the
    host keeps nothing of the device's.
    """
    gradient = float(software.main_gradient_bytes)
    kept = 1.0 - software.optimizer_on_host
    if precision == "fp32":
        return SINGLE, gradient, kept * (software.optimizer_bytes - SINGLE)
    return HALF, gradient, kept * software.optimizer_bytes


def _states(run: TrainingRun, dense: float, expert: float) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer state; sharded by the ZeRO stage."""
    weight, gradient, optimizer = bytes_per_weight(run.half, run.software)
    ranks, expert_ranks = run.optimizer_shards
    shard, whole = dense / ranks + expert / expert_ranks, dense + expert
    if run.software.shards_parameters:
        gathered = run.end_parameters + _gathered_weights(run, whole)
        return weight * (shard + gathered), gradient * shard, optimizer * shard
    if run.zero_stage == 3:
        # One layer's gathered weights, and the next one's that is prefetched. The fp32 shard is the master.
        layer = 2 * weight * whole * run.layout.pipeline_parallel / max(1, run.shape.num_layers)
        return layer, SINGLE * shard, OPTIMIZER_BYTES * shard
    return weight * whole, gradient * (shard if run.zero_stage == 2 else whole), optimizer * shard


def _weights_per_layer(run: TrainingRun, parameters: float) -> float:
    """The weights of the mean layer of a rank that holds `parameters`, embedding and head among them."""
    return (parameters - run.end_parameters) / max(1, run.shape.num_layers)


def _gathered_weights(run: TrainingRun, parameters: float) -> float:
    """The weights of the whole layers that Megatron-FSDP holds at once: the current and the prefetched ones.

    Layers are prefetched until they have half of `LEAST_UNIT_WEIGHTS`, and at least one.
    """
    layer = _weights_per_layer(run, parameters)
    if not layer:
        return 0.0
    num_ahead = math.ceil(max(LEAST_UNIT_WEIGHTS / 2, layer) / layer)
    return layer * min(run.shape.num_layers, 1 + num_ahead)


def _queued_gradient_bytes(run: TrainingRun, held: Weights, activations: float) -> float:
    """Bytes of gradients queued for their reduce-scatter that do not fit in the room of freed activations.

    The backward has freed the same share of `activations` (bytes) as the share of weights whose gradients are
    queued.
    """
    if not run.software.shards_parameters:
        return 0.0
    layer = _weights_per_layer(run, held.num_total)
    num_queued = min(held.num_total, max(LEAST_UNIT_WEIGHTS, 2 * layer) + layer)
    freed = num_queued / held.num_total
    return max(0.0, run.software.main_gradient_bytes * num_queued - freed * activations)


def _start_bytes(run: TrainingRun, held: Weights) -> float:
    """Bytes of a rank while Megatron-FSDP takes over weights that the rank has built whole; 0 without it.

    They count those weights, and the shards of weights in two precisions and of gradients, but no moments.
    """
    if not (run.software.shards_parameters and run.software.builds_whole):
        return 0.0
    weight, gradient, _ = bytes_per_weight(run.half, run.software)
    ranks, expert_ranks = run.optimizer_shards
    shard = held.num_dense / ranks + held.num_expert / expert_ranks
    return weight * held.num_total + (weight + gradient + SINGLE) * shard


def stage_activations(run: TrainingRun) -> tuple[FloatArray, FloatArray]:
    """Bytes each stage keeps of a microbatch, before and after its input gradient."""
    split = run.sequence_shards
    boundary = run.element_bytes * run.tokens_per_microbatch * run.shape.hidden_size / split
    kinds = run.runs_by_kind
    kept = [_layer_kept_bytes(kind_run, boundary, experts=experts) for kind_run, experts in kinds]
    waiting = [held_bytes.layer_bytes(kind_run, experts=experts) for kind_run, experts in kinds]
    further, further_held = kept[-1], waiting[-1]
    if run.mtp_depth is not None:
        further, further_held = _bytes_of_depth(run, boundary)
    stages, held = [], []
    boundaries = 2 if run.software.keeps_stage_outputs else 1
    num_repeated = [_num_repeated(run, count) for count in run.layers_per_stage]
    wholes = _layers_behind(run, num_repeated)
    for counts, whole, repeated in zip(run.layer_counts, wholes, num_repeated, strict=True):
        layers = sum(num * each for num, each in zip(whole, kept, strict=True))
        inputs = math.ceil(repeated / run.recomputed_together)
        stages.append(layers + (inputs + boundaries) * boundary)
        held.append(sum(num * each for num, each in zip(counts, waiting, strict=True)))
    # The output of the last norm, which the head's weight gradient needs.
    norm_stage = -2 if run.is_mtp_before_last else -1
    stages[norm_stage] += boundary + run.mtp_layers * _further_token_bytes(run, boundary, layer=further)
    if run.is_mtp_before_last:
        # The states of all tokens arrive together, and a stage without any layer copies its input.
        stages[-1] += (1 + 2 * run.mtp_layers) * boundary
    if run.software.plain_operations:
        saved = run.tokens_per_microbatch * plain_operations.norm_bytes(run) / split
        # Of the last norm the input is counted as the stage's output.
        stages[norm_stage] += saved - boundary
        mask, attends = plain_operations.mask_bytes(run), [kind_run.has_attention for kind_run, _ in kinds]
        has_mask = [any(compress(counts, attends)) for counts in run.layer_counts]
        if run.mtp_depth is not None:
            has_mask[norm_stage] |= any(further.has_attention for further, _, _ in run.further_layers)
        stages = [num_bytes + mask * masked for num_bytes, masked in zip(stages, has_mask, strict=True)]
    head = held_bytes.head_product(run).total_bytes
    joined = held_bytes.joined_product(run).total_bytes
    if run.is_mtp_before_last:
        held[-1] += (1 + run.mtp_layers) * head
        held[-2] += run.mtp_layers * (further_held + joined)
    else:
        held[-1] += head + run.mtp_layers * (further_held + head + joined)
    # Full recompute takes full backwards.
    return np.array(stages), np.array(held) * (run.layout.recompute != "full")


def _layers_behind(run: TrainingRun, num_repeated: Sequence[int]) -> list[tuple[int, ...]]:
    """The layers of each kind on each stage that are not repeated: recompute begins with its first ones."""
    ends = list(accumulate(run.layers_per_stage))
    firsts = [
        end - count + repeated
        for end, count, repeated in zip(ends, run.layers_per_stage, num_repeated, strict=True)
    ]
    return run.layers_between(firsts, ends)


def _layer_kept_bytes(run: TrainingRun, boundary: float, *, experts: Experts | None) -> float:
    """Bytes that one layer keeps of one microbatch on the device where full recompute repeats it not."""
    kept = layer_activation_bytes(run, experts=experts)
    if run.layout.recompute == "selective":
        kept = _kept_bytes(run, kept, boundary, experts=experts)
    # A static input of the layer's graph, whatever its kernels read (`get_layer_static_inputs`).
    mask = plain_operations.mask_bytes(run) if run.has_graph_masks else 0.0
    return kept + mask - activation_offload.layer_bytes(run, experts=experts).freed_bytes


def _bytes_of_depth(run: TrainingRun, boundary: float) -> tuple[float, float]:
    """Bytes that the layers of a hybrid model's depth of multi-token prediction keep of a microbatch.

    Before and after their input gradients, as `stage_activations` has them.
    """
    kept = waiting = 0.0
    for further, experts, count in run.further_layers:
        kept += count * _layer_kept_bytes(further, boundary, experts=experts)
        waiting += count * held_bytes.layer_bytes(further, experts=experts)
    return kept, waiting


def _further_token_bytes(run: TrainingRun, boundary: float, *, layer: float) -> float:
    """Bytes that a layer of multi-token prediction keeps of a microbatch; `layer` are those of its layers.

    Beside that are the two joined states and its output, and what three norms keep; full recompute keeps the
    output, the two states and the layer's input. The block method repeats none of these layers
    (megatron/core/transformer/multi_token_prediction.py).
    """
    if run.layout.recompute == "full" and run.recomputed_layers is None:
        return 3.0 * boundary
    split = run.sequence_shards
    return layer + 3.0 * (boundary + run.tokens_per_microbatch * _norm_bytes(run) / split)


def _num_repeated(run: TrainingRun, num_layers: int) -> int:
    """The layers that full recompute repeats of a stage of `num_layers`."""
    if run.layout.recompute != "full":
        return 0
    return num_layers if run.recomputed_layers is None else min(num_layers, run.recomputed_layers)


def loss_bytes(run: TrainingRun) -> float:
    """Bytes that the losses keep of one microbatch from forward to backward: probabilities in fp32.

    Each layer of multi-token prediction has a loss beside the head's.
    """
    logits = run.tokens_per_microbatch * run.shape.vocab_size / run.layout.tensor_parallel
    return SINGLE * logits * (1 + run.mtp_layers)


def _kept_bytes(run: TrainingRun, layer: float, boundary: float, *, experts: Experts | None) -> float:
    """Bytes that selective recompute leaves of a layer's activations."""
    share = run.software.selective_fraction
    return (layer - _recomputed_bytes(run, experts=experts)) * (1 - share) + boundary * share


def _recomputed_bytes(run: TrainingRun, *, experts: Experts | None) -> float:
    """Bytes of one layer that the recompute of its modules makes again."""
    t, tp, size = run.tokens_per_microbatch, run.layout.tensor_parallel, float(run.element_bytes)
    again = attention_bytes_again(run) if run.recomputes("core_attn") else 0.0
    if run.recomputes("layernorm"):
        split = run.sequence_shards
        again += run.num_norm_modules(has_experts=experts is not None) * t * _norm_bytes(run) / split
    if run.recomputes("mla_up_proj") and run.latent is not None and run.has_attention:
        mla = run.latent
        wide = mla.qk_head_dim + mla.qk_pos_emb_head_dim
        again += t * size * run.shape.num_attention_heads / tp * (2 * wide + mla.v_head_dim)
    is_moe = run.recomputes("moe") and run.scan is None
    if is_moe or (experts is None and run.recomputes_mlp):
        return again + _ffn_module_bytes(run, experts=experts)
    if experts is not None and run.recomputes("moe_act"):
        results = 3.0 if run.shape.gated_ffn and run.software.plain_operations else 1.0
        results *= run.held_expert_load
        again += t * size * results * experts.experts_per_token * experts.ffn_hidden_size / tp
    if experts is not None and run.recomputes("shared_experts"):
        again += t * _ffn_bytes(run, experts.shared_ffn_hidden_size / tp)
    return again


def attention_bytes_again(run: TrainingRun) -> float:
    """Bytes of one layer that the recompute of attention's inner part makes again."""
    if not run.has_attention:
        return 0.0
    scores = _scores_bytes(run)
    if not run.software.plain_operations or run.latent is not None:
        return scores
    copied = plain_operations.attention_bytes(run) - plain_operations.attention_input_bytes(run)
    return scores + run.tokens_per_microbatch * copied


def _ffn_module_bytes(run: TrainingRun, *, experts: Experts | None) -> float:
    """Bytes that a layer's dense FFN keeps of one microbatch beside its input, or its `experts`."""
    tp = run.layout.tensor_parallel
    if not run.has_ffn:
        return 0.0
    if run.scan is not None:
        return state_space.saved_bytes(run)
    if experts is None:
        return run.tokens_per_microbatch * _ffn_bytes(run, run.shape.ffn_hidden_size / tp)
    shared = _ffn_bytes(run, experts.shared_ffn_hidden_size / tp)
    routed = experts.experts_per_token * run.held_expert_load * _routed_bytes(run, experts)
    return run.tokens_per_microbatch * (routed + shared + 8.0 * experts.num_experts)


def _routed_bytes(run: TrainingRun, experts: Experts) -> float:
    """Bytes that the experts of a layer keep of a token for each of those that it chooses."""
    tp, size = run.layout.tensor_parallel, float(run.element_bytes)
    # Devices that share an expert hold its tokens whole, each of them.
    arriving = size * run.shape.hidden_size * run.expert_shards / tp
    each = arriving + _ffn_bytes(run, experts.ffn_hidden_size / tp)
    if run.software.plain_operations:
        # The result is multiplied by the router's weight, and saved before and after.
        each += size * experts.ffn_hidden_size / tp
    return each


def _stashed_bytes(run: TrainingRun) -> float:
    """Bytes of the buffers of two layers between experts and their stash.

    Behind a forward its layer's are copied into pages, while those of the next backward are filled out of
    them, in the size of a rank's limit (megatron/core/transformer/moe/paged_stash.py).
    """
    experts = run.experts
    if experts is None or experts.capacity is None or run.stash_factor is None:
        return 0.0
    chosen = run.tokens_per_microbatch * experts.experts_per_token
    return 2.0 * chosen * (experts.capacity.rank_factor or 1.0) * _routed_bytes(run, experts)


def _scores_bytes(run: TrainingRun) -> float:
    """Bytes of softmax output, dropout mask and dropout output of unfused attention in one layer."""
    if run.software.attention != "unfused":
        return 0.0
    heads = run.shape.num_attention_heads / run.layout.tensor_parallel
    size = float(run.element_bytes)
    per_score = 2 * size + 1.0 if run.software.has_dropout else size
    return per_score * heads * run.tokens_per_microbatch * run.attended_length


def _attention_bytes(run: TrainingRun) -> float:
    """Bytes of a token's queries, keys, values and output on one rank, and of scores where materialized."""
    shape, tp, size = run.shape, run.layout.tensor_parallel, float(run.element_bytes)
    if run.latent is not None:
        mla, heads = run.latent, shape.num_attention_heads / tp
        wide = mla.qk_head_dim + mla.qk_pos_emb_head_dim
        inner = size * heads * (2 * wide + 2 * mla.v_head_dim)
        unfused = run.software.attention == "unfused"
        inner += _scores_bytes(run) / run.tokens_per_microbatch if unfused else 4 * heads
        if run.software.plain_operations:
            return inner + plain_operations.compressed_bytes(run, mla)
        return inner + size * (2 * (mla.q_lora_rank + mla.kv_lora_rank) + mla.qk_pos_emb_head_dim)
    d = shape.kv_channels
    heads, groups = shape.num_attention_heads / tp, max(1.0, shape.num_query_groups / tp)
    projected = size * (heads + 2 * groups) * d
    output = size * heads * d
    if run.software.plain_operations:
        return plain_operations.attention_bytes(run) + output + _scores_bytes(run) / run.tokens_per_microbatch
    if run.software.attention == "unfused":
        return projected + output + _scores_bytes(run) / run.tokens_per_microbatch
    rotated = size * (heads + groups) * d if shape.position_embedding == "rope" else 0.0
    return projected + rotated + output + 4 * heads


def _norm_bytes(run: TrainingRun) -> float:
    """Bytes of a token that one norm keeps: its input."""
    if run.software.plain_operations:
        return plain_operations.norm_bytes(run)
    return float(run.element_bytes * run.shape.hidden_size)


def _ffn_bytes(run: TrainingRun, ffn: float) -> float:
    """Bytes of a token's first product and its activation."""
    if run.shape.gated_ffn and run.software.plain_operations:
        return plain_operations.gated_bytes(run, ffn)
    return run.element_bytes * ffn * (3.0 if run.shape.gated_ffn else 2.0)


def _temporary(run: TrainingRun, *, has_embedding: bool, is_last: bool) -> float:
    """Bytes of buffers: weight gradients or placeholders, a layer's gradients, logits, buckets.

    With those of modules whose activations are never offloaded.
    """
    shape, tp, t = run.shape, run.layout.tensor_parallel, run.tokens_per_microbatch
    sizes = _product_sizes(run)
    width = max(kind_run.shape.ffn_hidden_size for kind_run, _ in run.runs_by_kind) / tp
    element = float(run.element_bytes)
    gradients = 0.0
    if run.software.gradient_placeholders:
        gradients = element * sum(n * k for n, k in sizes)
    if run.software.eager_gradients:
        # One full gradient at a time, until it is added to the sum; the largest is the vocabulary's.
        vocabulary = shape.embedding_parameters / tp if has_embedding or is_last else 0.0
        gradients = element * max(vocabulary, *(n * k for n, k in sizes))
    logits = 0.0
    if is_last:
        logits = loss_bytes(run) / SINGLE * run.software.logit_bytes
    backward = element * t * (2 * width * (2 if shape.gated_ffn else 1))
    scans = [state_space.backward_bytes(kind_run) for kind_run, _ in run.runs_by_kind if kind_run.scan]
    backward = max([backward, *scans])
    if run.layout.recompute == "full":
        backward += run.recomputed_together * max(
            layer_activation_bytes(kind_run, experts=experts) for kind_run, experts in run.runs_by_kind
        )
    elif run.recomputes("moe") and run.experts is not None:
        backward += _ffn_module_bytes(run, experts=run.experts)
    elif run.recomputes("mlp"):
        backward += _ffn_module_bytes(run, experts=None)
    backward += layer_partition.buffer_bytes(run)
    held = gradients + max(backward, logits) + run.software.bucket_bytes
    return held + _gathered_bytes(run) + _stashed_bytes(run) + activation_offload.unoffloaded_bytes(run)


def _copied_bytes(run: TrainingRun, weights: Weights) -> float:
    """Bytes of the copy of a stage's expert gradients, one buffer, that a sharded optimizer reduces."""
    if run.zero_stage != 1 or not run.software.copies_reductions:
        return 0.0
    return run.software.main_gradient_bytes * weights.num_expert


def _product_sizes(run: TrainingRun) -> list[tuple[float, float]]:
    """(out, in) sizes of a layer's products with a dense FFN; of a hybrid model each size once."""
    if not run.kinds:
        return [*compute.products(run), *(compute.dense_products(run) if run.has_ffn else [])]
    return list(dict.fromkeys(size for kind_run, _ in run.runs_by_kind for size in _product_sizes(kind_run)))


def _gathered_bytes(run: TrainingRun) -> float:
    """Bytes of the buffer that stays allocated for the tokens that experts' devices gather of each other."""
    if run.experts is None or not run.software.gathers_tokens or run.layout.expert_parallel == 1:
        return 0.0
    tokens = run.tokens_per_microbatch * run.expert_shards / run.layout.tensor_parallel
    return run.element_bytes * tokens * run.layout.expert_parallel * run.shape.hidden_size
