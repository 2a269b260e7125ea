"""From what a probe reads of racks and switches to the plan: groups and pipelines that stay inside.

NVML is `FakeNvml`, and Slurm's variables are set by hand: no machine of the tests has a fabric or switches.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quartet_plugin.cli.probe import lines
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.probed import Findings, cluster_of
from quartet_plugin.mapping.topology import crossings_in_order
from quartet_plugin.model.cluster import Cluster, write_cluster
from quartet_plugin.model.schema import parse
from quartet_plugin.planner.job import PlanRequest, parse_job
from quartet_plugin.planner.ranking import Ranked, best_plans
from quartet_plugin.probe import devices, links
from tests.planner.planning import job_data
from tests.probe.fake_nvml import FakeNvml, properties

NVLINK = {"bandwidth_bytes_per_s": 6e11, "latency_s": 2e-6}
NETWORK = {"bandwidth_bytes_per_s": 4e10, "latency_s": 1e-5}
RATES = {"matmul_flops": {"bf16": 1.5e15}, "copy_bytes_per_s": 6e12}
ONE = {"tensor_parallel": 1, "virtual_stages": 1, "micro_batch_size": 1, "schedule": "stock", "split": "even"}


@dataclass(frozen=True, kw_only=True)
class Host:
    """A simulated node: the number of its fabric, its clique, and the switch or block above it."""

    fabric: int | None = None
    clique: int = 0
    place: str | None = None
    pattern: str = "switch.switch.node"


def rank_of(host: Host, name: str, local: int, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a rank of the probe reports on a simulated node."""
    nvml = FakeNvml(
        identity=bytes([host.fabric or 0] * 16), clique=host.clique, knows_fabrics=host.fabric is not None
    )
    patch.setitem(sys.modules, "pynvml", nvml)
    for variable in ("SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"):
        patch.delenv(variable, raising=False)
    if host.place is not None:
        patch.setenv("SLURM_TOPOLOGY_ADDR", f"{host.place}.{name}".lstrip("."))
        patch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", host.pattern)
    known = devices._gpu(properties()) | devices.place_of_node()
    return {"host": name, "local_rank": local, **known, **RATES}


def probed(hosts: Sequence[Host], *, per_node: int, **levels: Any) -> Cluster:
    """The cluster of a probe on simulated nodes `a`, `b`, ...; every link between nodes is alike."""
    with pytest.MonkeyPatch.context() as patch:
        ranks = [
            rank_of(host, chr(ord("a") + index), local, patch)
            for index, host in enumerate(hosts)
            for local in range(per_node)
        ]
    found = {"scale_up": NVLINK, "network": NETWORK, "pairs": None, **levels}
    data = {"schema_version": 1, "device": "cuda", "ranks": ranks, "links": found}
    return cluster_of(parse(Findings, data, where="findings.json"))


def job_on(cluster: Cluster, tmp_path: Path, **changes: dict[str, Any]) -> PlanRequest:
    """The planner's small job on the cluster file that the probe writes."""
    write_cluster(cluster, path=tmp_path / "cluster.json")
    data = {**job_data(**changes), "cluster": {"file": str(tmp_path / "cluster.json")}}
    return parse_job(data, where="job")


def order_of(plan: Ranked) -> list[int]:
    """The slot of every rank."""
    return list(range(plan.layout.world_size)) if plan.slots is None else list(plan.slots)


def num_crossings(job: PlanRequest, plan: Ranked) -> int:
    """The crossings of the plan's pipelines and groups between segments."""
    return crossings_in_order(job.topology(fitted()), order_of(plan), layout=plan.layout)


# Two racks whose nodes are not beside each other in the launcher's order.
RACKS = [Host(fabric=1), Host(fabric=2), Host(fabric=1), Host(fabric=2)]
# Switches under which neither of Megatron's orders has a pipeline of two nodes: a with c, or a with b.
SWITCHES = [Host(place=place) for place in ("core.leaf1", "core.leaf2", "core.leaf2", "core.leaf1")]
BLOCKS = [Host(place=place, pattern="block.node") for place in ("b7", "b9", "b9", "b7")]


@pytest.mark.parametrize("rules", [{}, {"inside": "expert"}])
def test_expert_groups_stay_in_a_rack_of_several_nodes(rules: dict[str, str], tmp_path: Path) -> None:
    cluster = probed(RACKS, per_node=2)
    assert cluster.links.scale_up_devices is None
    assert "the devices of a fabric in a scale-up domain" in lines(cluster)[-1]
    search = {**ONE, "pipeline_parallel": 1, "expert_parallel": 4, **rules}
    job = job_on(cluster, tmp_path, model={"num_experts": 8}, search=search)
    assert job.topology(fitted()).domain_of_slot.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert job.machines.scale_up_devices == 4
    plan = best_plans(job).best[0]
    groups = np.array(order_of(plan)).reshape(2, 4) // 2 % 2
    assert (groups == groups[:, :1]).all()
    # Megatron's own orders have each group in both racks: the network then carries its tokens.
    assert plan.stock_s is not None
    assert all(plan.iteration_s < seconds for seconds in plan.stock_s.values())


def test_racks_may_have_unequal_numbers_of_nodes(tmp_path: Path) -> None:
    cluster = probed([Host(fabric=1), Host(fabric=1), Host(fabric=1), Host(fabric=1, clique=1)], per_node=2)
    job = job_on(cluster, tmp_path)
    assert job.topology(fitted()).domain_of_slot.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert job.machines.scale_up_devices == 6


@pytest.mark.parametrize("hosts", [SWITCHES, BLOCKS])
@pytest.mark.parametrize(("per_node", "tensor"), [(1, 1), (2, 2)])
def test_a_pipeline_stays_in_a_segment(hosts: list[Host], per_node: int, tensor: int, tmp_path: Path) -> None:
    search = {**ONE, "tensor_parallel": tensor, "pipeline_parallel": 2}
    job = job_on(probed(hosts, per_node=per_node), tmp_path, search=search)
    plan = best_plans(job).best[0]
    stages = np.array(order_of(plan)).reshape(2, 2, tensor)[:, :, 0] // per_node
    assert {frozenset(pipeline) for pipeline in stages.T.tolist()} == {frozenset({0, 3}), frozenset({1, 2})}
    assert num_crossings(job, plan) == 0
    # All links between nodes are alike, so no order is faster than Megatron's.
    assert plan.stock_s is not None
    assert plan.iteration_s == pytest.approx(min(plan.stock_s.values()), rel=1e-9)


def test_a_pipeline_over_all_nodes_crosses_once(tmp_path: Path) -> None:
    job = job_on(probed(SWITCHES, per_node=1), tmp_path, search={**ONE, "pipeline_parallel": 4})
    assert num_crossings(job, best_plans(job).best[0]) == 1


@pytest.mark.parametrize(
    "hosts",
    [
        [Host()] * 4,
        [Host(place="", pattern="node")] * 4,
        [Host(place="core.leaf1")] * 4,
        [Host(place=f"core.leaf{number}") for number in range(4)],
        [Host(fabric=number + 1) for number in range(4)],
    ],
)
def test_nodes_that_nothing_tells_apart_keep_the_launchers_order(hosts: list[Host], tmp_path: Path) -> None:
    job = job_on(probed(hosts, per_node=1), tmp_path, search={**ONE, "pipeline_parallel": 2})
    topology = job.topology(fitted())
    assert topology.segment_of_slot is None
    assert topology.domain_of_slot.tolist() == [0, 1, 2, 3]
    assert best_plans(job).best[0].slots is None


def test_a_node_without_a_place_is_in_no_segment(tmp_path: Path) -> None:
    hosts = [Host(place="core.leaf1"), Host(), Host(), Host(place="core.leaf1")]
    job = job_on(probed(hosts, per_node=1), tmp_path)
    segments = job.topology(fitted()).segment_of_slot
    assert segments is not None
    assert segments.tolist() == [0, 1, 2, 0]


def test_measured_links_of_segments_are_priced(tmp_path: Path) -> None:
    slow = {"bandwidth_bytes_per_s": 4e9, "latency_s": 2e-5}
    alone = [[0.0 if row == column else 5e10 for column in range(4)] for row in range(4)]
    cluster = probed(SWITCHES, per_node=1, segment=NETWORK, network=slow, pairs=alone)
    assert cluster.links.segment is not None
    assert cluster.links.matrix is not None
    # Each pair was measured alone; together they share the links between segments.
    assert cluster.links.matrix.bandwidth_bytes_per_s[0] == (0.0, 4e9, 4e9, 4e10)
    shown = "\n".join(lines(cluster))
    assert "inside a segment: 40 GB/s" in shown
    assert "between segments: 4 GB/s" in shown
    for known in (alone, None):
        measured = probed(SWITCHES, per_node=1, segment=NETWORK, network=slow, pairs=known)
        topology = job_on(measured, tmp_path).topology(fitted())
        assert topology.between_bytes_per_s[0, 1:].tolist() == [4e9, 4e9, 4e10]
        assert topology.between_latency_s[0, 1:].tolist() == [2e-5, 2e-5, 1e-5]


def test_links_between_segments_are_never_faster_than_inside() -> None:
    faster = {"bandwidth_bytes_per_s": 4.1e10, "latency_s": 0.9e-5}
    cluster = probed(SWITCHES, per_node=1, segment=NETWORK, network=faster)
    assert cluster.links.network == cluster.links.segment


@pytest.mark.parametrize(
    ("segments", "inside", "between"),
    [
        ("xyyx", [[0, 6], [1, 7], [2, 4], [3, 5]], [[0, 2], [1, 3], [6, 4], [7, 5]]),
        ("xxxy", [[0, 2, 4], [1, 3, 5]], [[0, 6], [1, 7]]),
        ("xxxx", None, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("wxyz", None, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("xx-y", None, [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ],
)
def test_links_inside_segments_and_between_them_are_measured_by_all_nodes_at_once(
    segments: str, inside: list[list[int]] | None, between: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`_level` is a fake that returns its groups of ranks instead of their times."""
    monkeypatch.setattr(links, "_level", lambda _, groups: [list(group) for group in groups])
    monkeypatch.setattr(links, "_pairs", lambda *_: None)
    of_rank = [None if segment == "-" else segment for segment in segments for _ in range(2)]
    measured = links.measure_links(
        torch.device("cpu"), hosts=[host for host in "abcd" for _ in range(2)], segments=of_rank
    )
    assert measured["scale_up"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert measured.get("segment") == inside
    assert measured["network"] == between
