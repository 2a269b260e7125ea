"""The axes that plans of a command keep at its own values: those that a study of the command keeps."""

from collections.abc import Mapping
from typing import Any

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import Command
from quartet_plugin.launchers.megatron_words import arguments_in
from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.megatron_arguments import features_of
from quartet_plugin.model.plan import STOCK, ScheduleChoice, Split
from quartet_plugin.planner.job import PlanSearch
from quartet_plugin.space.config import STOCK_NAMES
from quartet_plugin.space.features import (
    PARTS_KEPT,
    PIPELINE_KEPT,
    TOKENS_KEPT,
    Axis,
    locked_axes,
    objective_axes,
)
from quartet_plugin.space.knobs.context_parallel import CONTEXT_PARALLEL
from quartet_plugin.space.knobs.cp_comm_type import CP_COMM_TYPE, HIERARCHICAL_SIZES
from quartet_plugin.space.knobs.distributed_optimizer import DISTRIBUTED_OPTIMIZER, sharding_feature
from quartet_plugin.space.knobs.expert_tensor_parallel import EXPERT_TENSOR_PARALLEL
from quartet_plugin.space.knobs.knob import LayoutKnob, SettingKnob, Value, kept_fault
from quartet_plugin.space.knobs.mtp_stage import MTP_STAGE, mtp_stage_of
from quartet_plugin.space.knobs.pipeline_parallel import PIPELINE_PARALLEL
from quartet_plugin.space.knobs.registry import LAYOUT_KNOBS
from quartet_plugin.space.knobs.tensor_parallel import TENSOR_PARALLEL
from quartet_plugin.space.knobs.tensor_partition import TENSOR_PARTITION

# The flags of data, router, evaluation and optimizer that say what a plan keeps, and nothing else that it
# needs.
READ_FOR_KEPT_AXES = (
    "dataloader_type",
    "eval_global_batch_size",
    "eval_micro_batch_size",
    "eod_mask_loss",
    "moe_aux_loss_coeff",
    "moe_router_load_balancing_type",
    "muon_tp_mode",
    "overlap_param_gather_with_optimizer_step",
)


def features_of_command(command: Command) -> tuple[str, ...]:
    """The features of a command that limit its plans, as far as its flags say them."""
    return tuple(features_of(arguments_in(command.arguments)))


def kept_axes(features: tuple[str, ...], search: PlanSearch) -> dict[Axis, str]:
    """The axes that stay as the command has them, each with the feature that locks it.

    Width and depth stay unless they are asked for, so their feature is named only then.
    """
    locked = locked_axes(features, change_class=search.change_class)
    return {axis: name for axis, name in locked.items() if search.scaling or axis is not Axis.SCALING}


def with_kept_axes(
    search: PlanSearch,
    *,
    locked: Mapping[Axis, str],
    features: tuple[str, ...],
    layout: Layout,
    split: Split,
    schedule: ScheduleChoice,
) -> PlanSearch:
    """The search with the command's own values on the `locked` axes, whatever it asks for there.

    The distributed optimizer stays as the command has it where another flag needs it, TP where the optimizer
    updates each rank's part of a matrix, PP beside several bf16 layers at an end, TP and CP where a
    router balances the tokens of one rank. Where a plan may change the training objective (class C) only
    stock schedules are left: the parity gate compares with the command.

    Raises ConfigError if the search asks for others alone.
    """
    kept: dict[str, Any] = {
        knob.name: (_value_of(knob, layout),)
        for knob in LAYOUT_KNOBS
        if knob.axis in locked and knob.is_of(MEGATRON.framework)
    }
    if Axis.DEGREES not in locked and (feature := sharding_feature(features)) is not None:
        kept[DISTRIBUTED_OPTIMIZER.name] = (_kept_sharding(search, layout, feature),)
    if "packing" in features:
        # A rule of the knobs, which rules of planned layouts do not see: the feature has axes of its own.
        kept |= dict.fromkeys((CP_COMM_TYPE.name, HIERARCHICAL_SIZES.name), (STOCK,))
    if not TOKENS_KEPT.keys().isdisjoint(features):
        kept |= {knob.name: (_value_of(knob, layout),) for knob in (TENSOR_PARALLEL, CONTEXT_PARALLEL)}
    if not PARTS_KEPT.keys().isdisjoint(features):
        kept[TENSOR_PARALLEL.name] = (layout.tensor_parallel,)
        kept[EXPERT_TENSOR_PARALLEL.name] = (STOCK,)
    if "emerging_optimizer" in features:
        kept[TENSOR_PARTITION.name] = (STOCK,)
    if not PIPELINE_KEPT.keys().isdisjoint(features):
        kept[PIPELINE_PARALLEL.name] = (layout.pipeline_parallel,)
    if Axis.SPLIT in locked:
        kept["split"] = (split.label,)
        if split.mtp_before_last or search.mtp_stage is not None:
            kept[MTP_STAGE.name] = (mtp_stage_of(split),)
    if Axis.SCHEDULE in locked:
        # Whatever locks the schedule keeps the pipeline, too (`space.features.STAGES_KEPT`).
        kept[PIPELINE_PARALLEL.name] = (layout.pipeline_parallel,)
        kept |= {"schedule": (STOCK,), "group": schedule.group and (schedule.group,)}
    elif search.change_class == "C" and objective_axes(features):
        kept["schedule"] = _stock_schedules(search)
    if Axis.MAPPING in locked:
        kept["mapping"] = (STOCK,)
    if Axis.SCALING in locked:
        kept["scaling"] = None
    changed: PlanSearch = search.model_copy(update=kept)
    return changed


def _value_of(knob: LayoutKnob, layout: Layout) -> Value | None:
    """The command's own value as a search asks for it; STOCK where the layout does not state it."""
    is_stated = knob.kind != "partition" and not isinstance(knob, SettingKnob)
    return knob.in_layout(layout) if is_stated else STOCK


def _kept_sharding(search: PlanSearch, layout: Layout, feature: str) -> bool:
    """The command's distributed optimizer, on or off, which a feature of the command keeps."""
    command, asked = layout.distributed_optimizer, search.distributed_optimizer or ()
    if asked and command not in asked:
        fault = kept_fault(asked[0], command, feature)
        words = DISTRIBUTED_OPTIMIZER.request_text(asked[0])
        raise ConfigError(f"search.{DISTRIBUTED_OPTIMIZER.name}: {words}; {fault}")
    return command


def _stock_schedules(search: PlanSearch) -> tuple[str, ...]:
    asked = search.schedule or (STOCK,)
    kept = tuple(name for name in asked if name in (STOCK, *STOCK_NAMES))
    if not kept:
        raise ConfigError(
            f"search.schedule: {asked[0]}; must be {STOCK} with search.change_class C in a job whose loss "
            "depends on its microbatches"
        )
    return kept
