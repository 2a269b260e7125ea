"""Row 29: a disk that is full leaves space for the end of the log."""

import errno
import os
from pathlib import Path

import pytest

from quartet_plugin.tuner.disk_reserve import DiskReserve


def test_the_room_is_really_taken_and_given_back(tmp_path: Path) -> None:
    with DiskReserve(tmp_path, size_bytes=1 << 20) as ballast:
        (held,) = tmp_path.iterdir()
        assert held.stat().st_blocks * 512 >= 1 << 20
        assert held.stat().st_mode & 0o777 == 0o600
        ballast.drop()
        assert list(tmp_path.iterdir()) == []
        ballast.drop()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_tuner_held_is_given_back(tmp_path: Path) -> None:
    left = tmp_path / ".ballast-999999999"
    left.write_bytes(b"x")
    with DiskReserve(tmp_path, size_bytes=1):
        assert not left.exists()


def test_a_disk_without_the_room_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with DiskReserve(tmp_path):
        assert list(tmp_path.iterdir()) == []
    with DiskReserve(tmp_path / "nowhere"):
        pass


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    target = tmp_path / "target"
    (folder / f".ballast-{os.getpid()}").symlink_to(target)
    with DiskReserve(folder, size_bytes=1):
        assert not target.exists()
