"""A job to plan for, read from the user's training command instead of a JOB.yaml's model and batch."""

from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from quartet_plugin.cost.devices import DeviceSpec
from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import BRIDGE_MODULE, DEEPSPEED_MODULE, Command
from quartet_plugin.launchers.megatron_flags import flags_among
from quartet_plugin.launchers.megatron_words import FOR_SETTINGS, arguments_in, flag_of, read_arguments
from quartet_plugin.model.files import shown
from quartet_plugin.model.hierarchical_context import SIZES
from quartet_plugin.model.layout import Layout, Setting
from quartet_plugin.model.megatron_arguments import (
    experts_of,
    features_of,
    has_mtp_on_inner_stage,
    latent_attention_of,
    layout_of,
    logged_expert_layers_of,
    mtp_kinds_of,
    num_mtp_layers_of,
    precision_of,
    schedule_of,
    shape_of,
    split_of,
)
from quartet_plugin.model.plan import STOCK, ScheduleChoice, Split
from quartet_plugin.model.releases import release_of
from quartet_plugin.model.schema import dump
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.planner.job import DEFAULT_RELEASE, PlanRequest, parse_job, searched_settings
from quartet_plugin.planner.kept_axes import (
    READ_FOR_KEPT_AXES,
    features_of_command,
    kept_axes,
    with_kept_axes,
)
from quartet_plugin.space.config import SearchConfig
from quartet_plugin.space.features import WHOLE_NODES, Axis, batching_features
from quartet_plugin.space.knobs.cp_comm_type import CP_COMM_TYPE, P2P
from quartet_plugin.space.knobs.expert_overlap import (
    DELAYED_WEIGHT_GRADIENTS,
    EXPERT_OVERLAP,
    SHARED_EXPERT_OVERLAP,
)
from quartet_plugin.space.knobs.expert_tensor_parallel import EXPERT_TENSOR_PARALLEL, WHOLE
from quartet_plugin.space.knobs.moe_grouped_gemm import MOE_GROUPED_GEMM
from quartet_plugin.space.knobs.mtp_stage import BEFORE_LAST_FEATURE
from quartet_plugin.space.knobs.offload_modules import OFFLOAD_MODULES
from quartet_plugin.space.knobs.optimizer_cpu_offload import OPTIMIZER_CPU_OFFLOAD
from quartet_plugin.space.knobs.optimizer_offload_fraction import OPTIMIZER_OFFLOAD_FRACTION
from quartet_plugin.space.knobs.registry import settings_of
from quartet_plugin.space.knobs.token_dispatcher import TOKEN_DISPATCHER
from quartet_plugin.space.knobs.use_megatron_fsdp import (
    BOUND,
    SHARDS_ALL,
    STRATEGY,
    USE_MEGATRON_FSDP,
)
from quartet_plugin.space.runtime_refusals import refusal

# How the features begin that plans are limited or predicted by; shape and layout have the others.
_READ = (
    "moe_flex",
    "moe_deepep",
    "moe_hybridep",
    "moe_shared",
    "moe_grouped",
    "precision_aware",
    "moe_forced",
    "moe_linear_bias",
    "moe_unfused_bias",
    "overlap_moe",
    "cuda_graphs",
    "graphed_",
    "activation_offload",
    "sliding_window",
    "attention_sink",
)
# And those by which values of settings are legal.
_READ_FOR_SETTINGS = (
    "no_linear_bias",
    "moe_router_padding",
    "moe_router_fp64",
    "cp_comm_by_layer",
)
# Those that only the command's words tell, by which layouts are legal, and values of settings.
_READ_IN_WORDS = WHOLE_NODES | {
    "step_param_gather",
    "bf16_end_layer",
    "hybrid",
    "tp_pp_dp_order",
    "fsdp",
    BEFORE_LAST_FEATURE,
}
_READ_IN_WORDS_FOR_SETTINGS = frozenset({"saved_params", "ddp_num_buckets"})
_OF_EXPERTS = (
    EXPERT_TENSOR_PARALLEL.name,
    TOKEN_DISPATCHER.name,
    SHARED_EXPERT_OVERLAP.name,
    EXPERT_OVERLAP.name,
    DELAYED_WEIGHT_GRADIENTS.name,
    MOE_GROUPED_GEMM.name,
)
# The first release that shards parameters with Megatron-FSDP where no flag says the strategy.
_SHARDS_BY_DEFAULT = Version("0.18")
# Keys of a job that the command says instead.
_SAID = ("model", "batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandJob:
    """The job of a command, the command's own layout, and its flags that a plan does not read.

    `locked` has the axes that plans keep as the command has them, each with the feature that locks it.
    """

    request: PlanRequest
    layout: Layout
    split: Split
    schedule: ScheduleChoice
    unread: tuple[str, ...]
    locked: Mapping[Axis, str]


def job_of_command(
    command: Command,
    *,
    sections: Mapping[str, Any],
    vocab_size: int | None = None,
    devices: Mapping[str, DeviceSpec] | None = None,
    folder: Path | None = None,
    release: str = DEFAULT_RELEASE,
) -> CommandJob:
    """The same request that a JOB.yaml with the command's model and batch makes.

    `sections` are those of a JOB.yaml that a command does not say: `cluster`, `search`, `cost`; a cluster
    that is a device's name has as many devices as the command starts processes. `vocab_size` is that of the
    tokenizer, for a command that does not say it, `release` that of Megatron. Raises ConfigError, naming the
    flag, for what cannot be read.
    """
    if command.starter == "other":
        raise ConfigError(
            f"command {command.program!r}: not supported here: only torchrun's or python's words can be "
            "read without starting them; write the command from torchrun on"
        )
    if command.entry == DEEPSPEED_MODULE:
        raise ConfigError("a DeepSpeed command: its model is not in flags; tune it with `quartet tune`")
    if command.entry == BRIDGE_MODULE:
        raise ConfigError(
            "a Megatron-Bridge command: its model is in a configuration that the script makes; tune it with "
            "`quartet tune`, or describe the job in a JOB.yaml"
        )
    said = [name for name in _SAID if name in sections]
    if said:
        raise ConfigError(f"{said[0]}: given by the command as well; remove the section, or the command")
    args, unread = read_arguments(command.arguments)
    shape = _shape(args, vocab_size)
    cluster = sections.get("cluster")
    if isinstance(cluster, str):
        cluster = _devices_of_command(cluster, command)
    elif cluster is None:
        raise ConfigError(
            "cluster: missing; name it with --cluster: a cluster file, or a device such as H100"
        )
    search, cost = _section(sections, "search"), _section(sections, "cost")
    if args.context_parallel_size > 1:
        search.setdefault("context_parallel", "auto")
    world_size = command.num_processes if command.starter != "python" else None
    data = {"model": _model(args, shape), "cluster": cluster, "search": search, "cost": cost}
    # The batch follows from the layout where no flag says it, and the layout from the number of devices.
    draft = parse_job(
        {**data, "batch": {"global_batch_size": 1}},
        where="command",
        devices=devices,
        folder=folder,
        has_command=True,
    )
    num_devices = draft.machines.num_devices
    if world_size not in (None, num_devices):
        raise ConfigError(
            f"cluster: {num_devices} devices; the command starts {world_size} processes: describe the "
            "devices that the command trains on"
        )
    layout = layout_of(args, world_size=num_devices)
    _check_expert_shards(args, layout)
    _check_sharding(args, words=command.arguments, release=release)
    if has_mtp_on_inner_stage(args):
        raise ConfigError(
            "--pipeline-model-parallel-layout: multi-token prediction before the last stage; a plan has its "
            "layers on the last one (Ett|tmL), or on the stage before the last one (Ett|tm|L)"
        )
    batch = args.global_batch_size or layout.micro_batch_size * layout.data_parallel
    if "tokens" not in cost:
        cost |= _tokens(args, batch)
    whole = {**data, "cost": cost, "batch": {"global_batch_size": batch}}
    request = parse_job(whole, where="command", devices=devices, folder=folder, has_command=True)
    features, split, schedule = features_of_command(command), split_of(args), schedule_of(args)
    locked = kept_axes(features, request.search)
    kept = with_kept_axes(
        request.search, locked=locked, features=features, layout=layout, split=split, schedule=schedule
    )
    return CommandJob(
        # The command's own padding, so that the plan fits the command.
        request=replace(
            request,
            shape=shape,
            vocab_size=None,
            experts=experts_of(args),
            mtp_kinds=mtp_kinds_of(args),
            logged_expert_layers=logged_expert_layers_of(args),
            search=kept,
            features=_features(args, kept, every=features),
            settings=_settings(args, kept),
            batching_features=batching_features(features),
            baseline_split=split.transformer_layers_per_stage,
            no_custom_schedules=refusal(arguments_in(command.arguments)),
            release=release,
        ),
        layout=layout,
        split=split,
        schedule=schedule,
        unread=_unread_flags(unread, kept, has_experts=bool(args.num_experts)),
        locked=locked,
    )


def _settings(args: Namespace, search: SearchConfig) -> tuple[Setting, ...]:
    """The command's settings that plans are predicted by: of experts, of offload, of shared sequences.

    All of them if any is searched.
    """
    is_searched = bool(searched_settings(search))
    experts = _OF_EXPERTS if args.num_experts else ()
    on_host = (OPTIMIZER_CPU_OFFLOAD.name, OPTIMIZER_OFFLOAD_FRACTION.name)
    offload = on_host if args.optimizer_cpu_offload else ()
    context = (CP_COMM_TYPE.name, SIZES) if CP_COMM_TYPE.read(args) != P2P else (SIZES,)
    modules = (OFFLOAD_MODULES.name,) if args.fine_grained_activation_offloading else ()
    sharding = (USE_MEGATRON_FSDP.name,) if args.use_megatron_fsdp or _may_shard(search) else ()
    read = (*experts, *offload, *modules, *context, *sharding)
    return tuple(
        setting
        for setting in settings_of(args)
        if setting.name in read or (is_searched and setting.name != USE_MEGATRON_FSDP.name)
    )


def _may_shard(search: SearchConfig) -> bool:
    """Whether a search turns Megatron-FSDP on or off."""
    return search.requested(USE_MEGATRON_FSDP.name) != (STOCK,)


def _unread_flags(flags: tuple[str, ...], search: SearchConfig, *, has_experts: bool) -> tuple[str, ...]:
    """The flags that plans do not read: without those of settings, where a setting is searched.

    Whether layers have biases decides about the degrees of a model with experts.
    """
    biases = ("disable_bias_linear", "no_bias_dropout_fusion") if has_experts else ()
    read = {*READ_FOR_KEPT_AXES, *biases, *(FOR_SETTINGS if searched_settings(search) else ())}
    return tuple(flag for flag in flags if flag[2:].replace("-", "_") not in read)


def _features(args: Namespace, search: SearchConfig, *, every: Iterable[str]) -> tuple[str, ...]:
    """Those of `every` feature by which plans are limited or predicted and that no other field has."""
    is_searched = bool(searched_settings(search))
    read = (*_READ, *(_READ_FOR_SETTINGS if is_searched else ()))
    in_words = _READ_IN_WORDS | (_READ_IN_WORDS_FOR_SETTINGS if is_searched else frozenset())
    if args.use_megatron_fsdp or _may_shard(search):
        in_words |= frozenset(BOUND)
    named = {name for name in features_of(args) if name.startswith(read)}
    return tuple(sorted(named | in_words.intersection(every)))


def _check_expert_shards(args: Namespace, layout: Layout) -> None:
    """Raises ConfigError for experts that are cut as no plan has it, or that EP cannot spread."""
    shards, tp = args.expert_tensor_parallel_size, layout.tensor_parallel
    if shards not in (None, WHOLE, tp):
        raise ConfigError(
            f"--expert-tensor-parallel-size: {shards}; must be {WHOLE}, or the tensor-parallel size ({tp}), "
            "for a plan, or left out"
        )
    devices, words = layout.data_parallel * layout.context_parallel, "DP x CP"
    if shards == WHOLE:
        devices, words = devices * tp, "TP x DP x CP"
    if args.num_experts and devices % layout.expert_parallel:
        raise ConfigError(
            f"--expert-model-parallel-size: {layout.expert_parallel}; must divide {words} ({devices})"
        )


def _check_sharding(args: Namespace, *, words: Sequence[str], release: str) -> None:
    """Raises ConfigError for a strategy of Megatron-FSDP that the cost model does not know."""
    flag, strategy, note = flag_of(STRATEGY), getattr(args, STRATEGY), ""
    if not args.use_megatron_fsdp:
        return
    if release_of(release) < _SHARDS_BY_DEFAULT and all(name != flag for name, _ in flags_among(words)):
        strategy, note = "no_shard", f", the default of Megatron {release}"
    if strategy != SHARDS_ALL:
        raise ConfigError(
            f"{flag}: {strategy}{note}; must be {SHARDS_ALL} with "
            f"{USE_MEGATRON_FSDP.flag}: the cost model supports no other; or tune the command with "
            "`quartet tune`"
        )


def _section(sections: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = sections.get(name) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{name}: {shown(section)}: must be a mapping")
    return dict(section)


def _shape(args: Namespace, vocab_size: int | None) -> ModelShape:
    size = args.padded_vocab_size
    if size is None:
        plain = args.vocab_size or vocab_size
        if plain is None:
            raise ConfigError(
                "--padded-vocab-size: missing; the command's tokenizer determines it; give --vocab-size "
                "before the --"
            )
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        size = -(-plain // multiple) * multiple
    return shape_of(args, vocab_size=size)


def _model(args: Namespace, shape: ModelShape) -> dict[str, Any]:
    """The `model` section that the command's flags say, without a hybrid model's layers."""
    experts, latent = experts_of(args), latent_attention_of(args)
    model = {**dump(shape), "precision": "fp8" if args.fp8 else precision_of(args)}
    model.pop("layer_kinds", None)
    if latent is not None:
        del model["kv_channels"], model["num_query_groups"]
        model["latent_attention"] = dump(latent)
    if experts is not None:
        model |= {
            "num_experts": experts.num_experts,
            "experts_per_token": experts.experts_per_token,
            "expert_ffn_hidden_size": experts.ffn_hidden_size,
            "shared_expert_ffn_hidden_size": experts.shared_ffn_hidden_size,
            "num_dense_layers": experts.num_dense_layers,
        }
    num_further = num_mtp_layers_of(args)
    return model | ({"mtp_layers": num_further} if num_further else {})


def _devices_of_command(device: str, command: Command) -> dict[str, Any]:
    """The cluster section of a device's name: as many as the command starts processes."""
    count, nodes = command.num_processes, command.num_nodes
    if count is None or nodes is None:
        raise ConfigError(
            f"cluster: {device!r}; the command does not say how many processes it starts: write --nnodes and "
            "--nproc-per-node as numbers, or name a cluster file"
        )
    return {"device": device, "num_nodes": nodes, "devices_per_node": count // nodes}


def _tokens(args: Namespace, batch: int) -> dict[str, float]:
    """The tokens that the command trains on, where it says them."""
    sequences = args.train_samples or (args.train_iters or 0) * batch
    return {"tokens": float(sequences * args.seq_length)} if sequences else {}
