"""The hardware library and its strict reader."""

import json
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cost.cluster import look_up, uniform_cluster_of
from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.devices import (
    device_named,
    index,
    library,
    match_device,
    read_device,
    read_folder,
)
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.cluster import parse_cluster

NAMES = (
    "A100-SXM-80GB", "A100-SXM-40GB (DGX-A100)", "H100-SXM-80GB", "H100-SXM-96GB HBM2e (500 W)",
    "B200-SXM-180GB", "B300-SXM", "GB200", "GB300", "V100-SXM3-32GB (DGX-2)", "H20", "H800", "H200",
    "Ascend-910B (Atlas 900 A2 PODc)", "MI300X", "MI325X", "MI355X", "MI250X", "A800", "L4", "TPU v4",
)  # fmt: skip


def sample(**changes: Any) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "name": "Toy",
        "generation": "toy",
        "peak_flops": {"bf16": 1e14},
        "memory_bytes": 2**34,
        "memory_bandwidth_bytes_per_s": 1e12,
        "scale_up_bandwidth_bytes_per_s": 1e11,
        "scale_up_topology": "switch",
        "scale_up_devices": 8,
        "scale_out_bandwidth_bytes_per_s": 1e10,
        "devices_per_node": 8,
        "compute_units": 100,
        "source": "made up",
    } | changes


def written(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", NAMES)
def test_every_published_device_is_known(name: str) -> None:
    device = device_named(name)
    assert 0 < device.ceiling_flops("bf16") <= device.peak_flops_of("bf16")


def test_an_unknown_device_is_named_with_the_nearest_or_all_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"device 'H1000': unknown; did you mean h100\?"):
        device_named("H1000")
    with pytest.raises(ConfigError, match=r"device 'cluster': unknown.*H100-SXM-80GB"):
        device_named("cluster")


def test_a_users_device_goes_first(tmp_path: Path) -> None:
    written(tmp_path / "mine.json", sample(name="H100", aliases=["My GPU"]))
    extra = read_folder(tmp_path)
    assert device_named("h100 (loaned)", extra=extra).generation == "toy"
    assert device_named("My GPU", extra=extra).name == "H100"
    assert device_named("H100").generation == "hopper"


def test_a_folder_without_devices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nonexistent: no such folder"):
        read_folder(tmp_path / "nonexistent")
    with pytest.raises(ConfigError, match="no device file"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory_bandwidth_bytes_per_s", -1.0),
        ("memory_bytes", 0),
        ("peak_flops", {"bf17": 1e14}),
        ("scale_up_topology", "torus"),
        ("schema_version", 2),
        ("colour", "red"),
        ("matmul_ceiling", {"bf16": 1.5}),
    ],
)
def test_a_wrong_field_is_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        read_device(written(tmp_path / "bad.json", sample(**{field: value})))


def test_two_devices_of_one_name_are_refused(tmp_path: Path) -> None:
    one = read_device(written(tmp_path / "a.json", sample()))
    other = read_device(written(tmp_path / "b.json", sample(memory_bytes=2**35)))
    with pytest.raises(ConfigError, match="taken twice"):
        index([one, other])


def test_a_missing_format_runs_at_the_next_wider_one() -> None:
    a100, v100 = device_named("A100"), device_named("V100-SXM2")
    assert a100.peak_flops_of("fp8") == a100.peak_flops_of("bf16")
    assert v100.peak_flops_of("bf16") == v100.peak_flops_of("fp16") == 125e12
    assert (a100.format_of("fp8"), a100.format_of("fp32"), v100.format_of("bf16")) == ("bf16", "fp32", "fp16")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("H100-SXM-80GB", "H100-SXM-80GB"),
        ("h100", "H100-SXM-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA B300 SXM6 AC", "B300-SXM"),
        ("AMD Instinct MI300X", "MI300X"),
        ("TPU v4", "TPU v4"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA H20-3e", None),
        ("NVIDIA L4-8Q", None),
        ("NVIDIA H200 MIG 3g.71gb", None),
        # The name alone fits devices of two sizes.
        ("NVIDIA H100", None),
        ("Ascend 910A", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_a_name_means_one_device_of_its_model_form_and_memory(name: str, expected: str | None) -> None:
    device = match_device(name)
    assert (None if device is None else device.name) == expected


def test_a_memory_tells_devices_of_one_name_apart() -> None:
    device = match_device("NVIDIA H100", memory_bytes=85_024_112_640)
    assert device is not None
    assert device.name == "H100-SXM-80GB"
    assert match_device("NVIDIA H100", memory_bytes=2**36) is None
    assert match_device("H100-SXM-80GB", memory_bytes=2**33) is None


def test_the_library_knows_each_device_once() -> None:
    names = {device.name for device in library().values()}
    assert len(names) == len({id(device) for device in library().values()})


def test_a_host_is_the_librarys_or_the_files_or_a_usual_one() -> None:
    usual, grace = device_named("H100"), device_named("GB200")
    assert (usual.resolved_host_link_bytes_per_s, usual.resolved_host_memory_bytes_per_s) == (63e9, 76.8e9)
    assert (grace.resolved_host_link_bytes_per_s, grace.resolved_host_memory_bytes_per_s) == (225e9, 225e9)
    file = {
        "schema_version": 1,
        "devices": {"H100": {"host_link_bytes_per_s": 5e10, "host_memory_bytes_per_s": 6e10}},
        "nodes": [{"name": "a", "devices": ["H100", "H100"]}],
        "links": {"scale_up": {"bandwidth_bytes_per_s": 4.5e11, "latency_s": 2e-6}},
    }
    cluster = look_up(parse_cluster(file, where="cluster.json"), precision="bf16")
    device = uniform_cluster_of(cluster, Constants()).device
    assert (device.resolved_host_link_bytes_per_s, device.resolved_host_memory_bytes_per_s) == (5e10, 6e10)
