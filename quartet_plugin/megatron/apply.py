"""Applies a plan to a command: checks the job that the plan was made for, then sets flags and RANK.

Only flags that differ from the user's are changed, and every flag of the user that is replaced is named.
"""

import math
import os
import shlex
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from quartet_plugin.errors import PlanError, QuartetError
from quartet_plugin.megatron.arguments import Flags
from quartet_plugin.megatron.describe import FRAMEWORK
from quartet_plugin.megatron.device_connections import set_connections
from quartet_plugin.megatron.seams import Wrapper
from quartet_plugin.megatron.support import tensor_partition_reason
from quartet_plugin.model.hierarchical_context import SIZES
from quartet_plugin.model.megatron_arguments import (
    REFUSED_WITH_PLAN,
    hybrid_pattern,
    hybrid_pattern_of,
    layout_of,
    logged_expert_layers_of,
    model_words,
    num_mtp_layers_of,
    schedule_of,
    shape_of,
    split_of,
    value_in_words,
)
from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.model.schema import dump
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.rank.mapping import assign, gather_processes, table_of
from quartet_plugin.rank.nccl import keep_devices
from quartet_plugin.rank.rendezvous import RankEnv, Rendezvous
from quartet_plugin.rank.session import print_notes
from quartet_plugin.schedule.placement import loop
from quartet_plugin.space.expert_stages import fault_of_plan
from quartet_plugin.space.knobs.cp_comm_type import CP_COMM_TYPE
from quartet_plugin.space.knobs.recompute import RECOMPUTE_ARGUMENTS
from quartet_plugin.space.knobs.recompute_layers import RECOMPUTE_METHOD, RECOMPUTE_NUM_LAYERS
from quartet_plugin.space.knobs.recompute_modules import RECOMPUTE_MODULES
from quartet_plugin.space.knobs.registry import setting_knob
from quartet_plugin.space.knobs.split import SPLIT_ARGUMENTS

# Sizes whose flag has their name; Megatron derives the last two from the first three where they are absent.
_SIZES = ("num_layers", "hidden_size", "num_attention_heads")
_DERIVED_SIZES = ("ffn_hidden_size", "kv_channels")
_DEGREE_FLAGS = {
    "tensor_parallel": "tensor_model_parallel_size",
    "pipeline_parallel": "pipeline_model_parallel_size",
    "context_parallel": "context_parallel_size",
    "expert_parallel": "expert_model_parallel_size",
    "micro_batch_size": "micro_batch_size",
    "sequence_parallel": "sequence_parallel",
    "distributed_optimizer": "use_distributed_optimizer",
}
# A plan scales width and depth; these would change the task.
_FIXED_SHAPE = (
    "seq_length",
    "vocab_size",
    "max_position_embeddings",
    "gated_ffn",
    "tied_embeddings",
    "position_embedding",
)


def apply_plan(
    plan: Plan,
    *,
    flags: Flags,
    words: Sequence[str],
    version: str,
    rendezvous: Rendezvous,
    rank_env: RankEnv,
    on_cpu: bool,
) -> tuple[list[str], Wrapper]:
    """The command's words with the plan's values; sets RANK, and one rank prints the changes.

    Also returns a wrapper of Megatron's tokenizer builder that checks the vocabulary, which is known only
    then. Raises AgreedRefusalError on all ranks when the plan does not fit on one of them.
    """
    processes = gather_processes(rendezvous, rank_env)
    refusal: QuartetError | None = None
    edited, rank = list(words), rank_env.launch_rank
    notes: list[str] = []
    moves_ranks = False
    try:
        user = flags.values(words)
        check_fit(plan, user, version=version, world_size=rank_env.world_size)
        edited, notes = rewrite(plan, flags=flags, words=words)
        planned = flags.values(edited)
        assignment = assign(plan, processes, args=planned, is_trial=rank_env.is_trial)
        rank = assignment.rank_of[rank_env.launch_rank]
        if assignment.note is not None:
            notes.append(assignment.note)
        moves_ranks = not assignment.is_stock
        if moves_ranks:
            notes.append(table_of(processes, assignment))
        if not on_cpu:
            notes += set_connections(user, planned, environment=os.environ)
    except QuartetError as error:
        refusal = error
    rendezvous.agree_or_raise("fit", refusal)
    if moves_ranks:
        keep_devices(rank_env.local_rank or 0)
    os.environ["RANK"] = str(rank) if rank_env.world_size > 1 else os.environ.get("RANK", "0")
    print_notes(notes, rank_env=rank_env)
    return edited, partial(_vocabulary_check, plan, user)


def check_fit(plan: Plan, user: Namespace, *, version: str, world_size: int) -> None:
    """Compare the plan with the user's flags. Raises PlanError with every difference of its `made_for`."""
    for dest, reason in REFUSED_WITH_PLAN.items():
        # A custom schedule is made for any number of microbatches.
        allowed = dest == "rampup_batch_size" and plan.schedule.custom is not None
        if getattr(user, dest, None) and not allowed:
            raise PlanError(f"--{dest.replace('_', '-')} cannot be used with a plan: {reason}")
    partition = plan.layout.tensor_partition
    if partition is not None and (unable := tensor_partition_reason(user)) is not None:
        raise PlanError(f"layout.tensor_partition: {partition.label}; {unable}")
    made_for = plan.made_for
    layout = layout_of(user, world_size=world_size)
    batch = user.global_batch_size or user.micro_batch_size * layout.data_parallel
    # The tokenizer decides the vocabulary, so it is compared when Megatron has built that.
    shape = dump(_comparable_shape(user, made_for.shape))
    made_for.check_same_job(
        {
            "framework": FRAMEWORK,
            "framework_version": version,
            "world_size": world_size,
            "global_batch_size": batch,
            **shape,
            "layer_kinds": shape.get("layer_kinds"),
            "mtp_layers": num_mtp_layers_of(user) or None,
            **({} if made_for.job is None else model_words(user)),
        }
    )
    if (fault := fault_of_plan(plan, logged_expert_layers_of(user))) is not None:
        raise PlanError(fault)
    for name in _FIXED_SHAPE:
        if getattr(plan.shape, name) != getattr(made_for.shape, name):
            raise PlanError(
                f"shape.{name}: {getattr(plan.shape, name)}; a plan may change only width and depth"
            )


def _comparable_shape(args: Namespace, planned: ModelShape) -> ModelShape:
    """The arguments' shape with the plan's vocabulary.

    Plans of older releases are compared without what shapes did not have then: the order of a hybrid model's
    layers, the framework's letters for them, and the channels of a state.
    """
    shape = shape_of(args, vocab_size=planned.vocab_size)
    kinds, known = shape.layer_kinds, planned.layer_kinds
    if kinds is None or known is None:
        return shape
    if known.pattern is None:
        kinds = kinds.without_pattern
    if known.framework_pattern is None:
        kinds = replace(kinds, framework_pattern=None)
    if known.state_size is None:
        kinds = replace(kinds, state_size=None)
    return replace(shape, layer_kinds=kinds)


def rewrite(plan: Plan, *, flags: Flags, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words with the plan's flags, and at most one line about flags that these replace and add.

    Raises PlanError for a part of the plan that stock flags cannot express.
    """
    values, remove = changes_of(plan, flags.values(words))
    edited, removed = flags.edit(words, remove=remove | set(values), append=flags.words_for(values))
    check_result(plan, flags.values(edited))
    before, by_name = flags.explicit_values(words), {item.dest: item for item in removed}
    added = flags.words_for({name: value for name, value in values.items() if name not in by_name})
    replaced = []
    for item in by_name.values():
        given = value_in_words(before[item.dest])
        old = "" if isinstance(given, bool) else f" {_in_words(given)}"
        new = values.get(item.dest)
        now = "left out" if new is None else "set" if new is True else _in_words(new)
        replaced.append(f"{item.flag}{old} -> {now}")
    parts = [f"replaces {', '.join(replaced)}"] if replaced else []
    if added:
        parts.append(f"adds {shlex.join(added)}")
    return edited, [f"the plan {' and '.join(parts)}"] if parts else []


def _in_words(value: Any) -> str:
    """A value of a flag as a command has it."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def changes_of(plan: Plan, user: Namespace) -> tuple[dict[str, Any], set[str]]:
    """The arguments that the plan sets, and those whose flags it leaves out, in the user's arguments.

    Raises PlanError for a part of the plan that arguments cannot express.
    """
    values: dict[str, Any] = {}
    remove: set[str] = set()
    _add_shape(plan, user, values, remove)
    _add_layout(plan, user, values, remove)
    _add_split(plan, user, values, remove)
    if user.global_batch_size is None:
        values["global_batch_size"] = plan.made_for.global_batch_size
    return values, remove


def _add_shape(plan: Plan, user: Namespace, values: dict[str, Any], remove: set[str]) -> None:
    if plan.shape == plan.made_for.shape:
        return
    # First the sizes themselves, then those that Megatron would derive from them otherwise than planned.
    changed = Namespace(**vars(user))
    for name in _SIZES:
        setattr(changed, name, getattr(plan.shape, name))
    # The command's query groups need not divide the plan's heads.
    groups = changed.num_query_groups if changed.group_query_attention else changed.num_attention_heads
    changed.group_query_attention = False
    resolved = shape_of(changed, vocab_size=plan.shape.vocab_size)
    for name in (*_SIZES, *_DERIVED_SIZES):
        planned = getattr(plan.shape, name)
        if getattr(user, name) != planned and (name in _SIZES or getattr(resolved, name) != planned):
            values[name] = planned
    if groups != plan.shape.num_query_groups:
        if plan.shape.num_query_groups == plan.shape.num_attention_heads:
            remove |= {"group_query_attention", "num_query_groups"}
        else:
            values["group_query_attention"] = True
            values["num_query_groups"] = plan.shape.num_query_groups


def _add_layout(plan: Plan, user: Namespace, values: dict[str, Any], remove: set[str]) -> None:
    layout = plan.layout
    current = layout_of(user, world_size=layout.world_size)
    for field, dest in _DEGREE_FLAGS.items():
        planned = getattr(layout, field)
        # Megatron ignores --sequence-parallel without tensor parallelism: that switch is compared as given.
        value = getattr(user, dest) if field == "sequence_parallel" else getattr(current, field)
        if value == planned:
            continue
        if planned is False:
            remove.add(dest)
        else:
            values[dest] = planned
    if current.recompute != layout.recompute:
        remove |= set(RECOMPUTE_ARGUMENTS)
        if layout.recompute != "none":
            values["recompute_granularity"] = layout.recompute
        if layout.recompute == "full":
            # Megatron has no default for these; the settings below may have others.
            values |= {knob.destination: knob.read(user) for knob in (RECOMPUTE_METHOD, RECOMPUTE_NUM_LAYERS)}
    is_distributed = getattr(user, "distribute_saved_activations", False)
    if is_distributed and (layout.tensor_parallel == 1 or layout.sequence_parallel):
        # Megatron distributes over tensor-parallel devices what these do not divide by themselves.
        remove.add("distribute_saved_activations")
    for setting in layout.settings or ():
        knob = setting_knob(setting)
        if knob.read(user) != setting.value:
            arguments = knob.arguments(setting.value)
            values |= {name: value for name, value in arguments.items() if value is not None}
            remove |= {name for name, value in arguments.items() if value is None}
    remove |= _hierarchy_left_out(plan, user) - values.keys()
    if RECOMPUTE_MODULES.destination in values and getattr(user, "moe_layer_recompute", False):
        # It adds a module to the plan's; without it nothing else need say that recompute is selective.
        remove.add("moe_layer_recompute")
        if layout.recompute == "selective" and user.recompute_granularity != "selective":
            values["recompute_granularity"] = "selective"
    if "cuda_graph_modules" in values:
        # The parts by their older flag, which Megatron refuses beside the newer one.
        remove.add("cuda_graph_scope_deprecated")
    if current.tensor_parallel != layout.tensor_parallel and _expert_shards(user) != 1:
        # Megatron then takes the tensor-parallel size for the experts, too, as plans do.
        remove.add("expert_tensor_parallel_size")
    if current.tensor_parallel != layout.tensor_parallel and getattr(user, "padded_vocab_size", None) is None:
        # Megatron pads by the tensor-parallel size: without this the model would change with the layout.
        size = _planned_vocabulary(plan, user)
        if size % layout.tensor_parallel:
            raise PlanError(
                f"layout.tensor_parallel: {layout.tensor_parallel}; must divide the padded vocabulary "
                f"({size}); pad the command's with --padded-vocab-size, or plan with another size"
            )
        values["padded_vocab_size"] = size


def _hierarchy_left_out(plan: Plan, user: Namespace) -> set[str]:
    """The user's arguments of shared sequences that Megatron refuses with the plan's degree.

    The product of the sizes must be the degree, whatever the type of communication is, and a type that needs
    sizes has none of a degree of 1 (`validate_args`).
    """
    sizes, degree = getattr(user, SIZES, None), plan.layout.context_parallel
    if not sizes or math.prod(sizes) == degree:
        return set()
    return {SIZES} if degree > 1 else {SIZES, CP_COMM_TYPE.destination}


def _expert_shards(user: Namespace) -> int | None:
    """The stated size of the experts' tensor parallelism, which not every configuration has."""
    size: int | None = getattr(user, "expert_tensor_parallel_size", None)
    return size


def _add_split(plan: Plan, user: Namespace, values: dict[str, Any], remove: set[str]) -> None:
    layout = plan.layout
    current = layout_of(user, world_size=layout.world_size)
    same_stages = (current.pipeline_parallel, current.virtual_stages) == (
        layout.pipeline_parallel,
        layout.virtual_stages,
    )
    # Megatron asks the placement for the layers of a stage only where the command has a layout.
    has_layout = bool(hybrid_pattern(user) or getattr(user, "pipeline_model_parallel_layout", None))
    if not same_stages or _split_or_none(user) != plan.split or not (has_layout or _is_megatrons_order(plan)):
        remove |= {"pipeline_model_parallel_layout", *SPLIT_ARGUMENTS}
        if hybrid_pattern(user):
            if not getattr(user, "hybrid_layer_pattern", None):
                raise PlanError(
                    "split: the model has no --hybrid-layer-pattern, whose | are its stages; keep the split "
                    "and the stages of the command"
                )
            # A hybrid model takes no --pipeline-model-parallel-layout (validate_args).
            values["hybrid_layer_pattern"] = hybrid_pattern_of(user, plan.split)
        elif layout.pipeline_parallel > 1:
            values["pipeline_model_parallel_layout"] = plan.split.layout_text(
                mtp_layers=getattr(user, "mtp_num_layers", None) or 0
            )
    if (
        layout.pipeline_parallel == 2
        and layout.virtual_stages > 1
        and not getattr(user, "overlap_p2p_comm", True)
    ):
        # Megatron refuses both together on two devices, also where the runtime has transfers of its own.
        remove.add("overlap_p2p_comm")
    if layout.virtual_stages == 1 and getattr(user, "overlap_p2p_comm_warmup_flush", False):
        # Megatron refuses it where it does not interleave several stages of a device.
        remove.add("overlap_p2p_comm_warmup_flush")
    group = plan.schedule.group
    if plan.schedule.name != "interleaved":
        if current.virtual_stages > 1:
            remove.add("microbatch_group_size_per_vp_stage")
    elif group != (getattr(user, "microbatch_group_size_per_vp_stage", None) or layout.pipeline_parallel):
        values["microbatch_group_size_per_vp_stage"] = group


def _is_megatrons_order(plan: Plan) -> bool:
    """Whether the stages go round the ranks, as Megatron places them by itself."""
    layout = plan.layout
    return plan.schedule.placement in (None, loop(layout.pipeline_parallel, layout.virtual_stages))


def _split_or_none(user: Namespace) -> Split | None:
    """The user's split; None where Megatron could not divide the layers, so that any plan differs."""
    try:
        return split_of(user)
    except QuartetError:
        return None


def check_result(plan: Plan, args: Namespace) -> None:
    """Raise PlanError where the changed arguments do not say what the plan says; an invariant of a change."""
    # How a layer is cut has no flags: the plugin builds it out of the plan.
    layout = replace(
        layout_of(args, world_size=plan.layout.world_size), tensor_partition=plan.layout.tensor_partition
    )
    for setting in plan.layout.settings or ():
        layout = layout.with_setting(setting.name, setting_knob(setting).read(args))
    written = {
        "shape": _comparable_shape(args, plan.shape),
        "layout": layout,
        "split": split_of(args),
        "schedule": schedule_of(args),
    }
    if plan.schedule.custom is not None:
        # The flags name Megatron's schedule for these stages, which the custom schedule replaces.
        del written["schedule"]
    wrong = [name for name, value in written.items() if value != getattr(plan, name)]
    if wrong:
        raise PlanError(
            f"{wrong[0]}: {getattr(plan, wrong[0])} cannot be written in Megatron's flags; "
            f"they would say {written[wrong[0]]}"
        )


def _vocabulary_check(plan: Plan, user: Namespace, build_tokenizer: Callable[..., Any]) -> Callable[..., Any]:
    """Compare the vocabulary when the tokenizer is there, padded as the user's own flags would pad it."""

    def build_and_check(args: Namespace) -> Any:
        tokenizer = build_tokenizer(args)
        size = _padded_size(tokenizer.vocab_size, user)
        planned = _planned_vocabulary(plan, user)
        if size is not None and size != planned:
            raise PlanError(
                f"the plan was made for another job: vocab_size {size} (plan: {planned}); "
                "make one with `quartet tune`"
            )
        return tokenizer

    return build_and_check


def _planned_vocabulary(plan: Plan, user: Namespace) -> int:
    """The padded vocabulary that the plan has under this command.

    A plan that was made without a run knows the job's vocabulary; the command pads it for its own layout.
    """
    job = plan.made_for.job
    known = None if job is None else job.vocab_size
    padded = None if known is None else _padded_size(known, user)
    return plan.shape.vocab_size if padded is None else padded


def _padded_size(vocab_size: int, user: Namespace) -> int | None:
    padded = getattr(user, "padded_vocab_size", None)
    if padded is not None:
        return int(padded)
    if not getattr(user, "pad_vocab_size", True):
        return None
    multiple = user.make_vocab_size_divisible_by * user.tensor_model_parallel_size
    return int(-(-vocab_size // multiple) * multiple)
