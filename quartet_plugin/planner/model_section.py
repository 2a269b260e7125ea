"""The `model` section of a JOB.yaml, and the model that it describes."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.job_description import Experts, JobPrecision, LatentAttention
from quartet_plugin.model.megatron_arguments import hybrid_expert_layers_of, layer_kinds_of, mtp_kinds_of
from quartet_plugin.model.sections import Section
from quartet_plugin.model.shape import (
    DEFAULT_GROUPS,
    DEFAULT_HEAD,
    DEFAULT_STATE,
    MAX_HIDDEN,
    MAX_LAYERS,
    LayerKinds,
    ModelShape,
)

Size = Annotated[int, Field(ge=1, le=2**31)]
Layers = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
Hidden = Annotated[int, Field(ge=1, le=MAX_HIDDEN)]
VOCABULARY_MULTIPLE = 128


class LatentSection(Section):
    """Multi-head latent attention by Megatron's names: ranks of compressed queries and keys, head sizes."""

    q_lora_rank: Size
    kv_lora_rank: Size
    qk_head_dim: Size
    qk_pos_emb_head_dim: Size
    v_head_dim: Size


class ModelSection(Section):
    """The model. Defaults: an FFN of 4 x hidden, as many query groups as heads, no gated FFN.

    Embeddings are tied, and positions learned, where the FFN is not gated and queries are not grouped.
    `num_experts` makes every layer but the first `num_dense_layers` a mixture of experts of
    `expert_ffn_hidden_size` each (None: the FFN's), `experts_per_token` of them a token and a shared one.
    `latent_attention` replaces the heads' sizes; without it attention is a plain one. `mtp_layers` is
    the number of layers of multi-token prediction; `search.mtp_stage` chooses their stage.
    """

    num_layers: Layers
    hidden_size: Hidden
    num_attention_heads: Size
    seq_length: Size
    vocab_size: Size
    ffn_hidden_size: Size | None = None
    num_query_groups: Size | None = None
    kv_channels: Size | None = None
    max_position_embeddings: Size | None = None
    gated_ffn: bool = False
    tied_embeddings: bool | None = None
    position_embedding: Literal["learned_absolute", "rope", "none"] | None = None
    precision: JobPrecision = "bf16"
    num_experts: Annotated[int, Field(ge=2, le=65_536)] | None = None
    experts_per_token: Annotated[int, Field(ge=1, le=1024)] = 2
    expert_ffn_hidden_size: Size | None = None
    shared_expert_ffn_hidden_size: Annotated[int, Field(ge=0, le=2**31)] = 0
    num_dense_layers: Annotated[int, Field(ge=0, le=2**20)] = 0
    latent_attention: LatentSection | None = None
    mtp_layers: Annotated[int, Field(ge=0, le=64)] = 0
    hybrid_layer_pattern: Annotated[str, Field(max_length=2 * MAX_LAYERS)] | None = None
    """A hybrid model's layers by Megatron's letters, and behind slashes each depth of multi-token prediction.

    It says `num_layers` and `mtp_layers`, which may be left out. None for a model without a pattern.
    """
    mamba_state_dim: Size = DEFAULT_STATE
    """The channels of a state-space layer's state."""
    mamba_head_dim: Size = DEFAULT_HEAD
    """The channels of a head of a state-space layer."""
    mamba_num_groups: Size = DEFAULT_GROUPS
    """The groups of a state-space layer's heads, each with keys and queries of its own."""
    mamba_num_heads: Size | None = None
    """The heads of a state-space layer; None for those of twice the hidden size."""
    router_losses: bool = False
    """Whether a hybrid model's routers record a loss for Megatron's log.

    Every pipeline rank then needs a layer with experts.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedModel:
    """What a section says of the model, as a `PlanRequest` has it under the same names."""

    shape: ModelShape
    experts: Experts | None
    latent: LatentAttention | None
    mtp_kinds: LayerKinds | None
    logged_expert_layers: tuple[int, ...]


def described_model(model: ModelSection, *, largest: int) -> DescribedModel:
    """The model of a section, its vocabulary padded for up to `largest` tensor-parallel devices.

    Raises ConfigError for sizes that do not go together.
    """
    shape = _shape(model, largest=largest)
    if model.mtp_layers:
        _check_mtp(model.mtp_layers, shape)
    arguments = _arguments(model)
    return DescribedModel(
        shape=shape,
        experts=_experts(model),
        latent=_latent(model),
        mtp_kinds=mtp_kinds_of(arguments),
        logged_expert_layers=hybrid_expert_layers_of(arguments) if model.router_losses else (),
    )


def _experts(model: ModelSection) -> Experts | None:
    if model.num_experts is None:
        return None
    if model.experts_per_token > model.num_experts:
        raise ConfigError(
            f"model.experts_per_token: {model.experts_per_token}; must be at most num_experts "
            f"({model.num_experts})"
        )
    if model.num_dense_layers >= model.num_layers:
        raise ConfigError(
            f"model.num_dense_layers: {model.num_dense_layers}; must be under num_layers "
            f"({model.num_layers}), or leave num_experts out"
        )
    return Experts(
        num_experts=model.num_experts,
        experts_per_token=model.experts_per_token,
        ffn_hidden_size=model.expert_ffn_hidden_size or model.ffn_hidden_size or 4 * model.hidden_size,
        shared_ffn_hidden_size=model.shared_expert_ffn_hidden_size,
        num_dense_layers=model.num_dense_layers,
    )


def _latent(model: ModelSection) -> LatentAttention | None:
    given = model.latent_attention
    return None if given is None else LatentAttention(**given.model_dump())


def _arguments(model: ModelSection) -> Namespace:
    """The section as Megatron's arguments, for what a pattern and sizes of state-space layers say."""
    return Namespace(**dict(model))


def _check_mtp(mtp_layers: int, shape: ModelShape) -> None:
    if shape.tied_embeddings:
        raise ConfigError(
            f"model.mtp_layers: {mtp_layers}; needs tied_embeddings: false, because Megatron saves no stages "
            "of multi-token prediction with a tied head"
        )
    if shape.position_embedding == "learned_absolute":
        raise ConfigError(f"model.mtp_layers: {mtp_layers}; needs position_embedding: rope or none")


def _shape(model: ModelSection, *, largest: int) -> ModelShape:
    heads, latent = model.num_attention_heads, model.latent_attention
    if latent is not None and (model.kv_channels, model.num_query_groups) != (None, None):
        raise ConfigError(
            "model.latent_attention: has head sizes of its own; remove kv_channels and num_query_groups"
        )
    if latent is None and model.kv_channels is None and model.hidden_size % heads:
        raise ConfigError(
            f"model.hidden_size: {model.hidden_size}; must be a multiple of num_attention_heads ({heads}), "
            "or give kv_channels"
        )
    plain = not model.gated_ffn and model.num_query_groups in (None, heads)
    multiple = VOCABULARY_MULTIPLE * largest
    return ModelShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size or 4 * model.hidden_size,
        num_attention_heads=heads,
        num_query_groups=model.num_query_groups or heads,
        kv_channels=latent.v_head_dim if latent else model.kv_channels or model.hidden_size // heads,
        seq_length=model.seq_length,
        vocab_size=-(-model.vocab_size // multiple) * multiple,
        max_position_embeddings=model.max_position_embeddings or model.seq_length,
        gated_ffn=model.gated_ffn,
        tied_embeddings=plain if model.tied_embeddings is None else model.tied_embeddings,
        position_embedding=model.position_embedding or ("learned_absolute" if plain else "rope"),
        layer_kinds=layer_kinds_of(_arguments(model)),
    )
