"""One training run in the cost model's own terms: shape, layout, precision, software and machines.

Everything is resolved here: no field is open any more. Rows of published runs and plans of our own are
both turned into a `TrainingRun`.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from quartet_plugin.cost.devices import DeviceSpec
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.shape import ModelShape

Attention = Literal["native-flash", "flash-2", "flash-1", "unfused"]
HalfPrecision = Literal["fp16", "bf16", "fp32"]


class Overlap(StrEnum):
    """How much of a collective the framework runs beside compute."""

    NONE = "none"
    BACKWARD = "backward"
    FULL = "full"


class ScheduleKind(StrEnum):
    """The pipeline schedules that published runs used, by our names."""

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
    """What the framework does that costs time or memory, whatever its name.

    `gradient_bytes` is what one gradient element costs on the wire, `main_gradient_bytes` what is held.
    `selective_fraction` is the share of a layer's matrix products that selective recompute repeats.
    `tensor_overlap` is for tensor and sequence parallel collectives, `data_overlap` for gradients and
    parameters, `post_validation` whether the optimizer's barrier is hidden (zero-bubble schedules).
    `zero_broadcasts`: updated shards come back as one broadcast a rank, not as one all-gather.
    `reduces_all`: ZeRO-1 reduces all gradients on every rank, not only the own shard.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformCluster:
    """The devices and links of one run; bandwidths in bytes/s a device, one direction."""

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
        """Of an activation."""
        return 4 if self.half == "fp32" else 2

    @property
    def parameter_bytes(self) -> int:
        """Of an updated parameter on the wire."""
        return max(4, self.software.parameter_bytes) if self.half == "fp32" else self.software.parameter_bytes

    @property
    def copies(self) -> int:
        """Devices that hold the same dense weights: data and context parallel together."""
        return self.layout.data_parallel * self.layout.context_parallel
