"""Every phase of every table, executed by devices that send each other blocks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet_plugin.errors import PlanError
from quartet_plugin.partition.named import named_partition
from quartet_plugin.partition.table import Home, Partition, Tensor
from quartet_plugin.partition.traffic import messages
from quartet_plugin.runtime.partition.device_steps import DeviceSteps
from tests import warm_ranks
from tests.megatron.support import run_ranks
from tests.partition.counted import sent_by_tensor
from tests.runtime.partition.blocks import SIZES, linear_error, mlp_error
from tests.runtime.partition.thread_devices import run_devices

_TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6}


def check_traffic(partition: Partition, sent: Sequence[Any], dtype: torch.dtype) -> None:
    """Messages and bytes of two microbatches are the table's by phase and tensor, on rings by device."""
    elements, numbers = sent_by_tensor(partition, SIZES), messages(partition)
    num_sent: Counter[Any] = sum((number for number, _ in sent), Counter())
    bytes_sent: Counter[Any] = sum((size for _, size in sent), Counter())
    devices = partition.num_devices
    assert num_sent == {key: 2 * devices * number for key, number in numbers.items()}
    assert bytes_sent == {key: 2 * devices * dtype.itemsize * count for key, count in elements.items()}
    if partition.name.startswith(("home", "P", "ring")):
        for number, size in sent:
            assert number == {key: 2 * count for key, count in numbers.items()}
            assert size == {key: 2 * dtype.itemsize * count for key, count in elements.items()}


@pytest.mark.parametrize(
    "name",
    [
        *("P2x2", "home2x2-in", "home2x2-out", "home2x2-in-KMN", "home2x2-out-MNK"),
        *("ring-column4", "ring-row4", "column4", "row4", "column4-replicated", "row4-replicated"),
        *("2D2x2", "2.5D2x2x2", "3D2x2x2", "K2-home2x2-in", "N2-home2x2-out", "M2-home2x2-in"),
    ],
)
def test_a_linear_is_the_plain_product(name: str) -> None:
    partition = named_partition(name)
    results = run_devices(
        partition.num_devices,
        lambda device, sending: linear_error(partition, device, sending, torch.float64),
    )
    assert max(error for error, _ in results) < _TOLERANCE[torch.float64]
    check_traffic(partition, [(sent.num_sent, sent.bytes_sent) for _, sent in results], torch.float64)


@pytest.mark.parametrize("dtype", list(_TOLERANCE))
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("home2x2-in", "home2x2-out"),
        ("ring-column4", "ring-row4"),
        ("K2-home2x2-in", "N2-home2x2-out"),
        ("column2", "row2"),
    ],
)
def test_an_mlp_needs_no_redistribution(first: str, second: str, dtype: torch.dtype) -> None:
    errors = run_devices(
        named_partition(first).num_devices,
        lambda device, sending: mlp_error(first, second, device, sending, dtype),
    )
    assert max(errors) < _TOLERANCE[dtype]


def test_a_device_whose_blocks_are_no_rectangle_is_refused() -> None:
    partition = named_partition("2D2x2")
    assert DeviceSteps(partition, 0).homes
    blocks = (((0, 0), (1, 1)), ((0, 1),), ((1, 0),), ())
    homes = {**partition.homes, Tensor.INPUT: Home(blocks)}
    with pytest.raises(PlanError, match="blocks of I on device 0 are no rectangle"):
        DeviceSteps(replace(partition, homes=homes), 0)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_four_processes_over_gloo(tmp_path: Path) -> None:
    """The paper's table, all 54 home-anchored ones and rings: errors, messages and bytes of every rank."""
    program, log = "tests.runtime.partition.layer_rank", tmp_path / "log"
    code, output = run_ranks(4, program, timeout_s=110, log=log, framework=warm_ranks.TORCH)
    assert code == 0, output[-3000:]
    assert output.count(" done") == 4
    lines = [line.split() for line in output.splitlines() if line.count(" fp")]
    assert len(lines) == 2 * (1 + 54 + 2 + 2)
    limits = {"fp64": 1e-14, "fp32": 1e-6}
    assert [line for line in lines if float(line[3]) >= limits[line[2]]] == []
