"""Sequence parallelism: the tensor-parallel ranks divide layer norms and dropout along the sequence."""

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, LayoutKnob, Value, never_kept, off_and_on


def divides_sequence(layout: Layout, shape: ModelShape) -> bool:
    """Whether the tensor-parallel ranks can share the part of a sequence that a context-parallel rank has."""
    return (shape.seq_length // layout.context_parallel) % layout.tensor_parallel == 0


def _fault(value: Value, context: KnobContext) -> str | None:
    layout, features = context.layout, context.rules.job.features
    if value and not divides_sequence(layout, context.shape):
        sequences = context.shape.seq_length // layout.context_parallel
        return f"TP {layout.tensor_parallel} must divide sequences of {sequences}"
    if value:
        return None
    if "moe" in features:
        return "experts with tensor parallelism need it"
    return "--tp-comm-overlap needs it" if "tp_comm_overlap" in features else None


SEQUENCE_PARALLEL = LayoutKnob(
    name="sequence_parallel",
    label="SP",
    meaning="layer norms and dropout split over the tensor-parallel devices, too",
    kind="switch",
    axis=Axis.DEGREES,
    change_class="B",
    rule="TP above 1 divides a CP rank's sequence; experts with TP need it (megatron/training/arguments.py)",
    flag="--sequence-parallel",
    default="stock",
    offers=off_and_on,
    fault=_fault,
    kept=never_kept,
    read_back=lambda live: bool(live.model.sequence_parallel),
    framework=MEGATRON.framework,
    applies=lambda layout: layout.tensor_parallel > 1,
)
