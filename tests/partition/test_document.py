"""docs/partitions.md: every command runs, and the figures of its table are what the commands print."""

import re
import shlex
from pathlib import Path

import pytest

from quartet_plugin.cli.main import main

TEXT = (Path(__file__).parents[2] / "docs" / "partitions.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = [
    *(line for _, block in BLOCKS for line in block.splitlines() if line.startswith("quartet ")),
    *re.findall(r"`(quartet [^`]+)`", TEXT),
]
SYSTEMS = ("PrimePar", "OneFlow", "GSPMD", "veScale", "Colossal-AI")
FORMS = ("stock", "rings", "grid", "primepar", "2d")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("document")
    (job,) = (block for kind, block in BLOCKS if kind == "yaml")
    (path / "job.yaml").write_text(job, encoding="utf-8")
    return path


def test_every_system_has_its_command() -> None:
    for system in SYSTEMS:
        assert re.search(rf"^\| {system}[^|]*\|[^|]*\| `quartet (partition show|export) ", TEXT, re.MULTILINE)


def test_every_command_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the document's order: later commands read what earlier ones write."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(folder)
    assert len(COMMANDS) >= 14
    for command in COMMANDS:
        code = main(shlex.split(command)[1:])
        printed = capsys.readouterr()
        assert (code, printed.err) == (0, ""), command
        assert printed.out


def priced_rows() -> list[tuple[str, list[str]]]:
    rows = re.findall(r"^\| `(quartet partition price [^`]+)` \| (.*) \|$", TEXT, re.MULTILINE)
    return [(command, cells.split(" | ")) for command, cells in rows]


@pytest.mark.parametrize(("command", "cells"), priced_rows(), ids=[row[0] for row in priced_rows()])
def test_prices_are_those_of_the_command(
    command: str, cells: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(command)[1:]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    printed = {words[0]: float(words[1]) for words in lines if words and words[0] in FORMS}
    assert [f"{printed[form]:.2f}" for form in FORMS] == cells
