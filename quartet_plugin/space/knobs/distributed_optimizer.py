"""Megatron's distributed optimizer: its state sharded over the copies of the model."""

from collections.abc import Iterable

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, LayoutKnob, Value, has_copies

# Features that need the distributed optimizer, or shard the optimizer in their own way.
_OTHER_SHARDING = (
    "overlap_param_gather",
    "distributed_optimizer_instances",
    "fsdp",
    "torch_fsdp",
    "cpu_offload",
    "precision_aware_optimizer",
    "fp8_param_gather",
    "emerging_optimizer",
)

# What the name of a feature does not say.
_WORDS = {"emerging_optimizer": "Megatron shards its state by whole layers"}


def sharding_feature(features: Iterable[str]) -> str | None:
    """The feature of a command that needs its own value, on or off, in words; None where that is free."""
    present = set(features)
    name = next((name for name in _OTHER_SHARDING if name in present), None)
    return f"{name}: {_WORDS[name]}" if name in _WORDS else name


def _offers(context: KnobContext) -> list[bool]:
    return [context.layout.distributed_optimizer, not context.layout.distributed_optimizer]


def _fault(value: Value, context: KnobContext) -> str | None:
    return None if value == context.layout.distributed_optimizer else _kept(context.rules)


def _kept(rules: KnobRules) -> str | None:
    return sharding_feature(rules.job.features)


# Kept unless it is asked for: a checkpoint of one form does not load into the other.
DISTRIBUTED_OPTIMIZER = LayoutKnob(
    name="distributed_optimizer",
    label="distributed optimizer",
    meaning="the optimizer's state sharded over the copies of the model",
    kind="switch",
    axis=Axis.DEGREES,
    change_class="B",
    rule="more than one copy; kept with overlap_param_gather, FSDP, several optimizer instances, offloading "
    "of layers, the precision-aware optimizer, gathers in FP8, or an optimizer other than adam and sgd "
    "(megatron/training/arguments.py)",
    flag="--use-distributed-optimizer",
    default="stock",
    framework=MEGATRON.framework,
    offers=_offers,
    fault=_fault,
    kept=_kept,
    read_back=lambda live: live.shards_layers or bool(live.optimizer.use_distributed_optimizer),
    applies=has_copies,
)
