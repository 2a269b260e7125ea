"""The flags that trials and conversions change, by Megatron's parser."""

import shlex

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.megatron.random_settings import DROPOUTS, ROUTER
from quartet_plugin.megatron.side_effects import (
    DEFAULTS,
    REMOVED,
    SET,
    conversion_words,
    parity_words,
    strip_side_effects,
    words_to_start_from,
)
from quartet_plugin.model.conversion import Conversion
from tests.megatron.entry_launch import MEGATRON_FLAGS
from tests.megatron.native import native_flags

USER = shlex.split(
    "--load /theirs --save /theirs --save-interval 5 --async-save --finetune --no-load-optim "
    "--tensorboard-dir /tb --use-distributed-optimizer --ckpt-format torch"
)


def test_every_flag_of_the_list_exists() -> None:
    native = {action.dest for action in native_flags()._parser._actions}
    assert {*REMOVED, *SET, *DEFAULTS} <= native
    assert len(set(REMOVED)) == len(REMOVED)


# Files and folders that training reads, and NCCL's own buffer of a process, written where it hangs.
_READ = """
    block_data_path data_args_path data_cache_path data_path embedding_path evidence_data_path
    heterogeneous_layers_config_path logits_load_dir metadata_path nccl_communicator_config_path
    object_storage_cache_path per_dataset_sequences_path per_split_data_args_path test_data_path
    titles_data_path train_data_path use_mamba_mem_eff_path valid_data_path
    flight_recorder_dump_on_timeout flight_recorder_dump_path flight_recorder_extra_dump_on_exec
    flight_recorder_include_stack_trace flight_recorder_trace_buffer_size
"""
# Written by `--record-memory-history` alone.
_WITHOUT_EFFECT = {"memory_snapshot_path"}


def test_every_flag_that_names_a_file_or_a_fault_is_left_out_or_known() -> None:
    native = {action.dest for action in native_flags()._parser._actions}
    of_files = {
        name
        for name in native
        if name.endswith(("_dir", "_path"))
        or any(word in name for word in ("trace", "dump", "fault_injector", "error_injection"))
    }
    assert of_files - set(REMOVED) - set(_READ.split()) - _WITHOUT_EFFECT == set()


def test_nothing_that_writes_or_loads_is_left() -> None:
    words = [
        *MEGATRON_FLAGS,
        *("--save=/s", "--load", "/l", "--save-interval", "5", "--async-save", "--ckpt-format", "torch_dist"),
        *("--tensorboard-dir", "/t", "--wandb-project", "p", "--wandb-exp-name", "n"),
        *("--profile", "--record-memory-history", "--exit-interval", "7", "--exit-duration-in-mins", "9"),
        *("--distributed-timeout-minutes", "60", "--script-flag", "x", "--timing-log-level", "2"),
    ]
    edited, names = strip_side_effects(native_flags(), words)
    values = native_flags().explicit_values(edited)
    assert not set(values) & set(REMOVED)
    assert {name: values[name] for name in SET} == SET
    assert values["timing_log_level"] == 0
    assert (values["train_iters"], values["eval_interval"], values["distributed_timeout_minutes"]) == (
        20,
        100,
        60,
    )
    assert values["ckpt_format"] == "torch_dist"
    assert edited.count("--script-flag") == 1
    assert set(names) == {
        *("--save", "--load", "--save-interval", "--async-save", "--tensorboard-dir", "--wandb-project"),
        *("--wandb-exp-name", "--profile", "--record-memory-history", "--exit-interval"),
        *("--exit-duration-in-mins", "--eval-iters", "--timing-log-level"),
    }


def test_collectives_wait_as_long_as_a_first_step_may_take_unless_given() -> None:
    edited, _ = strip_side_effects(native_flags(), MEGATRON_FLAGS)
    assert native_flags().explicit_values(edited)["distributed_timeout_minutes"] == 60


def test_commands_whose_model_is_not_in_flags() -> None:
    for flag in ("--use-checkpoint-args", "--skip-train"):
        with pytest.raises(ConfigError, match=flag):
            strip_side_effects(native_flags(), [*MEGATRON_FLAGS, flag])


def test_comparisons_start_from_weights_without_dropout() -> None:
    words = [*MEGATRON_FLAGS, "--hidden-dropout", "0.2"]
    words += ["--moe-input-jitter-eps", "0.1", "--ckpt-format", "torch"]
    flags = native_flags()
    edited = parity_words(flags, words, weights="/weights", save_weights=None)
    values = flags.explicit_values(edited)
    assert (values["load"], values["hidden_dropout"], values["attention_dropout"]) == ("/weights", 0.0, 0.0)
    assert values["finetune"] is values["no_load_optim"] is values["no_load_rng"] is True
    assert values["ckpt_format"] == "torch_dist"
    assert "moe_input_jitter_eps" not in values
    assert "save" not in values


def test_comparisons_leave_out_all_that_a_router_draws() -> None:
    flags = native_flags()
    native = {action.dest for action in flags._parser._actions}
    values_on = {
        "moe_input_jitter_eps": 0.1, "moe_router_force_load_balancing": True, "moe_router_force_biased": 0.5
    }  # fmt: skip
    drawing = {name: values_on[name] for name in ROUTER if name in native}
    words = [*MEGATRON_FLAGS, *flags.words_for(drawing)]
    assert set(drawing) <= set(flags.explicit_values(words))
    values = flags.explicit_values(parity_words(flags, words, weights=None, save_weights=None))
    assert not set(values) & set(ROUTER)
    assert {values[name] for name in DROPOUTS} == {0.0}


def test_a_trial_that_starts_from_weights_is_otherwise_the_command() -> None:
    flags = native_flags()
    words = [*MEGATRON_FLAGS, "--hidden-dropout", "0.2", "--load", "/other"]
    values = flags.explicit_values(words_to_start_from("/weights", flags=flags, words=words))
    assert (values["load"], values["hidden_dropout"], values["finetune"]) == ("/weights", 0.2, True)
    before = flags.explicit_values(words)
    changed = {name for name in values if values[name] != before.get(name)}
    assert changed == {
        *("load", "finetune", "no_load_optim", "no_load_rng", "exit_on_missing_checkpoint", "ckpt_format")
    }


def test_weights_are_saved_without_optimizer_and_random_state() -> None:
    flags = native_flags()
    saving = parity_words(flags, MEGATRON_FLAGS, weights=None, save_weights="/weights")
    values = flags.explicit_values(saving)
    assert (values["save"], values["ckpt_format"]) == ("/weights", "torch_dist")
    assert values["no_save_optim"] is values["no_save_rng"] is True
    assert "load" not in values
    # The reference loads them too: apart from these it has the flags of a plan that starts from them.
    loading = parity_words(flags, MEGATRON_FLAGS, weights="/weights", save_weights=None)
    others = flags.explicit_values(loading)
    differing = {name for name in {*values, *others} if values.get(name) != others.get(name)}
    assert differing == {"load", "save", "save_interval", "no_save_optim", "no_save_rng"}


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
