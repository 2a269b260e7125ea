"""The parts of a ds_config that a plan or a trial reads: batch sizes, ZeRO stage, clipping, side effects."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quartet_plugin.deepspeed.settings import SECTION
from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.model.layout import Layout

# What DeepSpeed 0.19 clips at where a ds_config does not say.
DEFAULT_CLIPPING = 1.0

# Sizes, in elements, of what ZeRO 1 reduces and gathers at once: tuned where a plan says them.
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size")

# Sections that start services, profilers or writers.
_SECTIONS = (
    "tensorboard",
    "wandb",
    "comet",
    "csv_monitor",
    "flops_profiler",
    "comms_logger",
    "monitor_config",
)
_SWITCHES = ("wall_clock_breakdown", "memory_breakdown", "dump_state", "prescale_breakdown")
_REFUSED = {
    "autotuning": "DeepSpeed's own tuner would start processes of its own",
    "elasticity": "the number of processes would change",
}

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """DeepSpeed's three sizes, which determine one another."""

    global_batch_size: int
    micro_batch_size: int
    num_microbatches: int


def batch_sizes(config: Mapping[str, Any], *, data_parallel: int) -> BatchSizes:
    """The sizes as DeepSpeed resolves them. Raises ConfigError where they contradict each other."""
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
    """The ZeRO stage."""
    section = config.get("zero_optimization")
    stage = section.get("stage", 0) if isinstance(section, Mapping) else 0
    return int(stage) if isinstance(stage, int) else 0


def precision(config: Mapping[str, Any]) -> Precision:
    """The number format that the forward pass computes in."""
    for name in ("bf16", "bfloat16", "fp16"):
        section = config.get(name)
        if isinstance(section, Mapping) and section.get("enabled") in (True, "auto"):
            return "fp16" if name == "fp16" else "bf16"
    return "fp32"


def check_zero(config: Mapping[str, Any]) -> None:
    """Raises PlanError for a ZeRO stage that pipelines do not have."""
    stage = zero_stage(config)
    if stage > 1:
        raise PlanError(
            f"zero_optimization.stage: {stage}; a PipelineModule takes 0 or 1: its gradients stay whole "
            "until the step's end"
        )


def check_precision(config: Mapping[str, Any], *, has_fp16: bool) -> None:
    """Raises PlanError for a type that the device does not compute in (`has_fp16`: it does in fp16)."""
    if precision(config) == "fp16" and not has_fp16:
        raise PlanError("fp16.enabled: true; this device does not compute in fp16: use bf16, or neither")


def clips_by_first_stage(config: Mapping[str, Any], *, pipeline_parallel: int) -> bool:
    """Whether DeepSpeed clips every stage by the norm of the first stage's gradients alone.

    It does so in fp32 without ZeRO: then what is trained depends on which layers the first device holds.
    """
    return pipeline_parallel > 1 and zero_stage(config) == 0 and clips_in_fp32(config)


def clips_in_fp32(config: Mapping[str, Any]) -> bool:
    """Whether gradients are clipped, in fp32: then ZeRO 0 and 1 clip by different norms on several stages."""
    clipping = config.get("gradient_clipping", DEFAULT_CLIPPING)
    return isinstance(clipping, int | float) and clipping > 0 and precision(config) == "fp32"


def clipping_notice(config: Mapping[str, Any]) -> str:
    """One line on it for the user."""
    is_given = "gradient_clipping" in config
    clipping = config.get("gradient_clipping", DEFAULT_CLIPPING)
    return (
        f"gradient_clipping {clipping}{'' if is_given else ' (the default)'}: in fp32 with ZeRO 0 DeepSpeed "
        "clips all stages by the first stage's gradient norm alone; set zero_optimization.stage 1, or "
        "gradient_clipping 0, and stages train what one device would"
    )


def planned_config(config: Mapping[str, Any], *, layout: Layout, global_batch_size: int) -> dict[str, Any]:
    """The ds_config with a plan's layout in it, without the `quartet` section: a plain one of DeepSpeed's."""
    planned = dict(config)
    planned.pop(SECTION, None)
    planned |= {
        "train_batch_size": global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.num_microbatches(global_batch_size),
    }
    stage = 1 if layout.distributed_optimizer else 0
    zero = {"stage": stage} | {name: size for name in BUCKETS if (size := getattr(layout, name)) is not None}
    section = config.get("zero_optimization")
    if zero_stage(config) != stage or len(zero) > 1:
        planned["zero_optimization"] = {**(section if isinstance(section, Mapping) else {}), **zero}
    return planned


def strip_side_effects(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The ds_config of a trial, which starts no service, profiler or writer, and the names of what it lacks.

    Raises ConfigError for a section beside which no trial could run.
    """
    for name, reason in _REFUSED.items():
        section = config.get(name)
        if isinstance(section, Mapping) and section.get("enabled"):
            raise ConfigError(f"{name}: {reason}; leave it out")
    changed = dict(config)
    removed = [name for name in (*_SECTIONS, *_SWITCHES) if changed.pop(name, None)]
    changed["steps_per_print"] = 10**9
    return changed, removed
