"""A searched order as a study keeps it beside a trial's parameters: whole, as a plan file has it.

What the order was made from changes with every finished trial, so parameters alone do not lead to it again.
"""

from functools import lru_cache

from quartet_plugin.errors import QuartetError
from quartet_plugin.model.canonical import canonical_json
from quartet_plugin.model.custom_schedule import CustomSchedule
from quartet_plugin.model.files import parse_json
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import ScheduleChoice
from quartet_plugin.model.schema import dump, parse
from quartet_plugin.schedule.choice import generated, written_of
from quartet_plugin.schedule.validate import validate
from quartet_plugin.space.schedules import CustomOrder

# The name of a trial's attribute that has the order's text.
ORDER = "schedule.order"


def order_text(custom: CustomSchedule) -> str:
    """The order with the costs that it was made for, as canonical JSON."""
    return canonical_json(dump(custom))


@lru_cache(maxsize=1024)
def stored_order(
    text: str,
    *,
    layout: Layout,
    num_microbatches: int,
    split: tuple[int, ...],
) -> CustomOrder:
    """The order of a text that `order_text` made, with its split.

    Raises KeyError for a text that holds no legal order of the layout.
    """
    try:
        custom = parse(CustomSchedule, parse_json(text.encode(), where=ORDER), where=ORDER)
        if (custom.num_devices, len(custom.placement)) != (layout.pipeline_parallel, layout.num_stages):
            raise KeyError(ORDER)
        schedule = written_of(custom, num_microbatches=num_microbatches) or generated(
            ScheduleChoice(name="custom", custom=custom), layout=layout, num_microbatches=num_microbatches
        )
        validate(schedule)
    except QuartetError as error:
        raise KeyError(ORDER) from error
    return CustomOrder(split=split, custom=custom)
