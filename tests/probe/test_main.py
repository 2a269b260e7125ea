"""A rank of the probe, as far as it comes without GPUs."""

import os
import sys
from typing import Any

import pytest

from tests.probe.fake_nvml import FakeNvml


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
    known = devices._nvml(0)
    assert known.get("fabric") == fabric
    assert known["name"] == "NVIDIA GB200"


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
