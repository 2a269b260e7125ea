"""A training run as the cost model takes it: shape, layout, precision, software and cluster.

Rows of published runs (`rows.resolve`), plans and measured runs all become a `TrainingRun`; it has no open
field.
"""

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from quartet_plugin.cost.devices import DeviceSpec
from quartet_plugin.cost.layer_kinds import (
    MLP,
    PricedKind,
    PricedLayers,
    Scan,
    Sublayers,
    layers_before,
    letters_of,
    priced_layers,
    sequence_of,
)
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.custom_schedule import CustomSchedule
from quartet_plugin.model.job_description import ExpertCapacity, Experts, LatentAttention, mean_layers
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.packed_lengths import PackedLengths
from quartet_plugin.model.plan import ScheduleChoice
from quartet_plugin.model.shape import LETTERS, LayerKinds, ModelShape
from quartet_plugin.schedule.named import NAMED, NamedSchedule, Offer, refusal_of

Attention = Literal["native-flash", "flash-2", "flash-1", "unfused"]
HalfPrecision = Literal["fp16", "bf16", "fp32"]


class Overlap(StrEnum):
    """The part of a collective that the framework runs beside compute."""

    NONE = "none"
    BACKWARD = "backward"
    FULL = "full"


class ContextComm(StrEnum):
    """The communication of ranks that share sequences, by Megatron's words."""

    P2P = "p2p"
    ALL_GATHER = "all_gather"
    A2A = "a2a"
    A2A_P2P = "a2a+p2p"


class ScheduleKind(StrEnum):
    """The pipeline schedules that a runtime for one copy of the model can run, by their registered names.

    `CUSTOM` is an order without a name, which the run's `custom` writes out or makes by parameters.
    """

    NONE = "none"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    GPIPE = "gpipe"
    BREADTH_FIRST = "breadth-first"
    ZB_H1 = "zb-h1"
    ZB_H2 = "zb-h2"
    ZB_INTERLEAVED = "zb-interleaved"
    ZB_V = "zb-v"
    V_HALF = "v-half"
    V_MIN = "v-min"
    DUALPIPE_V = "dualpipev"
    HANAYO = "hanayo"
    CUSTOM = "custom"

    @property
    def spec(self) -> NamedSchedule | None:
        """The schedule's row of the registry; None without a name."""
        return NAMED.get(self.value)

    @property
    def is_custom(self) -> bool:
        """Whether the plugin's runtime executes it, beside stock frameworks that may have it too."""
        return self is ScheduleKind.CUSTOM or (self.spec is not None and self.spec.offer is not Offer.STOCK)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are actions of their own, as in all orders without a name."""
        return self is ScheduleKind.CUSTOM or (self.spec is not None and self.spec.split_backward)


# The share of a port's nominal rate that exchanges of tokens reach where each device has a port: 46 of
# 50 GB/s. NCCL's maintainers state 46 to 48 (issues 290 and 321 of nccl-tests). DeepEP's README, without the
# node's own tokens, has 45 (dispatch) and 41 (combine) between two nodes, and 46 between four.
PORT_SHARE = 0.92
# Tokens of the fullest device of an expert group, over the mean, with balanced routing; and where routing is
# by chance, as thousands of tokens a device have it.
IMBALANCE, FORCED_IMBALANCE = 1.1, 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """The behaviour of a framework that costs time or memory."""

    name: str = "Megatron-Core"
    """The framework's name."""
    attention: Attention = "native-flash"
    """The kernel of attention."""
    fused_elementwise: bool = True
    """Whether norms, activations, rotations and residuals are fused kernels."""
    fused_loss: bool = False
    """Whether the loss is a fused kernel."""
    has_dropout: bool = False
    """Whether layers have dropout, whose masks they keep."""
    tensor_overlap: Overlap = Overlap.BACKWARD
    """The part of tensor and sequence parallel collectives that runs beside compute."""
    has_data_overlap: bool = True
    """Whether gradients are reduced, and parameters gathered, beside compute."""
    gradient_bytes: int = 4
    """Bytes of a gradient element on the wire."""
    main_gradient_bytes: int = 4
    """Bytes of a gradient element in memory."""
    parameter_bytes: int = 2
    """Bytes of an updated parameter on the wire."""
    logs_step_only: bool = False
    """Whether the measured time leaves out what is between steps."""
    blocking_transfers: bool = False
    """Whether interleaved schedules and GPipe, too, wait for their sends, as 1F1B always does."""
    selective_fraction: float = 0.0
    """The share of a layer's matrix products that selective recompute repeats."""
    post_validation: bool = False
    """Whether the optimizer's barrier is hidden (zero-bubble schedules)."""
    zero_broadcasts: bool = False
    """Whether updated shards come back as one broadcast a rank, not as one all-gather."""
    reduces_all: bool = False
    """Whether ZeRO-1 reduces all gradients on every rank, not only its shard."""
    is_graphed: bool = False
    """Whether kernels are replayed from graphs, so that starting them costs nothing."""
    has_early_stop: bool = False
    """Whether full recompute stops at the last tensor the backward needs, before the last product."""
    is_fragmenting: bool = False
    """Whether an old caching allocator leaves holes between activations, which cost memory."""
    offloads_optimizer: bool = False
    """Whether the host holds the optimizer's state, or a part of it, and steps that."""
    shards_parameters: bool = False
    """Whether Megatron-FSDP shards parameters and gradients, too, layer by layer."""
    builds_whole: bool = True
    """Whether every rank builds the model's weights before they are sharded."""
    optimizer_offload_fraction: float = 1.0
    """The part of the optimizer that the host has where it has some."""
    offloaded_modules: tuple[str, ...] = ()
    """The modules of a layer whose activations the host holds until the backward."""
    optimizer_bytes: float = 12.0
    """Bytes a parameter: master weight, moments and, where it is kept, an fp32 gradient."""
    bucket_bytes: float = 0.0
    """Bytes of communication buffers outside the gradients."""
    gather_overlap: bool = True
    """Whether updated parameters are gathered beside the forward, where data parallelism overlaps at all."""
    bucket_elements: float = 0.0
    """Elements of a gradient bucket; 0 is Megatron's size."""
    logit_bytes: float = 8.0
    """Bytes a logit at the loss: the half-precision ones, fp32 copies, their gradient.

    In fp32 all of these may be one tensor.
    """
    keeps_stage_outputs: bool = False
    """Whether a stage's output stays in memory until its backward."""
    fused_weight_gradient: bool = True
    """Whether the product itself adds weight gradients to their sum."""
    gradient_placeholders: bool = True
    """Whether a tensor of each weight's shape stands in place of its fused gradient."""
    splits_transfers: bool = False
    """Whether tensor-parallel ranks send a slice of a boundary tensor each."""
    collectives_per_layer: int = 1
    """The gathers of a layer's sharded parameters (stage 3)."""
    exchange_start_s: float = 0.0
    """Seconds until all ranks of an expert group have joined an exchange of tokens, for each exchange."""
    eager_gradients: bool = False
    """Whether each microbatch makes every weight's gradient anew and adds it, the vocabulary's too."""
    reduces_ends: bool = False
    """Whether the collectives of embedding and head count.

    They are those of tied embeddings' gradients between both ends of a pipeline, and those of tensor
    parallelism; elsewhere they are too short to matter.
    """
    keeps_gathered_inputs: bool = True
    """Whether inputs stay whole between input and weight gradient where sequences are split."""
    shares_memory: bool = False
    """Whether ranks of a node compute out of one memory, the slower the more of them compute."""
    expert_overlap: bool = False
    """Whether experts' all-to-all of one microbatch runs beside another's computation."""
    delayed_weight_gradients: bool = False
    """Whether that all-to-all waits for no weight gradients."""
    shared_expert_overlap: bool = False
    """Whether experts' all-to-all runs beside the products of the shared expert."""
    grouped_experts: bool = True
    """Whether the products of a device's experts are one call, not one expert after the other."""
    sends_once_a_domain: bool = False
    """Whether a dispatcher sends a token to another domain once, for all its experts there."""
    gathers_tokens: bool = False
    """Whether experts' devices gather all tokens of each other, and reduce their outputs back."""
    context_comm: ContextComm = ContextComm.P2P
    """How ranks that share sequences bring keys and values to each other's queries."""
    exchanging_ranks: int = 1
    """Ranks that exchange heads for sequence under `a2a+p2p`; rings join them."""
    graphed_share: float = 0.0
    """The share of a layer's kernels that are replayed from graphs of its parts."""
    graphed_attention: bool = False
    """Whether attention is among what is replayed from graphs of layers or their parts."""
    has_static_inputs: bool = False
    """Whether each graph of a layer has inputs of its own, as those that Transformer Engine makes."""
    gathers_narrow: bool = True
    """Whether sequence parallelism gathers the narrow operands of products in 8 or 4 bits."""
    copies_reductions: bool = False
    """Whether a reduce-scatter copies what it reduces, as gloo's does."""
    plain_operations: bool = False
    """Whether norms, rotations, activations and attention are PyTorch's operations one by one.

    Each of these operations saves its operands.
    """

    @property
    def optimizer_on_host(self) -> float:
        """The part of the optimizer that the host has."""
        return self.optimizer_offload_fraction if self.offloads_optimizer else 0.0


# Megatron-Core on processors: plain PyTorch operations in fp32, and collectives that stop the computation.
ON_CPU = Software(
    name="Megatron-Core on CPU",
    # Several collectives through sockets, and ranks on shared cores wait for each other's time slices.
    exchange_start_s=5e-3,
    attention="unfused",
    fused_elementwise=False,
    tensor_overlap=Overlap.NONE,
    has_data_overlap=False,
    parameter_bytes=4,
    fused_weight_gradient=False,
    gradient_placeholders=False,
    logit_bytes=4.0,
    eager_gradients=True,
    reduces_ends=True,
    keeps_gathered_inputs=False,
    shares_memory=True,
    copies_reductions=True,
    plain_operations=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformCluster:
    """Equal devices on equal links, all that the cost model needs of a cluster.

    Bandwidths are one device's in one direction. `mapping.Topology` has the slots one by one, and
    `cost.cluster` makes both of a cluster file.
    """

    device: DeviceSpec
    num_devices: int
    devices_per_node: int
    scale_up_devices: int
    """The devices of a scale-up domain."""
    scale_up_bytes_per_s: float
    scale_out_bytes_per_s: float
    memory_bytes: int
    """Bytes of memory of a device."""
    port_share: float | None = None
    """The share of a port's nominal rate that exchanges of tokens reach.

    None where it is that of all collectives: on links that were measured, and between processors.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpDepth:
    """A depth of multi-token prediction in a hybrid model: its kinds of layers, each with their number.

    Where its pattern is not known, it is one mean layer of the model.
    """

    layers: tuple[tuple[PricedKind, int], ...]
    latent: LatentAttention | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A run with nothing left open."""

    shape: ModelShape
    layout: Layout
    num_microbatches: int
    layers_per_stage: tuple[int, ...]
    half: HalfPrecision
    """The format of what is not in `matmul`; fp32 where a run uses no half precision at all."""
    matmul: Literal["fp16", "bf16", "fp32", "fp8", "fp4"]
    """The format of the layers' matrix products."""
    zero_stage: int
    """The stage of ZeRO, 0 to 3."""
    shard_group: int
    """The data-parallel ranks that share parameters (stage 3)."""
    optimizer_group: int
    """The data-parallel ranks that share optimizer states (stages 1 and 2)."""
    schedule: ScheduleKind
    cluster: UniformCluster
    software: Software = field(default_factory=Software)
    experts: Experts | None = None
    """The model's experts; None where it has none."""
    latent: LatentAttention | None = None
    """The model's latent attention; None where it has none."""
    group: int | None = None
    """Microbatches a chunk before the next chunk in interleaved schedules; None for one a pipeline rank."""
    custom: CustomSchedule | None = None
    """The order that a plan carries for the plugin's runtime; None for a framework's."""
    mtp_layers: int = 0
    """The layers of multi-token prediction."""
    mtp_depth: MtpDepth | None = None
    """What each of these is in a hybrid model; None where it is a layer as the last one is."""
    is_mtp_before_last: bool = False
    """Whether these lie on the stage before the last one, which has the head alone."""
    has_whole_experts: bool = False
    """Whether tensor-parallel devices hold whole experts, not parts of each."""
    has_block_scales: bool = False
    """Whether narrow formats have a scale a block of elements, not a tensor."""
    recomputed_layers: int | None = None
    """The layers of each stage that full recompute repeats; None for all."""
    recomputed_together: int = 1
    """The layers that share a kept input, of those that full recompute repeats."""
    recomputed_modules: tuple[str, ...] = ("core_attn",)
    """The modules of a layer that selective recompute repeats, by Megatron's names."""
    imbalance: float = IMBALANCE
    """Tokens of the fullest device of an expert group, over the mean."""
    normalization: str | None = None
    """The norms by Megatron's name; None where it is not known."""
    packed: PackedLengths | None = None
    """The documents packed into sequences; None where each sequence is one, or nothing says them."""
    kinds: tuple[PricedKind, ...] = ()
    """The kinds of a hybrid model's layers; none where layers are alike but for experts."""
    pattern: str = ""
    """The letter of each layer of a hybrid model, by `kinds`."""
    sublayers: Sublayers = Sublayers.BOTH
    """What every layer has where there are no kinds."""
    scan: Scan | None = None
    """The scan that every layer has in place of an FFN where there are no kinds; None for an FFN."""

    @property
    def has_attention(self) -> bool:
        """Whether each layer has attention."""
        return self.sublayers is not Sublayers.FFN

    @property
    def has_ffn(self) -> bool:
        """Whether each layer has an FFN or experts."""
        return self.sublayers is not Sublayers.ATTENTION

    @property
    def num_sublayers(self) -> int:
        """The parts of a layer, each with a norm, a residual sum and tensor-parallel collectives."""
        return self.has_attention + self.has_ffn

    def kernel_ratio(self, *, has_experts: bool) -> float:
        """A layer's kernels over those of a transformer layer with a dense FFN.

        Attention and a dense FFN have half of these each; experts add as many as a whole such layer.
        """
        return self.num_sublayers / 2 + has_experts

    @property
    def runs_by_kind(self) -> tuple[tuple["TrainingRun", Experts | None], ...]:
        """The run to price a layer of each kind with, and that layer's experts or None.

        Of a hybrid model all layers of such a run are of the kind. Of experts behind dense layers both are
        this run itself, so only the second item tells the kinds apart: pass it on as `experts`.
        """
        if self.kinds:
            return tuple((self._of_kind(kind), kind.experts) for kind in self.kinds)
        if self.experts is not None and self.experts.num_dense_layers:
            return (self, None), (self, self.experts)
        return ((self, self.experts),)

    def _of_kind(self, kind: PricedKind) -> "TrainingRun":
        return replace(
            self,
            shape=kind.shape,
            experts=kind.experts,
            sublayers=kind.sublayers,
            scan=kind.scan,
            kinds=(),
            pattern="",
        )

    @property
    def layer_counts(self) -> list[tuple[int, ...]]:
        """The layers of each of the `runs_by_kind` on each stage."""
        edges = [0, *accumulate(self.layers_per_stage)]
        return self.layers_between(edges[:-1], edges[1:])

    def layers_between(self, firsts: list[int], ends: list[int]) -> list[tuple[int, ...]]:
        """The layers of each of the `runs_by_kind` from each of `firsts` on, before each of `ends`."""
        letters = letters_of(self.experts, self.kinds)
        if len(letters) == 1:
            return [(end - first,) for first, end in zip(firsts, ends, strict=True)]
        before = layers_before(sequence_of(sum(self.layers_per_stage), self.experts, self.pattern), letters)
        return [tuple(counts) for counts in (before[:, ends] - before[:, firsts]).T.tolist()]

    @property
    def has_narrow_products(self) -> bool:
        """Whether the layers' products are in 8 or 4 bits."""
        return self.matmul in ("fp8", "fp4")

    @property
    def expert_shards(self) -> int:
        """Devices that share each expert's products."""
        return 1 if self.has_whole_experts else self.layout.tensor_parallel

    @property
    def expert_load(self) -> float:
        """Tokens of the fullest device of its expert group over the mean; a device alone has them all.

        Under a capacity they are as many as it pads up to, or at most as many as it leaves.
        """
        load = self.imbalance if self.layout.expert_parallel > 1 else 1.0
        capacity = self._capacity
        return load if capacity is None else self._load_under(capacity, load)

    @property
    def held_expert_load(self) -> float:
        """Rows that a layer keeps for the tokens of its experts, over the tokens of the mean device.

        Buffers of a rank's limit have its size, whatever arrives; a stash has pages for its part of them.
        """
        capacity = self._capacity
        if capacity is None or capacity.rank_factor is None:
            return self.expert_load
        stash = self.stash_factor
        if stash is None:
            return capacity.rank_factor
        return stash if stash >= 0 else -stash * self.expert_load

    @property
    def stash_factor(self) -> float | None:
        """The pages of the paged stash over the mean tokens; None without it.

        It takes Transformer Engine's quantized tensors alone, so that it does nothing beside wide products.
        """
        capacity = self._capacity
        return None if capacity is None or not self.has_narrow_products else capacity.stash_factor

    @property
    def kept_share(self) -> float:
        """The experts that a token is sent to, over those that it chooses, in the mean."""
        capacity = self._capacity
        return 1.0 if capacity is None else self._load_under(capacity, 1.0)

    @property
    def _capacity(self) -> ExpertCapacity | None:
        return None if self.experts is None else self.experts.capacity

    def _load_under(self, capacity: ExpertCapacity, load: float) -> float:
        """A load under a capacity: each rank's router counts the tokens that it has (`get_capacity`)."""
        assert self.experts is not None, "only experts have a capacity"
        if capacity.rank_factor is not None:
            load = min(load, capacity.rank_factor)
        if capacity.factor is None:
            return load
        chosen = self.tokens_per_microbatch / self.layout.tensor_parallel * self.experts.experts_per_token
        tokens = math.ceil(chosen / self.experts.num_experts * capacity.factor)
        most = tokens * self.experts.num_experts / chosen
        return most if capacity.is_padded else min(load, most)

    @property
    def exchanging_ranks(self) -> int:
        """Ranks that exchange heads for sequence around their attention; rings join as many as are left."""
        size = self.layout.context_parallel
        match self.software.context_comm:
            case ContextComm.A2A:
                return size
            case ContextComm.A2A_P2P if size % self.software.exchanging_ranks == 0:
                return self.software.exchanging_ranks
            case _:
                return 1

    @property
    def expert_copies(self) -> int:
        """Devices that hold the same experts."""
        tp, ep = self.layout.tensor_parallel, self.layout.expert_parallel
        return max(1, self.copies * tp // (ep * self.expert_shards))

    @property
    def optimizer_shards(self) -> tuple[float, float]:
        """Ranks that share the optimizer states of a dense weight, and of one of an expert.

        Each weight's are shared by ranks that hold it: with experts spread over them, these are fewer.
        """
        if self.zero_stage == 0:
            return 1.0, 1.0
        ranks = float(self.shard_group if self.zero_stage == 3 else self.optimizer_group)
        tp, ep = self.layout.tensor_parallel, self.layout.expert_parallel
        return ranks, max(1.0, ranks * tp / (ep * self.expert_shards))

    @property
    def further_layers(self) -> tuple[tuple["TrainingRun", Experts | None, int], ...]:
        """The layers of a depth of multi-token prediction, by kind.

        Each kind has the run to price a layer with, that layer's experts or None, and the number of layers.
        """
        depth = self.mtp_depth
        if depth is None:
            return ((self, self.experts, 1),)
        layers = []
        for kind, count in depth.layers:
            # Full recompute repeats a share of the layers of the whole run.
            shape = replace(kind.shape, num_layers=self.shape.num_layers)
            run = replace(self, latent=depth.latent)._of_kind(replace(kind, shape=shape))
            layers.append((run, kind.experts, count))
        return tuple(layers)

    @property
    def embedding_stage(self) -> int:
        """The stage that has a copy of the embedding, or the tied head, counted from the end: -1 or -2."""
        return -2 if self.is_mtp_before_last and not self.shape.tied_embeddings else -1

    @property
    def end_parameters(self) -> float:
        """Weights of the embedding and the head on one rank, once where they are tied."""
        num_ends = 1 if self.shape.tied_embeddings else 2
        return num_ends * self.shape.embedding_parameters / self.layout.tensor_parallel

    def num_sent_tensors(self, stage: int) -> int:
        """The boundary tensors that a stage sends the next: a state of each further token beside the last."""
        is_last_but_one = self.is_mtp_before_last and stage == len(self.layers_per_stage) - 2
        return 1 + self.mtp_layers if is_last_but_one else 1

    @property
    def recomputed_share(self) -> float:
        """The share of all layers that full recompute repeats; seconds of every stage have this share."""
        if self.layout.recompute != "full":
            return 0.0
        if self.recomputed_layers is None:
            return 1.0
        repeated = sum(min(self.recomputed_layers, count) for count in self.layers_per_stage)
        return repeated / self.shape.num_layers

    def recomputes(self, module: str) -> bool:
        """Whether selective recompute repeats a module."""
        return self.layout.recompute == "selective" and module in self.recomputed_modules

    @property
    def recomputes_mlp(self) -> bool:
        """Whether selective recompute repeats a layer's dense FFN; a state-space layer is none."""
        return self.scan is None and self.recomputes("mlp")

    @property
    def has_graph_masks(self) -> bool:
        """Whether each layer with attention keeps a mask for each microbatch, an input of its graph."""
        software = self.software
        return self.has_attention and software.graphed_attention and software.has_static_inputs

    def num_norm_modules(self, *, has_experts: bool) -> int:
        """The norms of a layer that are modules of their own, which recompute can repeat.

        Transformer Engine has a norm inside of the product behind it: not before latent attention, and not
        before experts.
        """
        if self.software.plain_operations:
            return self.num_sublayers
        return (self.has_attention and self.latent is not None) + has_experts

    @property
    def has_rms_norms(self) -> bool:
        """Whether norms are RMSNorms, as in models with rotary embeddings where it is not known."""
        if self.normalization is None:
            return self.shape.position_embedding == "rope"
        return self.normalization == "RMSNorm"

    @property
    def is_custom(self) -> bool:
        """Whether the plugin's runtime executes the schedule; some frameworks have it too."""
        return self.custom is not None or self.schedule.is_custom

    @property
    def has_pairs(self) -> bool:
        """Whether the schedule says by overlapped pairs what runs beside what."""
        return self.custom is not None and self.custom.has_pairs

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are actions of their own."""
        return self.schedule.splits_backward

    @property
    def tokens_per_microbatch(self) -> float:
        """Tokens of one microbatch on one device: context parallel splits the sequence."""
        return self.layout.micro_batch_size * self.shape.seq_length / self.layout.context_parallel

    @property
    def attended_length(self) -> float:
        """Tokens of the document that a token lies in, which alone it attends to: else of the sequence."""
        return self.shape.seq_length if self.packed is None else self.packed.attended_length

    @property
    def documents_per_microbatch(self) -> float:
        """Documents of `attended_length` tokens in a microbatch: else its sequences."""
        size = self.layout.micro_batch_size
        if self.packed is None:
            return size
        return size * self.packed.tokens_per_sequence / self.packed.attended_length

    @property
    def sequence_shards(self) -> int:
        """The shards that sequence parallelism makes of a sequence."""
        return self.layout.tensor_parallel if self.layout.sequence_parallel else 1

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation's element."""
        return 4 if self.half == "fp32" else 2

    @property
    def parameter_bytes(self) -> int:
        """Bytes of an updated parameter on the wire."""
        return max(4, self.software.parameter_bytes) if self.half == "fp32" else self.software.parameter_bytes

    @property
    def copies(self) -> int:
        """Devices that hold the same dense weights: data and context parallel together."""
        return self.layout.data_parallel * self.layout.context_parallel


def port_share(device: DeviceSpec) -> float | None:
    """The share of a port's nominal rate that exchanges between devices reach; None for processors."""
    return None if device.compute_units == 1 else PORT_SHARE


def uniform_cluster_of_device(
    device: DeviceSpec, *, num_devices: int, devices_per_node: int | None = None
) -> UniformCluster:
    """`num_devices` of `device` on the links of its data sheet."""
    per_node = devices_per_node or device.devices_per_node
    return UniformCluster(
        device=device,
        num_devices=num_devices,
        devices_per_node=per_node,
        # A node with fewer devices than the scale-up domain still belongs to a larger one (GB200's racks).
        scale_up_devices=max(per_node, device.scale_up_devices),
        scale_up_bytes_per_s=device.scale_up_bandwidth_bytes_per_s,
        scale_out_bytes_per_s=device.scale_out_bandwidth_bytes_per_s,
        memory_bytes=device.memory_bytes,
        port_share=port_share(device),
    )


def run_of(
    shape: ModelShape,
    layout: Layout,
    *,
    global_batch_size: int,
    layers_per_stage: tuple[int, ...],
    cluster: UniformCluster,
    schedule: ScheduleKind | None = None,
    group: int | None = None,
    custom: CustomSchedule | None = None,
    precision: HalfPrecision = "bf16",
    software: Software | None = None,
) -> TrainingRun:
    """A run of Megatron-Core; `schedule` None is interleaved with virtual stages and 1F1B without them.

    `layers_per_stage` counts transformer layers. Raises ConfigError where sizes do not fit each other, or the
    schedule does not exist for them.
    """
    if layout.world_size != cluster.num_devices:
        raise ConfigError(
            f"layout {layout.label}: {layout.world_size} ranks; must be the {cluster.num_devices} devices"
        )
    if len(layers_per_stage) != layout.num_stages or sum(layers_per_stage) != shape.num_layers:
        raise ConfigError(
            f"layers_per_stage: {list(layers_per_stage)[:16]}; must be {layout.num_stages} counts "
            f"that sum to {shape.num_layers}"
        )
    if layout.pipeline_parallel == 1:
        schedule, group, custom = ScheduleKind.NONE, None, None
    elif schedule is None:
        schedule = ScheduleKind.INTERLEAVED if layout.virtual_stages > 1 else ScheduleKind.ONE_F_ONE_B
    num_microbatches = layout.num_microbatches(global_batch_size)
    software = software or Software()
    copies = layout.data_parallel * layout.context_parallel
    if schedule.spec is not None:
        reason = refusal_of(
            schedule.value,
            num_devices=layout.pipeline_parallel,
            # Longer orders repeat: a limit on their length is none here.
            num_microbatches=min(num_microbatches, 2 * layout.pipeline_parallel),
            num_chunks=layout.virtual_stages,
            group=group,
        )
        if reason is not None:
            raise ConfigError(f"schedule {reason}" if reason[0].isdigit() else reason)
    if layout.context_parallel > 1 and shape.seq_length % layout.context_parallel:
        raise ConfigError(
            f"seq_length: {shape.seq_length}; must be a multiple of "
            f"context_parallel ({layout.context_parallel})"
        )
    return TrainingRun(
        shape=shape,
        layout=layout,
        num_microbatches=num_microbatches,
        layers_per_stage=layers_per_stage,
        half=precision,
        matmul=precision,
        zero_stage=3 if software.shards_parameters else int(layout.distributed_optimizer),
        shard_group=copies if software.shards_parameters else 1,
        optimizer_group=copies,
        schedule=schedule,
        group=group,
        custom=custom,
        cluster=cluster,
        software=software,
    )


def with_layers(run: TrainingRun, layers: PricedLayers) -> TrainingRun:
    """The run with the layers of a model; its split has as many."""
    return replace(
        run,
        experts=layers.experts,
        latent=layers.latent,
        kinds=layers.kinds,
        pattern=layers.pattern,
    )


@lru_cache(maxsize=64)
def mtp_depth_of(
    shape: ModelShape, experts: Experts | None, latent: LatentAttention | None, kinds: LayerKinds | None
) -> MtpDepth | None:
    """A depth of multi-token prediction with layers of `kinds`, beside a model with these sizes.

    Without kinds it is a mean layer of a hybrid model, of another (None) a layer as the last one is.
    """
    if kinds is None and not shape.pattern:
        return None
    if kinds is None:
        mean, routed = mean_layers(shape, experts)
        alike = PricedKind(letter=MLP, shape=mean, sublayers=Sublayers.BOTH, experts=routed)
        return MtpDepth(layers=((alike, 1),), latent=None)
    counts = {letter: getattr(kinds, name) for name, letter in LETTERS.items()}
    # One stage has all of them, so that their order does not matter.
    pattern = "".join(letter * count for letter, count in counts.items())
    depth = replace(shape, num_layers=len(pattern), layer_kinds=kinds.with_pattern(pattern))
    priced = priced_layers(depth, experts, latent)
    return MtpDepth(layers=tuple((kind, counts[kind.letter]) for kind in priced.kinds), latent=latent)


def schedule_kind(choice: ScheduleChoice) -> ScheduleKind:
    """The schedule of a plan; `CUSTOM` where its order is written out or made by parameters."""
    custom = choice.custom
    name = choice.name if custom is None else custom.named
    if name is None or (custom is not None and custom.orders is not None):
        return ScheduleKind.CUSTOM
    return ScheduleKind.NONE if name == "no-pipelining" else ScheduleKind(name)


def schedule_group(choice: ScheduleChoice) -> int | None:
    """Microbatches a chunk before the next chunk, where the plan's schedule says it."""
    return choice.group if choice.custom is None else choice.custom.group
