"""The id of a machine's boot."""

from pathlib import Path

import pytest

from quartet_plugin.protocol import node_identity


def test_the_machine_has_one_id_and_may_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "boot_id").write_text("6f1e\n")
    monkeypatch.setattr(node_identity, "BOOT_FILE", tmp_path / "boot_id")
    assert node_identity.recorded_boot_id() == "6f1e"
    monkeypatch.setattr(node_identity, "BOOT_FILE", tmp_path / "absent")
    assert node_identity.recorded_boot_id() == ""
