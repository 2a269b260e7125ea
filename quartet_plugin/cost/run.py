"""A training run as the cost model takes it: shape, layout, precision, software and machines.

Rows of published runs (`rows.resolve`), plans and measured runs all become a `TrainingRun`; it has no open
field.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from quartet_plugin.cost.devices import DeviceSpec
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import ScheduleChoice, Split
from quartet_plugin.model.shape import ModelShape

Attention = Literal["native-flash", "flash-2", "flash-1", "unfused"]
HalfPrecision = Literal["fp16", "bf16", "fp32"]


class Overlap(StrEnum):
    """The part of a collective that the framework runs beside compute."""

    NONE = "none"
    BACKWARD = "backward"
    FULL = "full"


class ScheduleKind(StrEnum):
    """The pipeline schedules that published runs used, by their names in `schedule.named`."""

    NONE = "none"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZB_H2 = "zb-h2"
    GPIPE = "gpipe"
    ZB_V = "zb-v"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in every layer but the first `num_dense_layers`."""

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    num_dense_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): ranks of the compressed queries and keys, head sizes."""

    query_rank: int = 1536
    key_value_rank: int = 512
    plain_channels: int = 128
    rotary_channels: int = 64
    value_channels: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """The behaviour of a framework that costs time or memory.

    `gradient_bytes` are those of a gradient element on the wire, `main_gradient_bytes` those in memory.
    `selective_fraction` is the share of a layer's matrix products that selective recompute repeats.
    `tensor_overlap` is for tensor and sequence parallel collectives, `data_overlap` for gradients and
    parameters, `post_validation` whether the optimizer's barrier is hidden (zero-bubble schedules).
    `zero_broadcasts`: updated shards come back as one broadcast a rank, not as one all-gather.
    `reduces_all`: ZeRO-1 reduces all gradients on every rank, not only its shard.
    `parameter_bytes`: an updated parameter on the wire; `logs_step_only`: no time between steps;
    `blocking_transfers`: also interleaved schedules wait for their sends, as 1F1B always does.
    `graphs`: kernels are replayed from graphs, so that starting them costs nothing.
    `early_stop`: full recompute stops at the last tensor the backward needs, before the last product.
    `optimizer_bytes` a parameter: master weight, moments and, where it is kept, an fp32 gradient.
    `logit_bytes` a logit at the loss: the half-precision ones, fp32 copies, their gradient.
    `bucket_bytes`: communication buffers outside the gradients. `keeps_stage_outputs`: until the backward.
    `fragments`: an old caching allocator, whose holes cost activations memory. `fused_weight_gradient`:
    weight gradients are added to their sum by the product itself. `gradient_placeholders`: one a weight's
    shape, in place of that gradient. `splits_transfers`: tensor-parallel ranks send a slice each.
    `collectives_per_layer`: gathers of a layer's sharded parameters (stage 3).
    `eager_gradients`: each microbatch makes every weight's gradient anew and adds it, the vocabulary's too.
    `reduces_ends`: the collectives of embedding and head count: tied embeddings' gradients between both ends
    of a pipeline, and those of tensor parallelism; elsewhere they are too short to matter.
    `shares_memory`: ranks of a node compute out of one memory, the slower the more of them compute.
    """

    name: str = "Megatron-Core"
    attention: Attention = "native-flash"
    fused_elementwise: bool = True
    fused_loss: bool = False
    dropout: bool = False
    tensor_overlap: Overlap = Overlap.BACKWARD
    data_overlap: bool = True
    gradient_bytes: int = 4
    main_gradient_bytes: int = 4
    parameter_bytes: int = 2
    logs_step_only: bool = False
    blocking_transfers: bool = False
    selective_fraction: float = 0.0
    post_validation: bool = False
    zero_broadcasts: bool = False
    reduces_all: bool = False
    graphs: bool = False
    early_stop: bool = False
    fragments: bool = False
    optimizer_bytes: float = 12.0
    bucket_bytes: float = 0.0
    logit_bytes: float = 8.0
    keeps_stage_outputs: bool = False
    fused_weight_gradient: bool = True
    gradient_placeholders: bool = True
    splits_transfers: bool = False
    collectives_per_layer: int = 1
    eager_gradients: bool = False
    reduces_ends: bool = False
    shares_memory: bool = False


# Megatron-Core on processors: plain PyTorch operations in fp32, and collectives that stop the computation.
ON_CPU = Software(
    name="Megatron-Core on CPU",
    attention="unfused",
    fused_elementwise=False,
    tensor_overlap=Overlap.NONE,
    data_overlap=False,
    parameter_bytes=4,
    fused_weight_gradient=False,
    gradient_placeholders=False,
    eager_gradients=True,
    reduces_ends=True,
    shares_memory=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformCluster:
    """Equal devices on equal links, all that the cost model needs of a cluster.

    Bandwidths are one device's in one direction, bytes/s. `mapping.Topology` has the slots one by one, and
    `cost.cluster` makes both of a cluster file.
    """

    device: DeviceSpec
    num_devices: int
    devices_per_node: int
    scale_up_devices: int
    scale_up_bytes_per_s: float
    scale_out_bytes_per_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A run with nothing left open.

    `half` is the format of what is not in `matmul`, fp32 where a run uses no half precision at all; `matmul`
    that of the layers' matrix products.
    `zero_stage` 0 to 3, `shard_group` the data-parallel ranks that share parameters (stage 3),
    `optimizer_group` those that share optimizer states (stage 1 and 2).
    """

    shape: ModelShape
    layout: Layout
    num_microbatches: int
    layers_per_stage: tuple[int, ...]
    half: HalfPrecision
    matmul: Literal["fp16", "bf16", "fp32", "fp8", "fp4"]
    zero_stage: int
    shard_group: int
    optimizer_group: int
    schedule: ScheduleKind
    machines: UniformCluster
    software: Software = field(default_factory=Software)
    experts: Experts | None = None
    latent: LatentAttention | None = None

    @property
    def tokens_per_microbatch(self) -> float:
        """Tokens of one microbatch on one device: context parallel splits the sequence."""
        return self.layout.micro_batch_size * self.shape.seq_length / self.layout.context_parallel

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
    )


def run_of(
    shape: ModelShape,
    layout: Layout,
    *,
    global_batch_size: int,
    layers_per_stage: tuple[int, ...],
    machines: UniformCluster,
    schedule: ScheduleKind | None = None,
    precision: HalfPrecision = "bf16",
    software: Software | None = None,
) -> TrainingRun:
    """A run of Megatron-Core; `schedule` None is interleaved with virtual stages and 1F1B without them.

    `layers_per_stage` counts transformer layers. Raises ConfigError where sizes do not fit each other.
    """
    if layout.world_size != machines.num_devices:
        raise ConfigError(
            f"layout {layout.label}: {layout.world_size} ranks; must be the {machines.num_devices} devices"
        )
    if len(layers_per_stage) != layout.num_stages or sum(layers_per_stage) != shape.num_layers:
        raise ConfigError(
            f"layers_per_stage: {list(layers_per_stage)[:16]}; must be {layout.num_stages} counts "
            f"that sum to {shape.num_layers}"
        )
    if layout.pipeline_parallel == 1:
        schedule = ScheduleKind.NONE
    elif schedule is None:
        schedule = ScheduleKind.INTERLEAVED if layout.virtual_stages > 1 else ScheduleKind.ONE_F_ONE_B
    if layout.context_parallel > 1 and shape.seq_length % layout.context_parallel:
        raise ConfigError(
            f"seq_length: {shape.seq_length}; must be a multiple of "
            f"context_parallel ({layout.context_parallel})"
        )
    return TrainingRun(
        shape=shape,
        layout=layout,
        num_microbatches=layout.num_microbatches(global_batch_size),
        layers_per_stage=layers_per_stage,
        half=precision,
        matmul=precision,
        zero_stage=1 if layout.distributed_optimizer else 0,
        shard_group=1,
        optimizer_group=layout.data_parallel * layout.context_parallel,
        schedule=schedule,
        machines=machines,
        software=software or Software(),
    )


def schedule_kind(choice: ScheduleChoice) -> ScheduleKind | None:
    """The schedule of a plan as `predict` simulates it; None where `predict` cannot."""
    name = choice.name if choice.custom is None else choice.custom.named
    kinds = {kind.value: kind for kind in ScheduleKind}
    return ScheduleKind.NONE if name == "no-pipelining" else kinds.get(name or "")


def measured_run(
    shape: ModelShape,
    layout: Layout,
    *,
    split: Split,
    schedule: ScheduleChoice,
    global_batch_size: int,
    precision: HalfPrecision,
    on_cpu: bool,
    machines: UniformCluster,
) -> TrainingRun:
    """A measured run on its part of the cluster's devices.

    Raises ConfigError for a schedule that `predict` cannot simulate.
    """
    kind = schedule_kind(schedule)
    if kind is None:
        raise ConfigError(f"schedule {schedule.label}: has no name in the cost model")
    return run_of(
        shape,
        layout,
        global_batch_size=global_batch_size,
        layers_per_stage=split.transformer_layers_per_stage,
        machines=replace(machines, num_devices=layout.world_size),
        schedule=kind,
        precision=precision,
        software=ON_CPU if on_cpu else None,
    )
