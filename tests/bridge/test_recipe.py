"""Recipes of Megatron-Bridge by their names."""

from pathlib import Path

import pytest

from quartet_plugin.bridge.recipe import configuration_of, override
from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import BRIDGE_MODULE, parse_command
from tests.bridge.configurations import make_config

RECIPE = """
from tests.bridge.configurations import make_config

def tiny_pretrain_config():
    return make_config()
"""


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of recipes, as the Bridge lays them out."""
    folder = tmp_path / "recipes_of_a_test" / "tiny" / "h100"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").write_text("")
    (folder / "tiny.py").write_text(RECIPE)
    (folder / "broken.py").write_text("raise AssertionError('not to be imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("quartet_plugin.bridge.recipe.PACKAGES", ("absent_package", "recipes_of_a_test"))


@pytest.mark.usefixtures("recipes")
def test_a_recipe_is_a_function_of_some_module() -> None:
    config = configuration_of("tiny_pretrain_config")
    override(config, ["train.train_iters=7", "ddp.bucket_size=null", "model.fp8=hybrid"])
    assert (config.train.train_iters, config.ddp.bucket_size, config.model.fp8) == (7, None, "hybrid")


@pytest.mark.usefixtures("recipes")
@pytest.mark.parametrize("name", ["large_config", "_tiny", "os.system", "tiny_pretrain_config()", ""])
def test_an_unknown_recipe_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match="no recipe of absent_package or recipes_of_a_test"):
        configuration_of(name)


@pytest.mark.parametrize("word", ["train.train_iter=7", "train=7", "nothing.x=1", "train.train_iters", "x"])
def test_a_field_that_is_not_there_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=r"must be SECTION\.FIELD=VALUE"):
        override(make_config(), [word])


@pytest.mark.parametrize(("text", "value"), [("1e3", 1000), ("2.5e-1", 0.25), ("null", None), ("12", 12)])
def test_a_number_may_have_an_exponent(text: str, value: object) -> None:
    config = make_config()
    override(config, [f"train.train_iters={text}"])
    assert config.train.train_iters == value
    assert type(config.train.train_iters) is type(value)


def test_a_field_of_a_number_takes_no_other_text() -> None:
    with pytest.raises(ConfigError, match=r"train_iters=many': must be a number, as the recipe's value is"):
        override(make_config(), ["train.train_iters=many"])


@pytest.mark.parametrize("text", ["flase", "1", "0.5"])
def test_a_switch_takes_true_false_and_null_alone(text: str) -> None:
    config = make_config()
    with pytest.raises(ConfigError, match=f"={text}': must be true or false, as the recipe's value is"):
        override(config, [f"ddp.overlap_grad_reduce={text}"])
    assert config.ddp.overlap_grad_reduce is False
    override(config, ["ddp.overlap_grad_reduce=yes"])
    assert config.ddp.overlap_grad_reduce is True


def test_a_value_is_data() -> None:
    config = make_config()
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        override(config, ["train.train_iters=!!python/object/apply:os.getpid []"])


def test_its_command_comes_to_the_bridges_entry() -> None:
    words = [
        "torchrun",
        "--nproc-per-node",
        "8",
        "-m",
        "quartet_plugin.bridge.recipe",
        "--recipe",
        "llama3_8b",
    ]
    command = parse_command(words)
    assert command.entry == BRIDGE_MODULE
    assert command.wrapped()[3:6] == ["-m", BRIDGE_MODULE, "-m"]
