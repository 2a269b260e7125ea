"""The sizes of ZeRO's buckets under DeepSpeed: elements that are reduced, or gathered, at once."""

from collections.abc import Callable
from typing import Any

from quartet_plugin.model.frameworks import DEEPSPEED
from quartet_plugin.model.layout import Layout
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import (
    KnobContext,
    LayoutKnob,
    Value,
    has_copies,
    never_faulty,
    never_kept,
)

# Sizes to try, in elements; DeepSpeed's default is 5e8.
_SIZES = (5_000_000, 50_000_000, 500_000_000)


class BucketKnob(LayoutKnob):
    """A bucket's size; a plan without one keeps that of the ds_config."""

    def text(self, value: Value | None) -> str:
        """The size in elements; `own` where the plan keeps that of the ds_config."""
        return "own" if value is None else str(value)


def _offers(context: KnobContext) -> list[int | None]:
    """The ds_config's own, and sizes below a device's share of the model: all larger ones do the same."""
    share = context.shape.num_parameters // context.layout.pipeline_parallel
    return [None, *(size for size in _SIZES if size < share)]


def _has_buckets(layout: Layout) -> bool:
    return layout.distributed_optimizer and has_copies(layout)


def _bucket(name: str, *, label: str, read_back: Callable[[Any], int]) -> BucketKnob:
    """The knob of one bucket, which is also the name of DeepSpeed's key."""
    return BucketKnob(
        name=name,
        label=label,
        meaning="elements in each bucket (DeepSpeed with ZeRO 1)",
        kind="size",
        axis=Axis.OPTIONS,
        change_class="B",
        rule="an even number, with ZeRO 1 (deepspeed/runtime/zero/stage_1_and_2.py)",
        ds_key=f"zero_optimization.{name}",
        offers=_offers,
        fault=never_faulty,
        kept=never_kept,
        read_back=read_back,
        framework=DEEPSPEED.framework,
        applies=_has_buckets,
    )


REDUCE_BUCKET_SIZE = _bucket(
    "reduce_bucket_size",
    label="reduce bucket",
    read_back=lambda live: int(live.optimizer.zero_reduce_bucket_size()),
)
ALLGATHER_BUCKET_SIZE = _bucket(
    "allgather_bucket_size",
    label="gather bucket",
    read_back=lambda live: int(live.optimizer.zero_allgather_bucket_size()),
)
