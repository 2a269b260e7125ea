"""Cluster files: read strictly, written as they are read."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.cluster import Cluster, Link, parse_cluster, read_cluster, write_cluster
from tests.model.clusters import make_cluster

GOLDEN = Path(__file__).parents[1] / "golden" / "cluster.json"


def changed(path: str, value: Any, data: dict[str, Any] | None = None) -> dict[str, Any]:
    """The cluster with the value at a dotted path replaced."""
    found = copy.deepcopy(data or make_cluster())
    *parents, last = path.split(".")
    place: Any = found
    for key in parents:
        place = place[int(key)] if key.isdigit() else place[key]
    place[last] = value
    return found


def test_the_golden_file_is_read() -> None:
    cluster = read_cluster(GOLDEN)
    assert cluster.num_slots == 4
    assert cluster.nodes[0].slowdowns == (1.0, 1.3)
    assert cluster.nodes[1].slowdowns == (1.0, 1.0)
    assert cluster.links.matrix is not None
    assert cluster.devices["a core"].peak_flops["fp32"] == 5e10


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.floats(1.0, 10.0),
    st.floats(1.0, 1e12),
    st.floats(0.0, 1e-3),
    st.booleans(),
)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    num_nodes: int,
    per_node: int,
    slow: float,
    rate: float,
    latency: float,
    measured: bool,
) -> None:
    data = make_cluster(num_nodes=num_nodes, per_node=per_node, slowdown={(0, 0): slow})
    data["links"]["network"] = {"bandwidth_bytes_per_s": rate, "latency_s": latency}
    data["links"]["measured"] = measured
    data["links"]["matrix"] = {"bandwidth_bytes_per_s": [[rate] * num_nodes] * num_nodes}
    path = tmp_path_factory.mktemp("cluster") / "cluster.json"
    cluster = parse_cluster(data, where="cluster")
    write_cluster(cluster, path=path)
    assert read_cluster(path) == cluster
    assert isinstance(cluster, Cluster)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("links.network.bandwidth_bytes_per_s", -1.0, "links.network.bandwidth_bytes_per_s"),
        ("links.network.latency_s", -1e-6, "links.network.latency_s"),
        ("links.network", None, "links.network: missing"),
        ("links.scale_up", None, "links.scale_up"),
        ("links.scale_up_devices", 3, "scale_up_devices: 3"),
        ("links.scale_up_devices", 2, "links.node: missing"),
        ("links.segment", {"bandwidth_bytes_per_s": 1e9, "latency_s": 0.0}, "links.segment: no node is in"),
        ("links.matrix", {"bandwidth_bytes_per_s": [[0, 1e9]]}, "links.matrix.bandwidth_bytes_per_s"),
        ("links.matrix", {"bandwidth_bytes_per_s": [[0, 1e9], [0, 0]]}, r"\[1\]\[0\]"),
        ("links.speed", 1.0, "links.speed"),
        ("nodes", [], "nodes"),
        ("nodes.0.slowdown", [1.0], "one for each of its 4 devices"),
        ("nodes.0.slowdown", [0.5, 1.0, 1.0, 1.0], r"nodes\[0\]\.slowdown"),
        ("nodes.1.name", "node-0", "appears twice"),
        ("nodes.0.devices", [], r"nodes\[0\]\.devices"),
        ("schema_version", 2, "schema_version"),
        ("devices", {"x": {"peak_flops": {"int8": 1.0}}}, "devices"),
        ("devices", {"x": {"memory_bytes": 0}}, "memory_bytes"),
    ],
)
def test_what_a_cluster_may_not_say(path: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_cluster(changed(path, value), where="cluster.json")
    assert str(caught.value).startswith("cluster.json")
    assert "\n" not in str(caught.value)


def test_a_null_key_is_one_line() -> None:
    with pytest.raises(ConfigError, match="c: None: 1: unknown key"):
        parse_cluster(make_cluster() | {None: 1}, where="c")


def test_many_nodes_are_told_apart_in_one_pass() -> None:
    class Name(str):
        __slots__ = ()

        def __hash__(self) -> int:
            hashed.append(self)
            return super().__hash__()

    hashed: list[str] = []
    cluster = parse_cluster(make_cluster(num_nodes=200, per_node=1), where="c")
    nodes = tuple(replace(node, name=Name(node.name)) for node in cluster.nodes)
    assert replace(cluster, nodes=nodes).num_slots == 200
    assert 200 <= len(hashed) <= 10 * 200


def test_a_runs_own_list_of_nodes_is_named_as_such() -> None:
    with pytest.raises(ConfigError, match=r"lists the nodes that a run had.*quartet probe"):
        read_cluster(GOLDEN.parent / "run_0.1.0" / "cluster.json")


def test_domains_over_several_nodes_need_equal_ones() -> None:
    data = changed("links.scale_up_devices", 8)
    assert parse_cluster(data, where="c").links.scale_up_devices == 8
    data["nodes"][1]["devices"] = data["nodes"][1]["devices"][:2]
    data["nodes"][1]["slowdown"] = None
    with pytest.raises(ConfigError, match="equal size"):
        parse_cluster(data, where="c")


@pytest.mark.parametrize("data", [[], "cluster", None])
def test_what_is_no_object_is_refused(data: object) -> None:
    with pytest.raises(ConfigError, match="object with nodes and links"):
        parse_cluster(data, where="c")


@pytest.mark.parametrize(
    ("topology", "pattern", "segment"),
    [
        ("core.leaf2.node-7", "switch.switch.node", "core.leaf2"),
        ("rack4.node-7", "block.node", "rack4"),
        ("core.leaf2.node-7.site", "switch.switch.node", "core.leaf2"),
        ("core..node-7", "switch.switch.node", "core"),
        ("..node-7", "switch.switch.node", None),
        ("node-7", "node", None),
        ("node-7.site", "node", None),
        ("node-7", "switch.node", None),
        ("core.leaf2.node-7", None, None),
        ("core.leaf2", "switch.switch", None),
        (None, "switch.node", None),
        (None, None, None),
    ],
)
def test_a_nodes_segment_is_its_place_without_itself(
    topology: str | None, pattern: str | None, segment: str | None
) -> None:
    data = make_cluster()
    places = {"topology": topology, "topology_pattern": pattern}
    data["nodes"][0] |= {name: words for name, words in places.items() if words is not None}
    assert parse_cluster(data, where="c").nodes[0].segment == segment


def test_the_link_of_segments_is_read_as_it_was_written(tmp_path: Path) -> None:
    data = changed("links.segment", {"bandwidth_bytes_per_s": 4e10, "latency_s": 1e-5})
    for index, node in enumerate(data["nodes"]):
        node |= {"topology": f"leaf{index}.{node['name']}", "topology_pattern": "switch.node"}
    cluster = parse_cluster(data, where="c")
    assert cluster.links.segment == Link(bandwidth_bytes_per_s=4e10, latency_s=1e-5)
    write_cluster(cluster, path=tmp_path / "cluster.json")
    assert read_cluster(tmp_path / "cluster.json") == cluster
