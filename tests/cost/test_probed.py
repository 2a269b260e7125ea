"""What the probe found, as a cluster."""

from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli.probe import lines
from quartet_plugin.cost.cluster import look_up
from quartet_plugin.cost.probed import Findings, ProbedRank, cluster_of, library_name
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.cluster import read_cluster, write_cluster
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.schema import read_record


def rank(host: str, local: int, *, flops: float = 5e10, **changes: Any) -> dict[str, Any]:
    return {
        "host": host,
        "local_rank": local,
        "name": "A Processor 9000",
        "memory_bytes": 8 * 2**30,
        "compute_units": 1,
        "power_watts": None,
        "matmul_flops": {"fp32": flops, "bf16": 2e10},
        "copy_bytes_per_s": 1e10,
        **changes,
    }


def findings(ranks: list[dict[str, Any]], **links: Any) -> dict[str, Any]:
    level = {"bandwidth_bytes_per_s": 2e9, "latency_s": 3e-5}
    known = {"scale_up": level, "network": None, "pairs": None, **links}
    return {"schema_version": 1, "device": "cpu", "ranks": ranks, "links": known}


def written(tmp_path: Path, data: dict[str, Any]) -> Path:
    path = tmp_path / "findings.json"
    write_json_atomic(path, data)
    return path


def test_cores_of_one_machine(tmp_path: Path) -> None:
    data = findings([rank("a", 0), rank("a", 1, flops=4.9e10)])
    cluster = cluster_of(read_record(Findings, written(tmp_path, data)))
    assert cluster.nodes[0].devices == ("A Processor 9000",) * 2
    assert cluster.nodes[0].slowdown is None
    values = cluster.devices["A Processor 9000"]
    assert values.peak_flops["fp32"] == 5e10
    assert cluster.links.measured
    assert cluster.links.scale_up.bandwidth_bytes_per_s == 2e9
    path = tmp_path / "cluster.json"
    write_cluster(cluster, path=path)
    assert read_cluster(path) == cluster


def test_a_slow_device_is_said_to_be_slow(tmp_path: Path) -> None:
    data = findings([rank("a", 0), rank("a", 1, flops=2.5e10)])
    assert cluster_of(read_record(Findings, written(tmp_path, data))).nodes[0].slowdown == (1.0, 2.0)


def test_unequal_networks_become_a_matrix(tmp_path: Path) -> None:
    level = {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-4}
    pairs = [[0.0, 1e9, 2e8], [1e9, 0.0, 1e9], [2e8, 1e9, 0.0]]
    data = findings([rank(host, 0) for host in "abc"], scale_up=None, network=level, pairs=pairs)
    cluster = cluster_of(read_record(Findings, written(tmp_path, data)))
    assert [node.name for node in cluster.nodes] == ["a", "b", "c"]
    assert cluster.links.matrix is not None
    assert cluster.links.matrix.bandwidth_bytes_per_s[0][2] == 2e8
    assert "not measured" in cluster.source


@pytest.mark.parametrize(
    ("fabrics", "expected", "num_domains"),
    [
        (["f:0", "f:0", "f:1", "f:1"], 4, 2),
        (["f:0", "f:0", "f:0", "f:0"], 8, 1),
        (["f:0", "f:1", "f:0", "f:1"], None, 2),
        (["f:0", "f:0", "f:1", "g:1"], None, 3),
        (["f:0", "f:1", "f:2", "f:3"], None, 4),
        (["f:0", "f:0", None, None], None, 3),
        ([None, None, None, None], None, 4),
    ],
)
def test_nodes_of_one_clique_are_one_domain(
    fabrics: list[str | None], expected: int | None, num_domains: int, tmp_path: Path
) -> None:
    level = {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-4}
    places: dict[str, Any] = {"topology": "top.leaf1.a", "topology_pattern": "switch.switch.node"}
    ranks = [
        rank(host, local) | places | ({} if fabric is None else {"fabric": fabric})
        for host, fabric in zip("abcd", fabrics, strict=True)
        for local in range(2)
    ]
    cluster = cluster_of(read_record(Findings, written(tmp_path, findings(ranks, network=level))))
    assert [node.fabric for node in cluster.nodes] == fabrics
    assert cluster.nodes[0].topology == "top.leaf1.a"
    assert cluster.links.scale_up_devices == expected
    path = tmp_path / "cluster.json"
    write_cluster(cluster, path=path)
    assert read_cluster(path) == cluster
    shown = lines(cluster)[-1]
    assert shown.startswith("topology (switch.switch.node): a top.leaf1.a, ")
    domain = look_up(cluster, precision="fp32").domain
    assert len(set(domain.tolist())) == num_domains


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-SXM-80GB"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-SXM-40GB"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-SXM-80GB"),
        ("NVIDIA H200", 139.8, "H200-SXM-141GB"),
        ("Tesla V100-SXM2-32GB", 31.7, "V100-SXM2-32GB"),
        ("NVIDIA GB200", 185.0, "GB200"),
        ("NVIDIA H100 80GB HBM3 MIG 7g.80gb", 79.1, None),
        ("NVIDIA H200 NVL", 139.8, None),
        ("NVIDIA H100 PCIe", 79.1, None),
        ("NVIDIA H100 NVL", 93.6, None),
        ("NVIDIA GeForce RTX 4090", 24.0, None),
        ("A Processor 9000", 8.0, None),
    ],
)
def test_names_of_drivers(name: str, gib: float, expected: str | None) -> None:
    one = ProbedRank(**rank("a", 0, name=name, memory_bytes=int(gib * 2**30)))
    assert library_name(one) == expected


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (findings([]), "ranks"),
        (findings([rank("a", 0, copy_bytes_per_s=-1.0)]), "copy_bytes_per_s"),
        (findings([rank("a", 0, matmul_flops={"fp12": 1.0})]), "fp12"),
        (findings([rank("a", 0)], scale_up={"bandwidth_bytes_per_s": 0.0, "latency_s": 0.0}), "bandwidth"),
    ],
)
def test_findings_with_faults_are_refused(tmp_path: Path, data: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        read_record(Findings, written(tmp_path, data))
    assert "\n" not in str(caught.value)
