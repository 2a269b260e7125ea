"""The network namespace of a process, as the kernel names it."""

from pathlib import Path

from quartet_plugin.rank.network_namespace import network_namespace


def test_it_is_the_inode_of_the_namespace(tmp_path: Path) -> None:
    path = tmp_path / "net"
    path.touch()
    assert network_namespace(path=path) == path.stat().st_ino


def test_no_namespace_is_known_where_there_is_no_such_file(tmp_path: Path) -> None:
    assert network_namespace(path=tmp_path / "net") is None
