"""What a node says of itself, and how the first node is reached."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.probe.node_checks import (
    infiniband_ports,
    interfaces,
    meet,
    node_facts,
    product_s,
    storage_s,
)
from tests.ports import free_port

pytestmark = pytest.mark.timeout(60)


def test_a_node_says_what_it_has(tmp_path: Path) -> None:
    facts = node_facts(
        tmp_path, {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "x" * 300, "HOME": "/", "MY_TOKEN": "t0psecret"}
    )
    assert facts["packages"]["torch"]
    assert facts["num_cores"] == len(os.sched_getaffinity(0))
    assert all(seconds > 0.0 for seconds in facts["product_s"])
    assert facts["product_s"]
    assert facts["nccl_variables"] == ["NCCL_DEBUG", "NCCL_DEBUG_FILE"]
    assert facts["nccl_values"] == {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "x" * 200}
    assert "t0psecret" not in json.dumps(facts)
    assert {"open files", "processes", "locked memory"} <= set(facts["limits"])
    assert facts["free_bytes"][str(tmp_path)] > 0
    assert json.loads(json.dumps(facts)) == facts
    assert not list(tmp_path.iterdir()), "what was written to try the storage is gone"


def test_a_torch_whose_libraries_are_missing_leaves_the_speed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "torch":
                raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert product_s() == []


def test_a_device_that_refuses_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in exclusive mode that another process holds."""
    import torch

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            if self.index == 0:
                raise RuntimeError("CUDA-capable device(s) is/are busy or unavailable")

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr("quartet_plugin.rank.product_time.product_times", lambda: (3e-3, 2e-3))
    assert product_s() == [2e-3]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        storage_s(tmp_path / "absent")


def test_ports_and_interfaces_are_read_from_the_system(tmp_path: Path) -> None:
    for number, state in ((1, "4: ACTIVE"), (2, "1: DOWN")):
        port = tmp_path / "mlx5_0" / "ports" / str(number)
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert infiniband_ports(tmp_path) == {
        "mlx5_0:1": "4: ACTIVE, 400 Gb/sec (4X NDR)",
        "mlx5_0:2": "1: DOWN, 400 Gb/sec (4X NDR)",
    }
    (tmp_path / "net" / "lo").mkdir(parents=True)
    (tmp_path / "net" / "eth0").mkdir()
    (tmp_path / "net" / "eth0" / "operstate").write_text("up\n")
    assert interfaces(tmp_path / "net") == {"eth0": "up"}
    assert interfaces(tmp_path / "absent") == {}


def test_nodes_meet_at_the_first_one_and_compare_clocks() -> None:
    port = free_port()
    environments = [
        {"NNODES": "3", "NODE_RANK": str(index), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        for index in range(3)
    ]
    places: dict[int, dict[str, Any]] = {}
    threads = [
        threading.Thread(target=lambda index=index: places.update({index: meet(environments[index])}))
        for index in (1, 2, 0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert places[0]["answered"] == 2
    for index in (1, 2):
        assert abs(places[index]["clock_offset_s"]) < 30.0
        assert "unreached" not in places[index]


def test_a_port_that_nobody_answers_is_named() -> None:
    port = free_port()
    environment = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    place = meet(environment, limit_s=0.1)
    assert place["unreached"].startswith(f"port {port} of localhost: ")
    first = meet({**environment, "NODE_RANK": "0"}, limit_s=0.1)
    assert first["answered"] == 0


def test_the_process_of_a_node_writes_its_file(tmp_path: Path) -> None:
    environment = {**os.environ, "NNODES": "1", "NODE_RANK": "0"}
    words = [sys.executable, "-m", "quartet_plugin.probe.node_checks", str(tmp_path)]
    subprocess.run(words, env=environment, check=True, timeout=50)
    assert json.loads((tmp_path / "node-0.json").read_text())["num_nodes"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["node-0.json"]
