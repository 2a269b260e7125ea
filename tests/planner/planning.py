"""Jobs of the planner's tests."""

import random
from collections.abc import Iterator
from typing import Any

from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.planner.job import PlanRequest, parse_job
from quartet_plugin.planner.layout_table import LayoutTable
from quartet_plugin.planner.table_schedules import groups_of
from tests.model.clusters import make_cluster


def runs_of(job: PlanRequest, table: LayoutTable, row: int, split: tuple[int, ...]) -> Iterator[TrainingRun]:
    """The runs of a row of the table: one for each group that its schedule may have."""
    layout, schedule = table.layout(row), table.schedule(row)
    for group in groups_of(job, layout, schedule):
        yield job.run(job.shape, layout, split, schedule=schedule, group=group)


def job_data(**changes: dict[str, Any]) -> dict[str, Any]:
    """A small dense model on eight devices, sections updated."""
    data: dict[str, Any] = {
        "model": {
            "num_layers": 8,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "seq_length": 1024,
            "vocab_size": 32000,
        },
        "cluster": {"device": "A100-SXM-80GB", "num_nodes": 1, "devices_per_node": 8},
        "batch": {"global_batch_size": 16},
    }
    for name, values in changes.items():
        data[name] = {**data.get(name, {}), **values}
    return data


def cluster_job(cluster: dict[str, Any], **changes: dict[str, Any]) -> PlanRequest:
    """The small model on a cluster that is described in full."""
    return parse_job({**job_data(**changes), "cluster": cluster}, where="job")


def random_cluster_job(seed: int) -> PlanRequest:
    """Four or eight devices, some of them slower, links unequal in half of the draws."""
    draw = random.Random(seed)
    num_nodes, per_node = draw.choice([(2, 2), (1, 4), (4, 1), (2, 4)])
    slow = {
        (node, local): draw.choice([1.0, 1.0, 1.5, 3.0])
        for node in range(num_nodes)
        for local in range(per_node)
    }
    links: dict[str, Any] = {}
    if draw.random() < 0.5:
        rates = [[draw.choice([5e9, 2.5e10]) for _ in range(num_nodes)] for _ in range(num_nodes)]
        links["matrix"] = {"bandwidth_bytes_per_s": rates}
    cluster = make_cluster(num_nodes=num_nodes, per_node=per_node, slowdown=slow, links=links)
    cluster["devices"] = {"A100-SXM-80GB": {"memory_bytes": draw.choice([6, 80]) * 2**30}}
    model = {"num_layers": draw.randint(3, 8), "vocab_size": draw.choice([1000, 64000])}
    search: dict[str, Any] = {"micro_batch_size": [1, 2], "recompute": draw.choice(["none", "full"])}
    if draw.random() < 0.3:
        search["context_parallel"] = "auto"
    return cluster_job(cluster, model=model, search=search)
