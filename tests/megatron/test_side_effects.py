"""What a trial leaves out, by Megatron's own flags."""

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.megatron.side_effects import (
    REMOVED,
    SET,
    SET_UNLESS_GIVEN,
    compare_from,
    strip_side_effects,
)
from tests.megatron.entry_launch import MEGATRON_FLAGS
from tests.megatron.native import native_flags


def test_every_flag_of_the_list_exists() -> None:
    assert [dest for dest in (*REMOVED, *SET, *SET_UNLESS_GIVEN) if not native_flags().has(dest)] == []
    assert len(set(REMOVED)) == len(REMOVED)


def test_nothing_that_writes_or_loads_is_left() -> None:
    words = [
        *MEGATRON_FLAGS,
        *("--save=/s", "--load", "/l", "--save-interval", "5", "--async-save", "--ckpt-format", "torch_dist"),
        *("--tensorboard-dir", "/t", "--wandb-project", "p", "--wandb-exp-name", "n"),
        *("--profile", "--record-memory-history", "--exit-interval", "7", "--exit-duration-in-mins", "9"),
        *("--distributed-timeout-minutes", "60", "--script-flag", "x"),
    ]
    edited, names = strip_side_effects(native_flags(), words)
    found = native_flags().given(edited)
    assert not set(found) & set(REMOVED)
    assert (found["eval_iters"], found["enable_one_logger"]) == (0, False)
    assert (found["train_iters"], found["eval_interval"], found["distributed_timeout_minutes"]) == (
        20,
        100,
        60,
    )
    assert found["ckpt_format"] == "torch_dist"
    assert edited.count("--script-flag") == 1
    assert set(names) == {
        *("--save", "--load", "--save-interval", "--async-save", "--tensorboard-dir", "--wandb-project"),
        *("--wandb-exp-name", "--profile", "--record-memory-history", "--exit-interval"),
        *("--exit-duration-in-mins", "--eval-iters"),
    }


def test_timeout_is_shortened_unless_given() -> None:
    edited, _ = strip_side_effects(native_flags(), MEGATRON_FLAGS)
    assert native_flags().given(edited)["distributed_timeout_minutes"] == 5


def test_commands_whose_model_is_not_in_flags() -> None:
    for flag in ("--use-checkpoint-args", "--skip-train"):
        with pytest.raises(ConfigError, match=flag):
            strip_side_effects(native_flags(), [*MEGATRON_FLAGS, flag])


def test_comparisons_start_from_weights_without_dropout() -> None:
    words = [*MEGATRON_FLAGS, "--hidden-dropout", "0.2"]
    words += ["--moe-input-jitter-eps", "0.1", "--ckpt-format", "torch"]
    flags = native_flags()
    edited = compare_from(flags, words, weights="/weights", save_weights=None)
    found = flags.given(edited)
    assert (found["load"], found["hidden_dropout"], found["attention_dropout"]) == ("/weights", 0.0, 0.0)
    assert found["finetune"] is found["no_load_optim"] is found["no_load_rng"] is True
    assert found["ckpt_format"] == "torch_dist"
    assert "moe_input_jitter_eps" not in found
    assert "save" not in found


def test_weights_are_saved_without_optimizer_and_random_state() -> None:
    flags = native_flags()
    found = flags.given(compare_from(flags, MEGATRON_FLAGS, weights=None, save_weights="/weights"))
    assert (found["save"], found["ckpt_format"]) == ("/weights", "torch_dist")
    assert found["no_save_optim"] is found["no_save_rng"] is True
    assert "load" not in found
