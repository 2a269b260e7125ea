"""`quartet probe`: a valid file from two real gloo ranks, one line for what is wrong, nothing left."""

import sys
from pathlib import Path

import psutil
import pytest

from quartet_plugin.cli import probe as command
from quartet_plugin.cli.main import main
from quartet_plugin.model.cluster import read_cluster
from quartet_plugin.trial.processes import marked_processes

MARK = "5eed" * 8


@pytest.fixture(autouse=True)
def known_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process of the probe carries it."""
    monkeypatch.setattr("secrets.token_hex", lambda _: MARK)


def test_two_ranks_write_a_valid_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.json"
    assert main(["probe", "--device", "cpu", "--processes", "2", "-o", str(path)]) == 0
    cluster = read_cluster(path)
    assert [len(node.devices) for node in cluster.nodes] == [2]
    (name,) = set(cluster.nodes[0].devices)
    values = cluster.devices[name]
    assert 1e8 < values.peak_flops["fp32"] < 1e13
    assert values.memory_bandwidth_bytes_per_s is not None
    assert 1e8 < values.memory_bandwidth_bytes_per_s < 1e13
    assert values.memory_bytes is not None
    assert values.memory_bytes <= psutil.virtual_memory().total
    assert 1e6 < cluster.links.scale_up.bandwidth_bytes_per_s < 1e12
    assert 0 < cluster.links.scale_up.latency_s < 1
    assert cluster.links.measured
    assert "inside a node" in capsys.readouterr().out
    assert not marked_processes(MARK)


def test_torchruns_options_are_the_users(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    assert main(["probe", "--device", "cpu", "-o", str(path), "--", *words]) == 0
    cluster = read_cluster(path)
    assert cluster.num_slots == 1
    assert "not measured" in cluster.source


def test_a_probe_that_takes_too_long_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.json"
    assert main(["probe", "--device", "cpu", "--processes", "2", "--deadline", "1", "-o", str(path)]) == 5
    error = capsys.readouterr().err
    assert "longer than 1 s" in error
    assert error.count("\n") == 1
    assert not path.exists()
    assert not marked_processes(MARK)


def test_ranks_that_fail_are_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_MODULE", "quartet_plugin.no_such_module")
    assert main(["probe", "--device", "cpu", "--processes", "1", "-o", str(tmp_path / "c.json")]) == 5
    error = capsys.readouterr().err
    assert "the probe failed" in error
    assert error.count("\n") == 1
    assert not marked_processes(MARK)


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--device", "tpu"], "--device tpu"),
        (["--deadline", "0"], "--deadline 0"),
        (["--processes", "0"], "--processes 0"),
        (
            ["-o", "/nonexistent/cluster.json"],
            "the folder /nonexistent does not exist",
        ),
        (["--processes", "2", "--", "torchrun"], "give only one"),
        (["--", "python", "train.py"], "must be torchrun"),
        (["--", "torchrun", "--nproc-per-node", "2", "train.py"], "train.py"),
        (["--", "torchrun", "-m", "--nproc-per-node", "2"], "--module"),
        (["--", "torchrun", "--nproc"], "nproc"),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], rule: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is measured."""
    monkeypatch.setattr(command, "_run", lambda *args, **options: pytest.fail("started"))
    assert main(["probe", *words]) == 2
    error = capsys.readouterr().err
    assert rule in error
    assert error.count("\n") == 1
