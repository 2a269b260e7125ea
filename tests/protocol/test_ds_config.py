"""The ds_config of a command, and its section `quartet`."""

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.protocol.ds_config import (
    Settings,
    config_argument,
    config_label,
    load_config,
    parse_settings,
    read_config,
)


def test_the_section() -> None:
    assert parse_settings({}).is_empty
    assert parse_settings({"quartet": {"plan": "a.json"}}) == Settings(plan=Path("a.json"))
    assert parse_settings({"quartet": {"plan": "auto"}}).is_auto
    for wrong in ({"plan": 3}, {"plan": ""}, {}, "a.json", {"plans": "a"}, {"schedule": None, "plan": None}):
        with pytest.raises(ConfigError):
            parse_settings({"quartet": wrong})


def test_the_config_among_the_words() -> None:
    assert config_argument(["--x", "--deepspeed_config", "a.json"]) == "a.json"
    assert config_argument(["--deepspeed-config=b.json", "--deepspeed_config=e30="]) == "e30="
    assert config_argument(["--deepspeed"]) is None
    assert config_argument(["--deepspeed_config"]) is None


def test_the_function_that_makes_layers() -> None:
    settings = parse_settings({"quartet": {"layer_builder": "my.model:layers_of"}})
    assert settings == Settings(layer_builder="my.model:layers_of")
    assert settings.is_empty
    for wrong in ("", "a b", "a()", ":f", "a:", "a::b", "1f", "a\n"):
        with pytest.raises(ConfigError, match="layer_builder"):
            parse_settings({"quartet": {"layer_builder": wrong}})


COMMENTED = """{
  // The sizes
  "train_batch_size": 8, # of all copies
  /* One stage for all */
  "zero_optimization": {"stage": 1,},
}
"""
READ = {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
HOW = "; remove comments and trailing commas, or install hjson"


def written(folder: Path, text: str) -> Path:
    path = folder / "ds.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_ds_config_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("hjson")
    assert read_config(written(tmp_path, COMMENTED)) == READ


def test_comments_need_hjson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    assert read_config(written(tmp_path, json.dumps(READ))) == READ
    with pytest.raises(ConfigError, match=rf"ds\.json:2:3: not JSON: [^\n]*{HOW}$"):
        read_config(written(tmp_path, COMMENTED))
    with pytest.raises(ConfigError, match="the key appears twice") as refusal:
        read_config(written(tmp_path, '{"a": 1, "a": 2}'))
    assert HOW not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, /* twice */ "a": 2}', "'a': the key appears twice in one object"),
        (f'{{"a": {"[" * 40}{"]" * 40},}}', "nested deeper than 32"),
        ('{/**/ "a": 1e999}', "hjson: "),
        ("{ /* ", "hjson: "),
        ("[1, 2,]", "a ds_config is a JSON object; this is a list"),
    ],
)
def test_a_text_with_comments_keeps_the_rules_of_json_files(tmp_path: Path, text: str, words: str) -> None:
    pytest.importorskip("hjson")
    with pytest.raises(ConfigError) as refusal:
        read_config(written(tmp_path, text))
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode, base64.encodebytes])
def test_a_ds_config_in_base64_is_read_as_deepspeed_reads_it(
    tmp_path: Path, encode: Callable[[bytes], bytes]
) -> None:
    """In both alphabets, in lines, and longer than any path."""
    config = {"train_batch_size": 8, "note": "?~?~?~?>?>?>" * 500}
    assert load_config(encode(json.dumps(config).encode()).decode(), folder=tmp_path) == config


def test_a_ds_config_in_base64_may_have_comments(tmp_path: Path) -> None:
    pytest.importorskip("hjson")
    assert load_config(base64.b64encode(COMMENTED.encode()).decode(), folder=tmp_path) == READ


def test_a_file_is_read_before_base64(tmp_path: Path) -> None:
    assert load_config("e30=", folder=tmp_path) == {}
    (tmp_path / "e30=").write_text(json.dumps(READ), encoding="utf-8")
    assert load_config("e30=", folder=tmp_path) == READ
    assert load_config(tmp_path / "e30=") == READ


@pytest.mark.parametrize(
    "text", ["ds.json", pytest.param("e30" * 2000, id="long"), "--other", "..", "", "{}", "é30="]
)
def test_a_text_that_is_neither_a_file_nor_base64_is_no_ds_config(tmp_path: Path, text: str) -> None:
    assert load_config(text, folder=tmp_path) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"a": 1, "a": 2}', "the key appears twice in one object"),
        (json.dumps([1] * 500), "a ds_config is a JSON object; this is a list"),
    ],
)
def test_a_faulty_ds_config_in_base64_is_refused_in_a_short_line(
    tmp_path: Path, content: str, words: str
) -> None:
    text = base64.encodebytes(content.encode()).decode()
    with pytest.raises(ConfigError) as refusal:
        load_config(text, folder=tmp_path)
    line = str(refusal.value)
    assert line.startswith(f"{config_label(text)} (no such file, so read as base64):")
    assert line.endswith(words)
    assert "\n" not in line
    assert len(line) < 250
