"""A rank of the probe, as far as it comes without GPUs."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.probe.fake_nvml import UUID, FakeNvml, properties


@pytest.mark.parametrize(("device", "switched_off"), [("cuda", "0"), ("cpu", None)])
def test_links_are_measured_without_nvlink_sharp(
    monkeypatch: pytest.MonkeyPatch, device: str, switched_off: str | None
) -> None:
    import torch
    import torch.distributed as dist

    from quartet_plugin.probe.__main__ import main

    seen: list[str | None] = []

    def group(**_: Any) -> None:
        seen.append(os.environ.get("NCCL_NVLS_ENABLE"))
        raise InterruptedError

    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.delenv("NCCL_NVLS_ENABLE")
    monkeypatch.setattr(sys, "argv", ["probe", "findings.json", device, "30"])
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", group)
    with pytest.raises(InterruptedError):
        main()
    assert seen == [switched_off]


@pytest.mark.parametrize(
    ("nvml", "fabric"),
    [
        (FakeNvml(), f"{bytes(range(16)).hex()}:7"),
        (FakeNvml(state=2), None),
        (FakeNvml(identity=bytes(16)), None),
        (FakeNvml(knows_fabrics=False), None),
    ],
)
def test_a_device_knows_its_fabric(
    nvml: FakeNvml, fabric: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quartet_plugin.probe import devices

    monkeypatch.setattr("importlib.import_module", lambda _: nvml)
    known = devices._gpu(properties())
    assert known.get("fabric") == fabric
    assert known["name"] == "NVIDIA GB200"


@pytest.mark.parametrize("visible", ["1", "1,0", f"GPU-{UUID}", f"GPU-{UUID[:8]}", None])
def test_a_device_is_the_one_that_torch_sees(visible: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first visible device is the driver's second, by a mask or by CUDA_DEVICE_ORDER."""
    import torch

    from quartet_plugin.probe import devices

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties())
    known = devices.describe(torch.device("cuda", 0))
    assert (known["name"], known["memory_bytes"]) == ("NVIDIA GB200", 189_471 * 2**20)
    assert known["power_watts"] == 1_200.0


@pytest.mark.parametrize("uuid", [UUID, "c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"])
def test_a_slice_of_a_device_has_its_part_of_the_memory(uuid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether torch gives the UUID of the whole device or of the slice."""
    import torch

    from quartet_plugin.probe import devices

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    part = properties(name="NVIDIA GB200 MIG 1g.23gb", total_memory=23 * 2**30, uuid=uuid)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: part)
    known = devices.describe(torch.device("cuda", 0))
    assert (known["name"], known["memory_bytes"]) == ("NVIDIA GB200 MIG 1g.23gb", 23 * 2**30)
    assert known["power_watts"] is None
    assert "fabric" not in known


@pytest.mark.parametrize(
    ("places", "names"),
    [
        (["a.m 0", "a.m 1", "b.n 0", "b.n 1"], ["a", "a", "b", "b"]),
        # Containers of one name on two machines, then also in turns.
        (["w.m 0", "w.m 1", "w.n 0", "w.n 1"], ["w 0", "w 0", "w 1", "w 1"]),
        (["w.m 0", "w.n 0", "w.m 1", "w.n 1"], ["w 0", "w 1", "w 0", "w 1"]),
        (["w.m 0", "x.n 0", "w.o 0"], ["w 0", "x", "w 2"]),
        # Two launchers on one machine, or a system without an id of its boot.
        (["w. 0", "w. 1", "w. 0"], ["w 0", "w 0", "w 1"]),
        # Two pods of one machine are two nodes.
        (["a.m 0", "b.m 0"], ["a", "b"]),
    ],
)
def test_nodes_of_one_host_name_are_told_apart(places: list[str], names: list[str]) -> None:
    from quartet_plugin.probe.node_names import node_names

    ranks = []
    for place in places:
        node, local = place.split()
        host, machine = node.split(".")
        ranks.append({"host": host, "machine": machine, "local_rank": int(local)})
    assert node_names(ranks) == names


def test_ranks_of_two_machines_with_one_name_are_two_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process group is a fake of two ranks; the other one has the same host name and local rank."""
    import socket

    import torch.distributed as dist

    from quartet_plugin.cost.probed import Findings, cluster_of
    from quartet_plugin.model.schema import read_record
    from quartet_plugin.probe import devices, links
    from quartet_plugin.probe.__main__ import main

    def gather(ranks: list[Any], rank: dict[str, Any]) -> None:
        ranks[:] = [rank, {**rank, "machine": "another"}]

    level = {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-5}
    measured = {"scale_up": None, "network": level, "pairs": None}
    hosts: list[str] = []

    def measure(*_: Any, **given: Any) -> dict[str, Any]:
        hosts.extend(given["hosts"])
        return measured

    monkeypatch.setattr(sys, "argv", ["probe", str(tmp_path / "findings.json"), "cpu", "30"])
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    for name in ("init_process_group", "barrier", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda **_: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    rates = {"matmul_flops": {"fp32": 5e10}, "copy_bytes_per_s": 1e10}
    monkeypatch.setattr(devices, "measure_rates", lambda _: rates)
    monkeypatch.setattr(links, "measure_links", measure)
    main()
    host = socket.gethostname()
    assert hosts == [f"{host} 0", f"{host} 1"]
    cluster = cluster_of(read_record(Findings, tmp_path / "findings.json"))
    assert [(node.name, len(node.devices)) for node in cluster.nodes] == [(name, 1) for name in hosts]


def test_a_node_knows_its_place_under_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    from quartet_plugin.probe import devices

    for name in ("SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"):
        monkeypatch.delenv(name, raising=False)
    assert devices.place_of_node() == {}
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "core.leaf2.node-7")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.switch.node")
    assert devices.place_of_node() == {
        "topology": "core.leaf2.node-7",
        "topology_pattern": "switch.switch.node",
    }
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "x" * 201)
    assert "topology" not in devices.place_of_node()
