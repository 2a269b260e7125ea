"""Text and JSON of a partition are read back to the same partition; what breaks the format is refused."""

import json
from pathlib import Path

import pytest

from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.partition.files import (
    partition_from_json,
    partition_to_json,
    partition_to_text,
    read_partition,
    write_partition,
)
from quartet_plugin.partition.named import FAMILIES, named_partition
from tests.partition.text_form import partition_from_text

NAMES = [*(family.example for family in FAMILIES), "row4", "ring-row12", "home4x4-out-KMN", "P3x3"]


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_are_inverses(name: str, tmp_path: Path) -> None:
    partition = named_partition(name)
    assert partition_from_text(partition_to_text(partition)) == partition
    write_partition(tmp_path / "partition.json", partition)
    assert read_partition(tmp_path / "partition.json") == partition


def broken(**changes: object) -> dict[str, object]:
    return {**json.loads(json.dumps(partition_to_json(named_partition("P2x2")))), **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh": [2, 3]}, "needs a product for each of 6 devices"),
        ({"mesh": []}, "mesh"),
        ({"mesh": [1024, 1024]}, "1048576 devices"),
        ({"carried": ["O"]}, "carried"),
        ({"kept": ["I"]}, "carried and kept must be disjoint"),
        ({"schema_version": 2}, "schema_version"),
        ({"pieces": {"M": 1, "N": 2, "K": 2}}, "M is 1; must be 0 to 0"),
        ({"steps": {"F": [], "B": [], "G": []}}, "phase F"),
        ({"steps": {"F": [["O00+=I00 W10"]], "B": [], "G": []}}, "blocks that agree"),
        ({"steps": {"F": [["rm -rf"]], "B": [], "G": []}}, "must be a product"),
        ({"extra": 1}, "extra"),
    ],
)
def test_what_breaks_the_format_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises((ConfigError, PlanError), match=words):
        partition_from_json(broken(**changes))


def test_a_home_that_is_no_block_is_refused() -> None:
    data = broken()
    data["homes"]["I"]["blocks"][0] = "0x0"  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"homes\.I\.blocks\[0\]: '0x0': must be blocks"):
        partition_from_json(data)


@pytest.mark.parametrize(
    "name", ["P2x3", "column0", "Q2x2", "home2x2-up", "K2-P2x2", "2D99x99", "row9999", ""]
)
def test_names_of_no_partition_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="partition"):
        named_partition(name)
