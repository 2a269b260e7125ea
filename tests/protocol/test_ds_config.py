"""The ds_config of a command, and its section `quartet`."""

from pathlib import Path

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.protocol.ds_config import Settings, config_file_of, parse_settings


def test_the_section() -> None:
    assert parse_settings({}).is_empty
    assert parse_settings({"quartet": {"plan": "a.json"}}) == Settings(plan=Path("a.json"))
    assert parse_settings({"quartet": {"plan": "auto"}}).is_auto
    for wrong in ({"plan": 3}, {"plan": ""}, {}, "a.json", {"plans": "a"}, {"schedule": None, "plan": None}):
        with pytest.raises(ConfigError):
            parse_settings({"quartet": wrong})


def test_the_config_among_the_words() -> None:
    assert config_file_of(["--x", "--deepspeed_config", "a.json"]) == Path("a.json")
    assert config_file_of(["--deepspeed-config=b.json", "--deepspeed_config=c.json"]) == Path("c.json")
    assert config_file_of(["--deepspeed"]) is None
    assert config_file_of(["--deepspeed_config"]) is None


def test_the_function_that_makes_layers() -> None:
    settings = parse_settings({"quartet": {"layer_builder": "my.model:layers_of"}})
    assert settings == Settings(layer_builder="my.model:layers_of")
    assert settings.is_empty
    for wrong in ("", "a b", "a()", ":f", "a:", "a::b", "1f", "a\n"):
        with pytest.raises(ConfigError, match="layer_builder"):
            parse_settings({"quartet": {"layer_builder": wrong}})
