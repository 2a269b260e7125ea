"""The closed form of a step against the iteration model that it approximates."""

import random
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pytest

from benchmarks.mapping_optimum import random_job
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.iteration.assigned import AssignedRun
from quartet_plugin.mapping.orders import is_legal
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.layout import Setting
from quartet_plugin.planner.closed_form import step_costs, step_s
from quartet_plugin.planner.collectives import no_collective
from quartet_plugin.planner.layout_table import layout_table_of
from quartet_plugin.split.layers import even_split
from tests.model.clusters import make_cluster
from tests.planner.planning import cluster_job
from tests.space.jobs import make_layout

# Over 24 random jobs the median rank correlation was 0.99; the closed form's favourite of 30 random mappings
# was the model's in all but two, and there 1.2 % and 5 % slower. Of 72 others two were over 2 % slower, one
# of them 5.6 %. Where it ranks badly the orders hardly differ.
MEDIAN_CORRELATION, USUAL_REGRET, MOST_REGRET = 0.97, 0.015, 0.1


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
    *usual, most = sorted(regret for _, regret in found)
    assert usual[-1] <= USUAL_REGRET
    assert most <= MOST_REGRET


def assigned_run(
    *,
    links: dict[str, Any] | None = None,
    settings: tuple[Setting, ...] = (),
    whole: bool = False,
    degrees: dict[str, int],
) -> AssignedRun:
    """A run with 16 experts, or dense without expert parallelism, on two nodes of eight H100."""
    cluster = make_cluster(num_nodes=2, per_node=8, device="H100-SXM-80GB", links=links)
    has_experts = degrees.get("expert_parallel", 1) > 1
    model = {"gated_ffn": True} | ({"num_experts": 16} if has_experts else {})
    job = replace(cluster_job(cluster, model=model), settings=settings)
    layout = make_layout(pipeline_parallel=1, micro_batch_size=1, **degrees)
    run = replace(job.run(job.shape, layout, (8,)), has_whole_experts=whole)
    return AssignedRun(run, fitted(), job.topology(fitted()))


def exchange_s(run: AssignedRun, slots: tuple[int, ...], name: str) -> float:
    """Seconds of a step that the closed form has for the exchanges of one kind of group."""
    costs = step_costs(run)
    removed: dict[str, Any] = {name: no_collective(1)}
    without = replace(costs, **removed)
    return step_s(costs, run.topology, slots) - step_s(without, run.topology, slots)


STOCK = tuple(range(16))
MATRIX = {"matrix": {"bandwidth_bytes_per_s": [[1e9, 2e10], [4e10, 1e9]]}}


@pytest.mark.parametrize("links", [None, MATRIX])
@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("expert", {"data_parallel": 16, "expert_parallel": 16}),
        ("expert", {"data_parallel": 16, "expert_parallel": 4}),
        ("expert", {"tensor_parallel": 2, "data_parallel": 8, "expert_parallel": 8}),
        ("context", {"context_parallel": 16}),
        ("context", {"context_parallel": 8, "data_parallel": 2}),
    ],
)
def test_an_exchange_takes_as_long_as_in_the_model(
    name: str, degrees: dict[str, int], is_mixed: bool, links: dict[str, Any] | None
) -> None:
    """Every rank sends through its own port what leaves its domain, and the rest inside."""
    size = degrees.get("tensor_parallel", 1)
    blocks = list(range(16 // size))
    if is_mixed:
        # A block of the second node, among those of the first.
        blocks.insert(3, blocks.pop(8 // size))
    slots = tuple(size * block + at for block in blocks for at in range(size))
    settings = (Setting(name="cp_comm_type", value="a2a"),) if name == "context" else ()
    run = assigned_run(links=links, settings=settings, degrees=degrees)
    term = {"expert": "ep_comm_s", "context": "cp_comm_s"}[name]
    predicted = run.predict(slots).terms[term]
    assert predicted > 0
    assert exchange_s(run, slots, name) == pytest.approx(predicted, rel=1e-9)


def test_an_exchange_between_nodes_takes_several_times_as_long_as_inside() -> None:
    """Of 16 ranks on two nodes each sends half of its tokens through its own port."""
    across, inside = (
        exchange_s(assigned_run(degrees={"data_parallel": 16, "expert_parallel": size}), STOCK, "expert")
        for size in (16, 8)
    )
    assert across > 3 * inside


@pytest.mark.parametrize(
    ("degrees", "blocks"),
    [
        ({"tensor_parallel": 2, "data_parallel": 8, "expert_parallel": 8}, 4),
        ({"tensor_parallel": 2, "data_parallel": 8, "expert_parallel": 16}, 8),
        ({"tensor_parallel": 4, "data_parallel": 4, "expert_parallel": 2}, 1),
    ],
)
def test_whole_experts_are_exchanged_between_consecutive_ranks(degrees: dict[str, int], blocks: int) -> None:
    run = assigned_run(whole=True, degrees=degrees)
    costs = step_costs(run)
    assert costs.degrees.expert_parallel == blocks
    terms = run.predict(STOCK).terms
    # Those of a group inside a tensor-parallel one count with tensor parallelism.
    found = exchange_s(run, STOCK, "expert") if blocks > 1 else exchange_s(run, STOCK, "tensor")
    expected = terms["ep_comm_s"] + (terms["tp_comm_s"] if blocks == 1 else 0.0)
    assert found == pytest.approx(expected, rel=1e-9)
