"""`quartet partition`: the list, the three forms of a table, and refusals in one line and a table."""

import json
from pathlib import Path

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.partition.files import partition_from_json, partition_to_json
from quartet_plugin.partition.named import FAMILIES, named_partition
from tests.partition.text_form import partition_from_text


def test_list_names_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", "list"]) == 0
    output = capsys.readouterr().out
    for family in FAMILIES:
        assert family.form in output
    row = next(line for line in output.splitlines() if line.startswith("PQxQ"))
    assert row.split()[1:4] == ["P2x2", "4", "8"]
    assert "1/2 MN + 1 NK + 1/2 MK" in row


def test_list_has_the_same_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", "list", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["schema_version"] == 1
    by_name = {record["name"]: record for record in content["partitions"]}
    assert list(by_name) == [family.form for family in FAMILIES]
    rings = by_name["PQxQ"]
    assert (rings["example"], rings["num_devices"], rings["num_messages"]) == ("P2x2", 4, 8.0)
    assert rings["sends"] == {"MN": 0.5, "NK": 1.0, "MK": 0.5}


def test_shown_text_and_json_are_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    expected = named_partition("home4x4-out")
    assert main(["partition", "show", "home4x4-out"]) == 0
    assert partition_from_text(capsys.readouterr().out) == expected
    assert main(["partition", "show", "home4x4-out", "--format", "json"]) == 0
    assert partition_from_json(json.loads(capsys.readouterr().out)) == expected


def test_the_table_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", "show", "P2x2", "--format", "text"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].replace("    ", "  ").split("  ") == [
        "G1",
        "dW00+=I10' dO10",
        "dW11+=I11' dO11",
        "dW10+=I01' dO00",
        "dW01+=I00' dO01",
    ]


def test_a_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "p.png"
    assert main(["partition", "show", "P2x2", "--format", "png", "-o", str(path)]) == 0
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert main(["partition", "show", "P16x16", "--format", "png", "-o", str(path)]) == 2


def test_a_picture_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", "show", "P2x2", "--format", "png"]) == 2
    assert capsys.readouterr().err == "quartet: --format png: a picture needs a file; add -o FILE\n"


def test_a_file_with_a_wrong_cell_is_refused_with_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = partition_to_json(named_partition("P2x2"))
    data["steps"]["B"][1][3] = data["steps"]["B"][0][3]
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(data))
    assert main(["partition", "show", str(path)]) == 2
    message, *table = capsys.readouterr().err.splitlines()
    assert message == (
        "quartet: P2x2: product (M 1, N 1, K 1) at B1, device (1,1): twice, also at B0, device (1,1); "
        "each once"
    )
    assert "[dI11+=dO11 W11']" in table[4]
    assert "(dI11+=dO11 W11')" in table[3]
