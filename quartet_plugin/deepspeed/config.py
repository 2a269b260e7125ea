"""The parts of a ds_config that the adapter reads: batch sizes, ZeRO, clipping, side effects."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.model.layout import Layout
from quartet_plugin.protocol.ds_config import SECTION, load_config

# What DeepSpeed 0.19 clips at where a ds_config does not say.
DEFAULT_CLIPPING = 1.0

# Sizes, in elements, of what ZeRO 1 reduces and gathers at once: tuned where a plan says them.
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size")

# Sections that start services, profilers or writers, and switches that print.
_SIDE_EFFECTS = (
    *("tensorboard", "wandb", "comet", "csv_monitor", "flops_profiler", "comms_logger", "monitor_config"),
    *("wall_clock_breakdown", "memory_breakdown", "dump_state", "prescale_breakdown"),
)
_REFUSED = {
    "autotuning": "DeepSpeed's own tuner would start further processes",
    "elasticity": "the number of processes would change",
}

Precision = Literal["fp32", "bf16", "fp16"]


def as_config(value: Any) -> dict[str, Any] | None:
    """A config argument of `deepspeed.initialize` as a copied dictionary; None where it is none.

    It may be a mapping, a file's path or a text in base64. Raises ConfigError for a file that cannot be read,
    and for a content that is no object.
    """
    if isinstance(value, Mapping):
        return copy.deepcopy(dict(value))
    return load_config(value) if isinstance(value, str | Path) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The batch sizes of a ds_config, in samples and in microbatches; any two determine the third."""

    global_batch_size: int
    micro_batch_size: int
    num_microbatches: int


def batch_sizes(config: Mapping[str, Any], *, data_parallel: int) -> BatchSizes:
    """The batch sizes as DeepSpeed resolves them. Raises ConfigError where they contradict each other."""
    total = _size(config, "train_batch_size")
    micro = _size(config, "train_micro_batch_size_per_gpu")
    steps = _size(config, "gradient_accumulation_steps")
    if total is None:
        if micro is None:
            raise ConfigError("train_batch_size: missing; give it or train_micro_batch_size_per_gpu")
        total = micro * (steps or 1) * data_parallel
    if micro is None:
        micro = total // data_parallel // (steps or 1)
    if steps is None:
        steps = total // data_parallel // micro if micro else 0
    if micro * steps * data_parallel != total:
        raise ConfigError(
            f"train_batch_size: {total}; must be train_micro_batch_size_per_gpu x "
            f"gradient_accumulation_steps x data parallel size ({micro} x {steps} x {data_parallel})"
        )
    return BatchSizes(global_batch_size=total, micro_batch_size=micro, num_microbatches=steps)


def _size(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    if value is None or value == "auto":
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}: {value!r}; must be a number above 0")
    return value


def zero_stage(config: Mapping[str, Any]) -> int:
    """The ZeRO stage of a ds_config."""
    stage = _zero_section(config).get("stage", 0)
    return int(stage) if isinstance(stage, int) else 0


def _zero_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ZeRO settings as DeepSpeed reads them: `true` is stage 1, with buckets of `allgather_size`."""
    section = config.get("zero_optimization")
    if section is True:
        size = config.get("allgather_size")
        return {"stage": 1} if size is None else {"stage": 1, "allgather_bucket_size": size}
    return section if isinstance(section, Mapping) else {}


def precision(config: Mapping[str, Any]) -> Precision:
    """The number format that the forward pass computes in."""
    for name in ("bf16", "bfloat16", "fp16"):
        section = config.get(name)
        if isinstance(section, Mapping) and section.get("enabled") in (True, "auto"):
            return "fp16" if name == "fp16" else "bf16"
    return "fp32"


def check_zero(config: Mapping[str, Any]) -> None:
    """Raise PlanError for a ZeRO stage that pipelines do not support."""
    stage = zero_stage(config)
    if stage > 1:
        raise PlanError(
            f"zero_optimization.stage: {stage}; a PipelineModule supports 0 or 1: its gradients "
            "are not sharded before the end of the step"
        )


def check_precision(config: Mapping[str, Any], *, has_fp16: bool) -> None:
    """Raise PlanError for a number format that the device does not support; `has_fp16`: it supports fp16."""
    if precision(config) == "fp16" and not has_fp16:
        raise PlanError("fp16.enabled: true; this device does not compute in fp16: use bf16 or fp32")


def sums_gradients(config: Mapping[str, Any]) -> bool:
    """Whether the copies' gradients are summed and not averaged: their scale then depends on DP."""
    return str(config.get("gradient_allreduce_op")).lower() == "sum"


def check_summed_gradients(config: Mapping[str, Any], *, before: int, after: int) -> None:
    """Raise PlanError where gradients are summed over `after` copies, and the script has `before`."""
    if sums_gradients(config) and before != after:
        raise PlanError(
            f"gradient_allreduce_op: sum; {after} copies of the model change the scale of the gradients: "
            f"keep the script's data parallel size {before}, or set mean"
        )


def clips_by_first_stage(config: Mapping[str, Any], *, pipeline_parallel: int) -> bool:
    """Whether DeepSpeed clips every stage by the norm of the first stage's gradients alone.

    It does so in fp32 without ZeRO: then what is trained depends on which layers the first device holds.
    """
    return pipeline_parallel > 1 and zero_stage(config) == 0 and clips_in_fp32(config)


def clips_in_fp32(config: Mapping[str, Any]) -> bool:
    """Whether gradients are in fp32 and clipped: ZeRO 0 and 1 then clip several stages by different norms."""
    clipping = config.get("gradient_clipping", DEFAULT_CLIPPING)
    return isinstance(clipping, int | float) and clipping > 0 and precision(config) == "fp32"


def clipping_notice(config: Mapping[str, Any]) -> str:
    """The line that warns the user of a job for which `clips_by_first_stage` holds."""
    clipping = config.get("gradient_clipping", f"{DEFAULT_CLIPPING} (the default)")
    return (
        f"gradient_clipping {clipping}: in fp32 with ZeRO 0 DeepSpeed "
        "clips all stages by the first stage's gradient norm alone; set zero_optimization.stage 1, or "
        "gradient_clipping 0, and stages train what one device would"
    )


def planned_config(config: Mapping[str, Any], *, layout: Layout, global_batch_size: int) -> dict[str, Any]:
    """The ds_config with a plan's layout in it and without the `quartet` section."""
    planned = {
        **{name: value for name, value in config.items() if name != SECTION},
        "train_batch_size": global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.num_microbatches(global_batch_size),
    }
    stage = 1 if layout.distributed_optimizer else 0
    zero = {"stage": stage} | {name: size for name in BUCKETS if (size := getattr(layout, name)) is not None}
    if zero_stage(config) != stage or len(zero) > 1:
        planned["zero_optimization"] = {**_zero_section(config), **zero}
    return planned


def strip_side_effects(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The ds_config of a trial, which starts no service, profiler or writer, and the dropped settings' names.

    Raises ConfigError for a section beside which no trial could run.
    """
    for name, reason in _REFUSED.items():
        section = config.get(name)
        if isinstance(section, Mapping) and section.get("enabled"):
            raise ConfigError(f"{name}: {reason}; omit it")
    changed = dict(config)
    removed = [name for name in _SIDE_EFFECTS if changed.pop(name, None)]
    changed["steps_per_print"] = 10**9
    return changed, removed
