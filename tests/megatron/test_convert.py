"""The words of a conversion: Megatron's own, without what writes elsewhere or drops state."""

import shlex

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.megatron.convert import conversion_words
from quartet_plugin.model.conversion import Conversion
from tests.megatron.entry_launch import MEGATRON_FLAGS
from tests.megatron.native import native_flags

USER = shlex.split(
    "--load /theirs --save /theirs --save-interval 5 --async-save --finetune --no-load-optim "
    "--tensorboard-dir /tb --use-distributed-optimizer --ckpt-format torch"
)


def test_everything_is_kept_in_the_form_that_loads_anywhere() -> None:
    conversion = Conversion(load="/from", save="/into", step=3)
    words = conversion_words(conversion, flags=native_flags(), words=[*MEGATRON_FLAGS, *USER])
    values = native_flags().values(words)
    assert (values.load, values.ckpt_step, values.ckpt_convert_save) == ("/from", 3, "/into")
    assert values.ckpt_convert_format == "torch_dist"
    assert values.dist_ckpt_optim_fully_reshardable
    assert (values.save, values.tensorboard_dir) == (None, None)
    dropping = ("async_save", "finetune", "no_load_optim", "no_save_optim")
    assert not any(getattr(values, name) for name in dropping)
    assert values.train_iters == native_flags().values(MEGATRON_FLAGS).train_iters


def test_weights_alone_leave_the_state_out_on_both_sides() -> None:
    conversion = Conversion(load="/from", save="/into", is_weights_only=True)
    words = conversion_words(conversion, flags=native_flags(), words=[*MEGATRON_FLAGS, *USER])
    values = native_flags().values(words)
    assert values.no_load_optim
    assert values.no_load_rng
    assert values.no_save_optim
    assert values.no_save_rng
    assert not values.dist_ckpt_optim_fully_reshardable
    assert values.ckpt_step is None


def test_a_model_that_comes_from_a_checkpoint_is_refused() -> None:
    conversion = Conversion(load="/from", save="/into")
    with pytest.raises(ConfigError, match="--use-checkpoint-args"):
        conversion_words(conversion, flags=native_flags(), words=[*MEGATRON_FLAGS, "--use-checkpoint-args"])
