"""The size of the buckets in which Megatron reduces gradients."""

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, SettingKnob, Value, has_copies, kept_fault

NAME = "ddp_bucket_size"
# Elements; without a size Megatron takes 40 million, or a million a copy where that is more.
_SIZES = (10_000_000, 40_000_000, 160_000_000)


def _offers(context: KnobContext) -> list[int]:
    share = context.shape.num_parameters // context.layout.pipeline_parallel
    return [size for size in _SIZES if size < share]


def _fault(value: Value, context: KnobContext) -> str | None:
    if kept := kept_fault(value, context.rules.job.setting(NAME) or 0, _kept(context.rules)):
        return kept
    return (
        None
        if context.setting("overlap_grad_reduce")
        else "needs overlap_grad_reduce: else there is a single bucket"
    )


def _kept(rules: KnobRules) -> str | None:
    return "the command has --ddp-num-buckets" if "ddp_num_buckets" in rules.job.features else None


DDP_BUCKET_SIZE = SettingKnob(
    name=NAME,
    label=NAME,
    meaning="elements of gradients that are reduced at once",
    kind="size",
    axis=Axis.OPTIONS,
    change_class="B",
    rule="with overlap_grad_reduce (megatron/core/distributed/distributed_data_parallel.py); kept with "
    "--ddp-num-buckets (megatron/core/distributed/distributed_data_parallel_config.py)",
    flag="--ddp-bucket-size",
    destination=NAME,
    unset=0,
    default="stock",
    offers=_offers,
    fault=_fault,
    kept=_kept,
    read_back=lambda live: int(live.optimizer.bucket_size or 0),
    framework=MEGATRON.framework,
    applies=has_copies,
)
