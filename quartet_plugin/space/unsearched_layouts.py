"""The layouts of a space that have no searched order for the number of a step's actions alone."""

import math
from dataclasses import replace
from functools import partial

from quartet_plugin.model.layout import Layout
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.space.config import SEARCHED
from quartet_plugin.space.layouts import legal_layouts, schedules_of
from quartet_plugin.space.plan_space import Space
from quartet_plugin.space.rules import LayoutRules
from quartet_plugin.space.schedules import MAX_SEARCHED_ACTIONS, num_actions_of


def num_unsearched_layouts(space: Space) -> int:
    """Count these layouts, with those that the space leaves out because no schedule remains for them."""
    rules, layouts = space.rules(), space.layouts
    if space.search.schedule is not None and SEARCHED in space.search.schedule:
        free = replace(rules, search=space.search.model_copy(update={"schedule": None}))
        layouts = {
            shape: tuple(filter(partial(space.has_split, shape), legal_layouts(shape, rules=free)))
            for shape in space.shapes
        }
    return sum(_is_unsearched(layout, shape, rules) for shape, kept in layouts.items() for layout in kept)


def _is_unsearched(layout: Layout, shape: ModelShape, rules: LayoutRules) -> bool:
    num_microbatches = layout.num_microbatches(rules.job.global_batch_size)
    if num_actions_of(layout, num_microbatches=num_microbatches) <= MAX_SEARCHED_ACTIONS:
        return False
    return SEARCHED in schedules_of(layout, shape=shape, rules=rules, most_actions=math.inf)
