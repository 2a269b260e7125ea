"""Why no layout of a space cuts a layer's linears otherwise than the framework, although more was asked."""

from collections.abc import Iterator

from quartet_plugin.model.plan import STOCK
from quartet_plugin.space.knobs.knob import KnobContext
from quartet_plugin.space.knobs.tensor_partition import TENSOR_PARTITION
from quartet_plugin.space.plan_space import Space


def stock_partition_reason(space: Space) -> str | None:
    """The reason in words; None where a layout has another partition, or none was asked for."""
    requested = space.search.requested(TENSOR_PARTITION.name)
    if requested == (STOCK,) or not TENSOR_PARTITION.is_of(space.job.framework):
        return None
    kept = [layout for layouts in space.layouts.values() for layout in layouts]
    if any(layout.tensor_partition is not None for layout in kept):
        return None
    rules = space.rules()
    if (lock := space.locked.get(TENSOR_PARTITION.axis)) is not None:
        return f"tensor_partition: {lock}"
    return f"tensor_partition: {TENSOR_PARTITION.kept(rules) or next(_faults(space), 'TP is 1 everywhere')}"


def _faults(space: Space) -> Iterator[str]:
    """The rules that the requested values break, in the layouts that they do something in."""
    rules = space.rules()
    for shape, layouts in space.layouts.items():
        for layout in layouts:
            if not TENSOR_PARTITION.applies(layout):
                continue
            context = KnobContext(layout=layout, shape=shape, rules=rules)
            values = rules.search.requested(TENSOR_PARTITION.name) or TENSOR_PARTITION.offers(context)
            faults = (TENSOR_PARTITION.fault(value, context) for value in values if value is not None)
            yield from filter(None, faults)
