"""The micro-batch: sequences that pass the pipeline together."""

from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.divisors import divisors
from quartet_plugin.space.knobs.knob import KnobContext, LayoutKnob, Value, degree_of, never_kept

# The largest micro-batch that is offered, over the command's own, and without a command.
MAX_FACTOR, MAX_PLANNED = 8, 64


def _offers(context: KnobContext) -> list[int]:
    is_planned, command = context.rules.is_planned, context.rules.job.layout.micro_batch_size
    most = MAX_PLANNED if is_planned else command * MAX_FACTOR
    share = context.rules.job.global_batch_size // context.layout.data_parallel
    return [size for size in divisors(share) if size <= most] if share else []


def _fault(value: Value, context: KnobContext) -> str | None:
    batch, copies = context.rules.job.global_batch_size, context.layout.data_parallel
    return f"times DP {copies} must divide the batch of {batch}" if batch % (int(value) * copies) else None


MICRO_BATCH_SIZE = LayoutKnob(
    name="micro_batch_size",
    label="MB",
    meaning="sequences in each microbatch",
    kind="degree",
    axis=Axis.MICRO_BATCH,
    change_class="B",
    rule="micro-batch x DP divides the global batch (megatron/core/num_microbatches_calculator.py)",
    flag="--micro-batch-size",
    ds_key="train_micro_batch_size_per_gpu",
    offers=_offers,
    fault=_fault,
    kept=never_kept,
    read_back=degree_of("micro_batch_size"),
)
