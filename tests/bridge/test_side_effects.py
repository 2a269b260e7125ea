"""What a trial leaves out of a configuration."""

from types import SimpleNamespace

import pytest

from quartet_plugin.bridge.side_effects import strip_side_effects
from quartet_plugin.errors import ConfigError
from tests.bridge.configurations import make_config


def test_a_trial_writes_loads_and_evaluates_nothing() -> None:
    config = make_config(ft=SimpleNamespace(enable_ft_package=True))
    left_out = strip_side_effects(config)
    assert left_out == [
        "ft",
        "checkpoint.save",
        "checkpoint.pretrained_checkpoint",
        "logger.tensorboard_dir",
        "train.exit_interval",
    ]
    assert (config.checkpoint.save, config.logger.tensorboard_dir, config.train.eval_iters) == (None, None, 0)
    assert strip_side_effects(config) == []


def test_an_adapter_keeps_the_model_that_it_adapts() -> None:
    config = make_config(peft=SimpleNamespace())
    strip_side_effects(config)
    assert config.checkpoint.pretrained_checkpoint == "base"


def test_a_configuration_that_trains_nothing_is_refused() -> None:
    config = make_config()
    config.train.skip_train = True
    with pytest.raises(ConfigError, match="skip_train: it trains nothing"):
        strip_side_effects(config)


@pytest.mark.parametrize(("given", "minutes"), [(None, 60), (10, 60), (120, 120)])
def test_a_collective_may_wait_for_a_rank_that_compiles(given: int | None, minutes: int) -> None:
    config = make_config()
    config.dist.distributed_timeout_minutes = given
    strip_side_effects(config)
    assert config.dist.distributed_timeout_minutes == minutes
