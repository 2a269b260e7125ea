"""What imports leave behind that a fork cannot take over; the rest is in tests/launchers/test_warm.py."""

import os
from pathlib import Path

import pytest

from quartet_plugin.rank.warm import import_checks
from quartet_plugin.rank.warm.import_checks import ImportChecks


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> ImportChecks:
    # This process has threads and children of its own.
    monkeypatch.setattr(ImportChecks, "_num_threads", lambda _: 1)
    monkeypatch.setattr(import_checks, "_has_children", lambda: False)
    return ImportChecks()


def test_nothing_is_wrong_at_first(checks: ImportChecks) -> None:
    assert checks.fault(on_cpu=True) is None


def test_an_open_device_is_named(checks: ImportChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_checks, "_DEVICE_FILES", ("/dev/nvidia", "/dev/zero"))
    with Path("/dev/zero").open("rb"):
        assert checks.fault(on_cpu=False) == "opens the device /dev/zero"
    assert checks.fault(on_cpu=True) is None


@pytest.mark.parametrize("name", ["RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"])
def test_a_rank_variable_that_is_read_is_named(checks: ImportChecks, name: str) -> None:
    with checks.noting_rank_reads():
        assert os.environ.get("HOME") is not None
        assert checks.fault(on_cpu=True) is None
        os.environ.get(name)
    assert checks.fault(on_cpu=True) == f"reads {name}"
    os.environ.get("GROUP_RANK")
    assert checks.fault(on_cpu=True) == f"reads {name}"


def test_a_copy_of_its_own_output_is_nothing_new(checks: ImportChecks, tmp_path: Path) -> None:
    """As DeepSpeed leaves one behind, that looks for a library with a compiler."""
    copy = os.dup(2)
    try:
        assert checks.fault(on_cpu=True) is None
    finally:
        os.close(copy)
    with (tmp_path / "other").open("wb"):
        assert checks.fault(on_cpu=True) == f"opens {tmp_path / 'other'}"
