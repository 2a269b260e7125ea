"""The size of the buckets in which Megatron reduces gradients."""

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, SettingKnob, Value, has_copies, never_kept

# Elements; without a size Megatron takes 40 million, or a million a copy where that is more.
_SIZES = (10_000_000, 40_000_000, 160_000_000)


def _offers(context: KnobContext) -> list[int]:
    share = context.shape.num_parameters // context.layout.pipeline_parallel
    return [size for size in _SIZES if size < share]


def _fault(value: Value, context: KnobContext) -> str | None:
    return (
        None
        if context.setting("overlap_grad_reduce")
        else "needs overlap_grad_reduce: else there is a single bucket"
    )


DDP_BUCKET_SIZE = SettingKnob(
    name="ddp_bucket_size",
    label="ddp_bucket_size",
    meaning="elements of gradients that are reduced at once",
    kind="size",
    axis=Axis.OPTIONS,
    change_class="B",
    rule="with overlap_grad_reduce (megatron/core/distributed/distributed_data_parallel.py)",
    flag="--ddp-bucket-size",
    destination="ddp_bucket_size",
    unset=0,
    default="stock",
    offers=_offers,
    fault=_fault,
    kept=never_kept,
    read_back=lambda live: int(live.optimizer.bucket_size or 0),
    framework=MEGATRON.framework,
    applies=has_copies,
)
