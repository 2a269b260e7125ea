"""The closed form of a step against the iteration model that it approximates."""

import random
from statistics import median

import numpy as np
import pytest

from benchmarks.mapping_optimum import random_job
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.iteration.assigned import AssignedRun
from quartet_plugin.mapping.orders import is_legal
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.planner.closed_form import step_costs, step_s
from quartet_plugin.planner.layout_table import layout_table_of
from quartet_plugin.split.layers import even_split

# Over 24 random jobs the median rank correlation was 0.99; the closed form's favourite of 30 random mappings
# was the model's in all but one, and there 1.2 % slower. Where it ranks badly (0.2 and 0.6 in two jobs) the
# orders hardly differ.
MEDIAN_CORRELATION, MOST_REGRET = 0.97, 0.015


def ranks_of(values: list[float]) -> FloatArray:
    """The rank of each value, ties with their mean rank; rounding aside."""
    rounded = np.array([float(f"{value:.9g}") for value in values])
    return np.array([(rounded < value).sum() + 0.5 * (rounded == value).sum() for value in rounded])


def compared(seed: int) -> tuple[float, float] | None:
    """Spearman's rank correlation over random mappings of a random job; None where all take the same.

    The second value is the model's time of the closed form's favourite over that of its own, minus 1.
    """
    draw = random.Random(seed)
    job = random_job(draw, *draw.choice([(2, 4), (4, 2), (4, 4)]))
    table = layout_table_of(job, job.shape)
    layout = draw.choice([layout for row in range(len(table)) if (layout := table.layout(row))])
    topology = job.topology(fitted())
    split = even_split(job.shape.num_layers, num_stages=layout.num_stages)
    run = AssignedRun(job.run(job.shape, layout, split), fitted(), topology)
    size = layout.tensor_parallel
    orders: list[tuple[int, ...]] = []
    blocks = [tuple(range(first, first + size)) for first in range(0, len(topology.slots), size)]
    while len(orders) < 30:
        draw.shuffle(blocks)
        slots = tuple(slot for block in blocks for slot in block)
        if is_legal([topology.slots[slot] for slot in slots], layout=layout):
            orders.append(slots)
    closed_s = [step_s(step_costs(run), topology, slots) for slots in orders]
    model_s = [run.predict(slots).iter_time_s for slots in orders]
    closed, model = ranks_of(closed_s), ranks_of(model_s)
    if not closed.std() or not model.std():
        return None
    regret = model_s[int(np.argmin(closed_s))] / min(model_s) - 1
    return float(np.corrcoef(closed, model)[0, 1]), regret


@pytest.mark.timeout(240)
def test_it_ranks_mappings_as_the_model_does() -> None:
    found = [pair for seed in range(24) if (pair := compared(seed)) is not None]
    assert len(found) >= 12
    assert median(correlation for correlation, _ in found) >= MEDIAN_CORRELATION
    assert max(regret for _, regret in found) <= MOST_REGRET
