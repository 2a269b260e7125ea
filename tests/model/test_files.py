"""Reading untrusted JSON and writing it atomically."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from pydantic import BaseModel, ConfigDict

from quartet_plugin.errors import ConfigError, StorageError
from quartet_plugin.model import files
from quartet_plugin.model.files import (
    field_path,
    parse_json,
    read_json,
    shown,
    write_bytes_atomic,
    write_json_atomic,
)
from quartet_plugin.model.sections import validate
from tests.model.test_canonical import values


def read(tmp_path: Path, content: bytes, **limits: int) -> Any:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    return read_json(path, **limits)


BAD = [
    (b"", ":1:1: not JSON"),
    (b"{", ":1:2: not JSON"),
    (b'{"a": 1}\n}', ":2:1: not JSON"),
    (b'{"a": 1,\n "a": 2}', ':2:5: "a": the key appears twice'),
    (b'[{"b": {"a": 1, "a": 1}}]', ':1:20: "a": the key appears twice'),
    (b"[NaN]", ":1:2: NaN: numbers must be finite"),
    (b'["NaN", -Infinity]', ":1:9: -Infinity: numbers must be finite"),
    (b"[1,\n1e999]", ":2:1: 1e999: numbers must be finite"),
    (b"[1" + b"0" * 5000 + b"]", ":1:2: 1000"),
    (b'{"shape": {"num_layers": 1' + b"0" * 400 + b"}}", ":1:26: shape.num_layers: 1000"),
    (b'{"a": [1, {"b": -1' + b"0" * 20 + b"}]}", f":1:17: a[1].b: -1{'0' * 20}: integers must lie"),
    (b'{"a": [0, 1e999]}', ":1:11: a[1]: 1e999: numbers must be finite"),
    (b"[" * 33 + b"]" * 33, ":1:33: [: nested deeper than 32"),
    (b'{"a":' * 33 + b"1" + b"}" * 33, ":1:161: {: nested deeper than 32"),
    (b"[" * 200_000, ":1:33: [: nested deeper than 32"),
    (b'["\xff"]', ":1:3: byte 0xff: the file must be UTF-8"),
    (b'{\n"\xc3\xa9": \x80}', ":2:7: byte 0x80"),
    (b"\xef\xbb\xbf{}", ":1:1: not JSON"),
    (b"'a'", ":1:1: not JSON"),
]


@pytest.mark.parametrize(("content", "message"), BAD, ids=lambda v: repr(v)[:30])
def test_bad_json(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, content)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / 'x.json'}{message}")
    assert text.splitlines() == [text]
    assert len(text) < len(str(tmp_path)) + 200


def test_the_limits(tmp_path: Path) -> None:
    assert read(tmp_path, b"[" * 32 + b"]" * 32) is not None
    assert read(tmp_path, b"[[1]]", max_depth=2, max_bytes=5) == [[1]]
    with pytest.raises(ConfigError, match="longer than 4 bytes"):
        read(tmp_path, b"[[1]]", max_bytes=4)
    with pytest.raises(ConfigError, match=r"x\.json:1:2: \[: nested deeper than 1"):
        read(tmp_path, b"[[1]]", max_depth=1)


def test_integers_of_64_bits_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, b"[18446744073709551615, -9223372036854775808]") == [2**64 - 1, -(2**63)]
    assert read(tmp_path, b'["00000000000000000000000000", 0.10000000000000000000000001]')[1] == 0.1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" + b"0," * 30_000_000 + b"0]", "about 30000001 values; a file must have at most"),
        (b"{" + b'"a":0,' * 3_000_000 + b'"b":0}', "about 3000001 keys"),
        (b"[" + b"[]," * 3_000_000 + b"0]", "about 3000001 objects and arrays"),
    ],
    ids=["values", "keys", "arrays"],
)
def test_a_wide_file_is_refused_before_it_is_parsed(
    content: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "loads", lambda *arguments, **options: pytest.fail("parsed"))
    with pytest.raises(ConfigError, match=words):
        parse_json(content, where="x.json")


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ConfigError, match="longer than"):
        read_json(path)


def test_the_fault_of_a_long_file_is_named_without_its_place() -> None:
    for number, rule in (
        (b"NaN", "NaN: numbers must be finite"),
        (b"1" * 30, "1: integers must lie between"),
    ):
        with pytest.raises(ConfigError, match=rf"^x\.json: \S*{rule}"):
            parse_json(b"[" + b"0, " * 2_000_000 + number + b"]", where="x.json")


@pytest.mark.parametrize("place", ["missing.json", ".", "a/b.json", "nul\0.json"])
def test_a_place_that_cannot_be_read(place: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read|not a path"):
        read_json(f"{tmp_path}/{place}")


@given(values)
@settings(deadline=None, max_examples=60)
def test_round_trip(value: Any) -> None:
    text = "".join(files._formatted(value, ""))
    assert json.loads(text) == value


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    value = {"z": [1, 2.5, None], "a": {"é": ["x" * 200, {"b": True}]}}
    write_json_atomic(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value
    assert list(read_json(tmp_path / "x.json")) == ["z", "a"]
    assert (tmp_path / "x.json").read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("value", [float("nan"), {"a": {1, 2}}, "\ud800", b"x"], ids=repr)
def test_what_is_not_json_is_not_written(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not JSON"):
        write_json_atomic(tmp_path / "x.json", value)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_json_atomic(path, [1])

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        write_json_atomic(path, [2])
    assert read_json(path) == [1]
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("place", ["missing/x.json", "."])
def test_a_place_that_cannot_be_written(place: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_json_atomic(tmp_path / place, 1)


def test_modes_are_kept(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("1")
    old.chmod(0o600)
    before = os.umask(0o027)
    try:
        write_json_atomic(old, 2)
        write_json_atomic(new, 2)
    finally:
        os.umask(before)
    assert stat.S_IMODE(old.stat().st_mode) == 0o600
    assert stat.S_IMODE(new.stat().st_mode) == 0o640


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link, target = tmp_path / "link.json", tmp_path / "folder" / "target.json"
    target.write_text("1")
    link.symlink_to(target)
    write_json_atomic(link, 2)
    assert link.is_symlink()
    assert read_json(target) == 2


def test_a_pipe_is_written_directly(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_bytes_atomic(pipe, b"hello")
        assert os.read(reader, 100) == b"hello"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    size: int


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    items: list[Inner]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "f.json: items: missing; the key is required"),
        ({"items": [{"size": 1}, {"size": "1"}]}, "f.json: items[1].size: '1': should be a valid integer"),
        ({"items": [], "extra": [1, 2]}, "f.json: extra: [1, 2]: unknown key; remove it"),
        ({"items": [5]}, "f.json: items[0]: 5: must be a JSON object"),
        ([], "f.json: the file: []: must be a JSON object"),
        ({"items": [{}, {}]}, "f.json: items[0].size: missing; the key is required (and 1 more)"),
        ({"items": [], "a\nb": 1}, r"f.json: a\nb: 1: unknown key; remove it"),
    ],
)
def test_validate_names_field_value_and_rule(data: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(Outer, data, where="f.json")
    assert str(caught.value) == message


def test_validate_gives_the_model() -> None:
    assert validate(Outer, {"items": [{"size": 3}]}, where="f.json").items[0].size == 3


def test_words_for_places_and_values() -> None:
    assert field_path(["layers", 3, "forward_s"]) == "layers[3].forward_s"
    assert shown("x" * 1000) == "'" + "x" * 56 + "..."
    assert shown("a\x1b[31m\n") == r"'a\x1b[31m\n'"
    assert len(shown({"a": "b" * 1000})) == 60
    assert len(shown({str(number): [[0] * 1000] * 1000 for number in range(1000)})) == 60
