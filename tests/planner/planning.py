"""Jobs of the planner's tests."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.model.shape import LayerKinds
from quartet_plugin.planner.job import PlanRequest, parse_job
from quartet_plugin.planner.layout_table import LayoutTable
from tests.model.clusters import make_cluster

DEVICES = ("A100-SXM-80GB", "H100-SXM-80GB")


def runs_of(job: PlanRequest, table: LayoutTable, row: int, split: tuple[int, ...]) -> Iterator[TrainingRun]:
    """The runs of a row of the table: one for each group that its schedule may have."""
    layout, schedule = table.layout(row), table.schedule(row)
    for group in table.groups(row):
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


def random_job(seed: int) -> PlanRequest:
    """Up to 16 devices, dense models and experts, with a random part of the search given."""
    draw = random.Random(seed)
    if draw.random() < 0.3:
        return random_cluster_job(seed)
    model: dict[str, Any] = {
        "num_layers": draw.choice([5, 8, 12]),
        "hidden_size": draw.choice([512, 1024, 4096]),
        "num_query_groups": draw.choice([2, 8, 16]),
        "gated_ffn": draw.random() < 0.5,
        "vocab_size": draw.choice([1000, 32_000, 128_000]),
        "seq_length": draw.choice([512, 1024, 4096]),
    }
    if draw.random() < 0.3:
        model |= {"num_experts": 4, "experts_per_token": 2}
    requests: dict[str, list[Any]] = {
        "context_parallel": ["auto"],
        "schedule": ["stock", ["1f1b", "zb-h1", "interleaved"], ["gpipe", "zb-v", "stock"]],
        "split": ["even"],
        "recompute": ["none", ["none", "full"]],
        "micro_batch_size": [1, [1, 2]],
        "forbid": [[{"tensor_parallel": 2}], [{"schedule": "1f1b", "micro_batch_size": 2}]],
    }
    search = {name: draw.choice(values) for name, values in requests.items() if draw.random() < 0.35}
    nodes, per_node = draw.choice([(1, 1), (1, 4), (1, 8), (2, 4), (3, 2), (2, 8)])
    cluster = {"num_nodes": nodes, "devices_per_node": per_node, "device": draw.choice(DEVICES)}
    batch = {"global_batch_size": draw.choice([8, 16, 48])}
    if draw.random() < 0.15:
        search["tensor_partition"] = "auto"
    return parse_job(job_data(model=model, cluster=cluster, batch=batch, search=search), where="job")


def with_pattern(job: PlanRequest, pattern: str, *, projected_size: int = 4096) -> PlanRequest:
    """The job with a hybrid model's layers; experts count where the pattern has them."""
    kinds = LayerKinds(attention=0, mlp=0, experts=0, state_space=0, projected_size=projected_size)
    shape = replace(job.shape, num_layers=len(pattern), layer_kinds=kinds.with_pattern(pattern))
    return replace(job, shape=shape)


def hybrid_job(seed: int, **search: Any) -> PlanRequest:
    """A random pattern of attention, MLPs, experts and state-space layers on up to 16 devices."""
    draw = random.Random(seed)
    letters = draw.choice(["*-", "M*-", "ME*", "M*-E", "MMMM*-"])
    pattern = "".join(draw.choice(letters) for _ in range(draw.choice([6, 8, 12, 16])))
    model = {
        "num_layers": len(pattern),
        "hidden_size": draw.choice([512, 2048]),
        "ffn_hidden_size": draw.choice([1024, 8192]),
        "seq_length": draw.choice([512, 4096, 32_768]),
        "vocab_size": draw.choice([1000, 64_000]),
        "gated_ffn": draw.random() < 0.5,
    }
    if "E" in pattern:
        model |= {
            "num_experts": 8,
            "experts_per_token": 2,
            "expert_ffn_hidden_size": draw.choice([512, 4096]),
            "shared_expert_ffn_hidden_size": draw.choice([0, 512]),
        }
    cluster = {"num_nodes": 2, "devices_per_node": draw.choice([2, 4, 8])}
    search = {"micro_batch_size": [1, 2], **search}
    if draw.random() < 0.3:
        search["context_parallel"] = "auto"
    job = parse_job(job_data(model=model, cluster=cluster, search=search), where="job")
    job = with_pattern(job, pattern, projected_size=draw.choice([1024, 8192]))
    if draw.random() < 0.7:
        return job
    shape = replace(job.shape, tied_embeddings=False, position_embedding="rope")
    further = LayerKinds(attention=1, mlp=1, experts=0, state_space=0)
    return replace(job, shape=shape, mtp_layers=1, mtp_kinds=draw.choice([None, further]))


def hybrid_cluster_job(seed: int) -> PlanRequest:
    """A random pattern without experts on a cluster of unequal devices."""
    draw = random.Random(seed)
    job = random_cluster_job(seed)
    return with_pattern(job, "".join(draw.choice("MM*-") for _ in range(job.shape.num_layers)))
