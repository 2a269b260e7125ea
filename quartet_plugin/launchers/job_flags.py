"""Megatron's flags of what a job describes: precision, sizes of layers by their kinds, and the kind of model.

A plan of a run is added to the user's command, which has these flags; a plan without a run has no command
beside it, so all of them are written out.
"""

from quartet_plugin.model.hierarchical_context import SIZES, sizes_of
from quartet_plugin.model.job_description import (
    ExpertCapacity,
    Experts,
    JobDescription,
    LatentAttention,
)
from quartet_plugin.model.layout import SettingValue
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.shape import DEFAULT_STATE, LayerKinds, ModelShape
from quartet_plugin.space.knobs.cp_comm_type import A2A_P2P, CP_COMM_TYPE, HIERARCHICAL_SIZES, P2P
from quartet_plugin.space.knobs.expert_tensor_parallel import EXPERT_TENSOR_PARALLEL, WHOLE

FlagValues = dict[str, str | int | bool | list[str]]


def flags_of_job(plan: Plan) -> FlagValues:
    """The flags of a plan's job description; none where the plan has no description."""
    job = plan.made_for.job
    if job is None:
        return {}
    flags = _flags_of_kind(plan.shape)
    flags |= _flags_of_state_space_layers(plan.shape.layer_kinds, job.mtp_kinds)
    flags |= {"--fp8-format": "hybrid", "--bf16": True} if job.precision == "fp8" else {}
    flags |= {f"--{job.precision}": True} if job.precision in ("bf16", "fp16") else {}
    features = job.features or ()
    if job.experts is not None:
        has_biases = "moe_linear_bias" in features
        flags |= _flags_of_experts(job.experts, num_layers=plan.shape.num_layers, has_biases=has_biases)
    if "no_linear_bias" in features:
        flags["--disable-bias-linear"] = True
    if "moe_unfused_bias" in features:
        flags["--no-bias-dropout-fusion"] = True
    if job.experts is not None and _has_grouped_products(plan, job):
        flags["--moe-grouped-gemm"] = True
    if job.experts is not None and _setting_of(plan, job, EXPERT_TENSOR_PARALLEL.name) == WHOLE:
        flags[EXPERT_TENSOR_PARALLEL.flag] = WHOLE
    if job.latent_attention is not None:
        flags |= _flags_of_latent_attention(job.latent_attention)
    if plan.made_for.mtp_layers:
        flags["--mtp-num-layers"] = plan.made_for.mtp_layers
    if plan.layout.context_parallel > 1:
        flags |= _flags_of_shared_sequences(plan, job)
    return flags


def _flags_of_shared_sequences(plan: Plan, job: JobDescription) -> FlagValues:
    """The job's communication where the plan keeps it, and the sizes of an `a2a+p2p` that keeps them."""
    values = {setting.name: setting.value for setting in job.settings or ()}
    planned, kept = plan.layout.setting(CP_COMM_TYPE.name), values.get(CP_COMM_TYPE.name, P2P)
    flags: FlagValues = {CP_COMM_TYPE.flag: kept} if planned is None and kept != P2P else {}
    sizes = sizes_of(values.get(SIZES))
    keeps_sizes = plan.layout.setting(SIZES) is None and (planned or kept) == A2A_P2P
    if sizes is not None and keeps_sizes:
        flags[HIERARCHICAL_SIZES.flag] = [str(size) for size in sizes]
    return flags


def _has_grouped_products(plan: Plan, job: JobDescription) -> bool:
    """Whether the products of experts are grouped: by the plan, else by the job's setting or feature."""
    stated = _setting_of(plan, job, "moe_grouped_gemm")
    return "moe_grouped_gemm" in (job.features or ()) if stated is None else stated is True


def _setting_of(plan: Plan, job: JobDescription, name: str) -> SettingValue | None:
    """The value of a setting by the plan, else by the job; None where neither says it."""
    values = {
        setting.name: setting.value for setting in (*(job.settings or ()), *(plan.layout.settings or ()))
    }
    return values.get(name)


def _flags_of_kind(shape: ModelShape) -> FlagValues:
    flags: FlagValues = {
        "--max-position-embeddings": shape.max_position_embeddings,
        "--position-embedding-type": shape.position_embedding,
        "--padded-vocab-size": shape.vocab_size,
    }
    if shape.gated_ffn:
        flags["--swiglu"] = True
    if not shape.tied_embeddings:
        flags["--untie-embeddings-and-output-weights"] = True
    return flags


def _flags_of_state_space_layers(*kinds: LayerKinds | None) -> FlagValues:
    """The sizes of a hybrid model's state-space layers; none where no layer is known to be such."""
    sized = next((each for each in kinds if each is not None and each.state_space_heads), None)
    if sized is None:
        return {}
    heads, groups = sized.state_space_heads, sized.state_space_groups
    state_size = sized.state_size or DEFAULT_STATE
    # `projected_size` has three values a channel, two a channel of a group's state, and one a head.
    channels = sized.projected_size - 2 * groups * state_size - heads
    return {
        "--mamba-state-dim": state_size,
        "--mamba-head-dim": channels // (3 * heads),
        "--mamba-num-groups": groups,
        "--mamba-num-heads": heads,
    }


def _flags_of_experts(experts: Experts, *, num_layers: int, has_biases: bool) -> FlagValues:
    flags: FlagValues = {
        "--num-experts": experts.num_experts,
        "--moe-router-topk": experts.experts_per_token,
        "--moe-ffn-hidden-size": experts.ffn_hidden_size,
        # Megatron refuses biases of experts that several devices share: only a command may have them.
        **({} if has_biases else {"--disable-bias-linear": True}),
    }
    if experts.shared_ffn_hidden_size:
        flags["--moe-shared-expert-intermediate-size"] = experts.shared_ffn_hidden_size
    if experts.capacity is not None:
        flags |= _flags_of_capacity(experts.capacity)
    if experts.num_dense_layers:
        num_dense = experts.num_dense_layers
        flags["--moe-layer-freq"] = f"([0]*{num_dense}+[1]*{num_layers - num_dense})"
    return flags


def _flags_of_capacity(capacity: ExpertCapacity) -> FlagValues:
    factors = {
        "--moe-expert-capacity-factor": capacity.factor,
        "--moe-expert-rank-capacity-factor": capacity.rank_factor,
        "--moe-paged-stash-buffer-size-factor-cuda": capacity.stash_factor,
    }
    switches = {
        "--moe-pad-expert-input-to-capacity": capacity.is_padded,
        "--moe-paged-stash": capacity.stash_factor is not None,
    }
    texts: FlagValues = {flag: str(value) for flag, value in factors.items() if value is not None}
    return texts | {flag: True for flag, is_on in switches.items() if is_on}


def _flags_of_latent_attention(attention: LatentAttention) -> FlagValues:
    return {
        "--multi-latent-attention": True,
        "--q-lora-rank": attention.q_lora_rank,
        "--kv-lora-rank": attention.kv_lora_rank,
        "--qk-head-dim": attention.qk_head_dim,
        "--qk-pos-emb-head-dim": attention.qk_pos_emb_head_dim,
        "--v-head-dim": attention.v_head_dim,
    }
