"""The part of a job's file that a plan holds beside shape and batch: experts, attention, precision, hardware.

A plan that was made without a run carries it, so that no second file is needed to read the plan.
"""

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, Any, Literal

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.cluster import Cluster, Name, Positive
from quartet_plugin.model.layout import Setting
from quartet_plugin.model.packed_lengths import PackedLengths
from quartet_plugin.model.schema import ADDED, Bounds, Length, record
from quartet_plugin.model.shape import MAX_LAYERS, LayerKinds, ModelShape

JobPrecision = Literal["bf16", "fp16", "fp8", "fp32"]
_Size = Annotated[int, Bounds(ge=1, le=2**31)]
_LayerNumber = Annotated[int, Bounds(ge=0, le=MAX_LAYERS)]
_Factor = Annotated[float, Bounds(gt=0, le=1e6)]


@record
class ExpertCapacity:
    """Limits on the tokens of experts, over those of the mean; None where there is none of the kind.

    `factor` limits the tokens that a rank sends to an expert: more are dropped, and with `is_padded` it sends
    exactly as many. `rank_factor` limits those of all experts of a rank, whose buffers have that size.
    `stash_factor` is the size of the pages into which Megatron copies what experts keep for the backward:
    over that of the mean tokens, or, below 0, over that of the tokens that arrive.
    """

    factor: _Factor | None = None
    is_padded: bool = False
    rank_factor: _Factor | None = None
    stash_factor: Annotated[float, Bounds(ge=-1e6, le=1e6)] | None = None


@record
class Experts:
    """A mixture of experts in every layer but the first `num_dense_layers`.

    A token goes to `experts_per_token` of `num_experts` experts with an FFN of `ffn_hidden_size` each, and to
    a shared one of `shared_ffn_hidden_size` where that is not 0. `capacity` limits the tokens of experts.
    """

    num_experts: Annotated[int, Bounds(ge=1, le=65_536)]
    experts_per_token: Annotated[int, Bounds(ge=1, le=65_536)]
    ffn_hidden_size: _Size
    shared_ffn_hidden_size: Annotated[int, Bounds(ge=0, le=2**31)] = 0
    num_dense_layers: Annotated[int, Bounds(ge=0, le=2**20)] = 0
    capacity: ExpertCapacity | None = field(default=None, metadata=ADDED)

    @property
    def label(self) -> str:
        """The experts in words."""
        shared = f", a shared one of {self.shared_ffn_hidden_size}" if self.shared_ffn_hidden_size else ""
        dense = f", the first {self.num_dense_layers} layers dense" if self.num_dense_layers else ""
        return (
            f"{self.num_experts} experts of {self.ffn_hidden_size}, {self.experts_per_token} a token"
            f"{shared}{dense}"
        )


@record
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2) by Megatron's names.

    Ranks of the compressed queries and keys, then the sizes of a head's parts.
    """

    q_lora_rank: _Size = 1536
    kv_lora_rank: _Size = 512
    qk_head_dim: _Size = 128
    qk_pos_emb_head_dim: _Size = 64
    v_head_dim: _Size = 128

    @property
    def label(self) -> str:
        """The latent attention in words."""
        return (
            f"latent attention, ranks {self.q_lora_rank} and {self.kv_lora_rank}, heads of "
            f"{self.qk_head_dim}+{self.qk_pos_emb_head_dim} and {self.v_head_dim}"
        )


@record
class EqualDevices:
    """Equal devices by name, with the keys of a job's `cluster`.

    `memory_bytes` is one device's; bandwidths are one device's in one direction.
    """

    device: Name
    num_nodes: Annotated[int, Bounds(ge=1, le=2**20)]
    devices_per_node: Annotated[int, Bounds(ge=1, le=1024)]
    scale_up_bandwidth_bytes_per_s: Positive
    scale_out_bandwidth_bytes_per_s: Positive
    memory_bytes: Annotated[int, Bounds(ge=1, le=2**50)]


@record
class JobDescription:
    """What a job's file says beside shape and batch; `search` has the keys that are not the defaults.

    `price_per_device_hour` is in the user's currency, `num_tokens` are those that the whole job trains on.
    The hardware is `devices` where all are equal, `cluster` where it is described in full. `vocab_size` is
    the vocabulary as the file has it, where the plan's is padded for every tensor-parallel size. `features`
    and `settings` are those of a command, or of recipes where there is none, that its plans are limited or
    predicted by. Of a hybrid model `mtp_kinds` are the layers of each depth of multi-token prediction, and
    every pipeline rank needs one of `logged_expert_layers`. Raises ConfigError where the hardware is neither
    or both.
    """

    precision: JobPrecision
    search: Mapping[str, Any]
    experts: Experts | None = field(default=None, metadata=ADDED)
    latent_attention: LatentAttention | None = field(default=None, metadata=ADDED)
    devices: EqualDevices | None = field(default=None, metadata=ADDED)
    cluster: Cluster | None = field(default=None, metadata=ADDED)
    price_per_device_hour: Annotated[float, Bounds(ge=0, le=1e9)] | None = field(default=None, metadata=ADDED)
    num_tokens: Annotated[float, Bounds(gt=0, le=1e18)] | None = field(default=None, metadata=ADDED)
    vocab_size: Annotated[int, Bounds(ge=1, le=2**31)] | None = field(default=None, metadata=ADDED)
    features: Annotated[tuple[Name, ...], Length(most=1_000)] | None = field(default=None, metadata=ADDED)
    settings: Annotated[tuple[Setting, ...], Length(most=1_000)] | None = field(default=None, metadata=ADDED)
    mtp_kinds: LayerKinds | None = field(default=None, metadata=ADDED)
    logged_expert_layers: Annotated[tuple[_LayerNumber, ...], Length(most=MAX_LAYERS + 1)] | None = field(
        default=None, metadata=ADDED
    )

    def __post_init__(self) -> None:
        if (self.devices is None) == (self.cluster is None):
            raise ConfigError("made_for.job: must have one of devices and cluster")

    @property
    def model_words(self) -> dict[str, str]:
        """What a training command must agree with, in words."""
        return words_of_model(self.precision, self.experts, self.latent_attention)


def words_of_model(
    precision: str, experts: Experts | None, latent_attention: LatentAttention | None
) -> dict[str, str]:
    """Precision, experts and attention in words, by name."""
    return {
        "precision": precision,
        "experts": "none" if experts is None else experts.label,
        "attention": "plain" if latent_attention is None else latent_attention.label,
    }


def mean_layers(shape: ModelShape, experts: Experts | None) -> tuple[ModelShape, Experts | None]:
    """Like layers that have the mean weights of a hybrid model's, and their experts; others as they are.

    Where layers have experts, every layer gets their share of them, and its FFN is part of the shared one.
    """
    kinds = shape.layer_kinds
    if kinds is None or experts is None or not kinds.experts:
        return shape.mean, experts if kinds is None else None
    others = replace(shape, layer_kinds=replace(kinds.without_pattern, experts=0)).mean
    share = kinds.experts / shape.num_layers
    per_token = max(1, round(share * experts.experts_per_token))
    width = max(1, round(share * experts.experts_per_token * experts.ffn_hidden_size / per_token))
    width_of_all = share * experts.num_experts * experts.ffn_hidden_size
    return others, Experts(
        num_experts=max(per_token, round(width_of_all / width)),
        experts_per_token=per_token,
        ffn_hidden_size=width,
        shared_ffn_hidden_size=others.ffn_hidden_size + round(share * experts.shared_ffn_hidden_size),
        capacity=experts.capacity,
    )


def model_flops_per_sequence(
    shape: ModelShape,
    *,
    experts: Experts | None = None,
    latent_attention: LatentAttention | None = None,
    packed: PackedLengths | None = None,
) -> int:
    """Forward and backward FLOPs of one sequence, without recomputation; of experts those that a token uses.

    Causal attention counts the half it needs. Of packed sequences padding counts nothing, and attention that
    of each document.
    """
    shape, experts = mean_layers(shape, experts)
    seq, hidden, heads = shape.seq_length, shape.hidden_size, shape.num_attention_heads
    ffn = (3 if shape.gated_ffn else 2) * hidden * shape.ffn_hidden_size
    attention = shape.matrix_parameters_per_layer - ffn
    core = shape.forward_flops_per_layer - 2 * seq * shape.matrix_parameters_per_layer
    if latent_attention is not None:
        mla = latent_attention
        keys = mla.qk_head_dim + mla.qk_pos_emb_head_dim
        attention = (
            mla.q_lora_rank * (hidden + heads * keys)
            + (mla.kv_lora_rank + mla.qk_pos_emb_head_dim) * hidden
            + mla.kv_lora_rank * heads * (mla.qk_head_dim + mla.v_head_dim)
            + hidden * heads * mla.v_head_dim
        )
        core = seq * seq * heads * (keys + mla.v_head_dim)
    ffn_of_all = shape.num_layers * ffn
    if experts is not None:
        width = experts.experts_per_token * experts.ffn_hidden_size + experts.shared_ffn_hidden_size
        routed = (3 if shape.gated_ffn else 2) * hidden * width + hidden * experts.num_experts
        ffn_of_all = experts.num_dense_layers * ffn + (shape.num_layers - experts.num_dense_layers) * routed
    matrices = 2 * seq * (shape.num_layers * attention + ffn_of_all) + shape.forward_flops_of_head
    core *= shape.num_layers
    if packed is None:
        return 3 * (matrices + core)
    tokens, squares = packed.tokens_per_sequence / seq, packed.squares_per_sequence / seq**2
    return round(3 * (matrices * tokens + core * squares))
