"""The flags that a trial, a parity trial or a conversion takes out of the user's command or adds to it.

A trial leaves out flags that write, load, serve or evaluate; the list is fixed and shown. Flags that decide
about the training itself stay, `--train-iters` in particular, on which the learning rate and the order of the
data depend.
"""

from collections.abc import Sequence
from typing import Any

from quartet_plugin.errors import ConfigError
from quartet_plugin.megatron.arguments import Flags
from quartet_plugin.megatron.random_settings import DROPOUTS, ROUTER
from quartet_plugin.model.conversion import FORMAT, Conversion

_REMOVED_BY_KIND = {
    "checkpoints written": (
        "save save_interval save_retain_interval save_params_interval save_activations_interval "
        "save_tokens_per_expert_interval save_wgrads_interval save_dgrads_interval "
        "non_persistent_save_interval non_persistent_ckpt_type non_persistent_global_ckpt_dir "
        "non_persistent_local_ckpt_dir replication ckpt_convert_format ckpt_convert_save "
        "ckpt_convert_update_legacy_dist_opt_format async_save use_persistent_ckpt_worker log_progress"
    ),
    "checkpoints read": (
        "load load_main_params_from_ckpt pretrained_checkpoint ckpt_step exit_on_missing_checkpoint "
        "auto_detect_ckpt_format override_ckpt_iteration ict_load bert_load"
    ),
    "logging services": (
        "tensorboard_dir wandb_project wandb_exp_name wandb_save_dir wandb_entity log_energy logits_save_dir"
    ),
    # Its interval stays, since Megatron counts the validation samples with it.
    "evaluation": "full_validation",
    "profilers": "profile use_pytorch_profiler record_memory_history rl_profile rl_profile_dir",
    "traces and dumps": (
        "moe_routing_trace_path moe_routing_trace_max_training_iters moe_routing_trace_capture_logits "
        "moe_routing_trace_capture_hidden_states moe_routing_trace_dump_weights config_logger_dir "
        "dump_param_to_param_group_map"
    ),
    "injected faults": (
        "fault_injector_ranks fault_injector_num_ranks fault_injector_fault_delay "
        "fault_injector_mtti_seconds fault_injector_offset_seconds fault_injector_fault_types "
        "fault_injector_fault_probabilities fault_injector_seed fault_injector_delay_start_iteration "
        "error_injection_rate error_injection_type"
    ),
    "servers and job control": (
        "log_straggler run_workload_inspector_server exit_interval exit_duration_in_mins "
        "exit_signal_handler exit_signal_handler_for_training exit_signal_handler_for_dataloader "
        "adlr_autoresume inprocess_restart enable_ft_package calc_ft_timeouts "
        "result_rejected_tracker_filename"
    ),
}
REMOVED = tuple(" ".join(_REMOVED_BY_KIND.values()).split())
# Set whether given or not: Megatron evaluates and asks for its logger by default. Timers of level 2 wait for
# the device around every forward and backward: a trial would measure that.
SET: dict[str, Any] = {"eval_iters": 0, "enable_one_logger": False, "timing_log_level": 0}
# Ranks wait in a collective while one of them compiles in its first step; a trial's watchdog speaks before.
# The interval is never reached.
DEFAULTS: dict[str, Any] = {"distributed_timeout_minutes": 60, "eval_interval": 1000}
_REFUSED = {
    "use_checkpoint_args": "the model comes from a checkpoint, which trials do not load; give its flags",
    "use_mp_args_from_checkpoint_args": "the layout comes from a checkpoint; give its flags",
    "yaml_cfg": "the configuration is not given by flags; write it as flags",
    "skip_train": "it trains nothing; omit it",
}
# Flags of a start from weights alone; in a conversion they would drop the iteration or the optimizer.
_STATE = ("finetune", "no_load_optim", "no_load_rng", "no_save_optim", "no_save_rng")
# What a start from weights alone is given beside `--load`.
_WEIGHTS_ALONE: dict[str, Any] = {
    "ckpt_format": FORMAT,
    "finetune": True,
    "no_load_optim": True,
    "no_load_rng": True,
    "exit_on_missing_checkpoint": True,
}


def strip_side_effects(flags: Flags, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a trial, and the user's flags that the trial leaves out or sets.

    Raises ConfigError for a command whose model or layout no trial could know.
    """
    user = flags.explicit_values(words)
    for dest, reason in _REFUSED.items():
        if user.get(dest):
            raise ConfigError(f"{flags.flag_of(dest)}: {reason}")
    settings = {**SET, **{dest: value for dest, value in DEFAULTS.items() if dest not in user}}
    edited, removed = flags.edit(words, remove={*REMOVED, *SET}, append=flags.words_for(settings))
    return edited, list(dict.fromkeys(item.flag for item in removed))


def parity_words(
    flags: Flags, words: Sequence[str], *, weights: str | None, save_weights: str | None
) -> list[str]:
    """The words of a trial of the parity gate: nothing random, weights loaded or ready to be saved.

    Both are weights alone in Megatron's torch_dist form, which loads under any layout. A run that saves them
    also loads them, by the same flags.
    """
    values: dict[str, Any] = {**dict.fromkeys(DROPOUTS, 0.0), **_WEIGHTS_ALONE}
    if weights is not None:
        values["load"] = weights
    if save_weights is not None:
        # The interval is never reached: Megatron only insists on one.
        values |= {"save": save_weights, "save_interval": 10**9, "no_save_optim": True, "no_save_rng": True}
    # A router draws only where a flag says so.
    edited, _ = flags.edit(words, remove={*values, *ROUTER}, append=flags.words_for(values))
    return edited


def words_to_start_from(weights: str, *, flags: Flags, words: Sequence[str]) -> list[str]:
    """The words of a trial that starts from these weights alone, and is otherwise the user's command."""
    values: dict[str, Any] = {"load": weights, **_WEIGHTS_ALONE}
    edited, _ = flags.edit(words, remove=set(values), append=flags.words_for(values))
    return edited


def conversion_words(conversion: Conversion, *, flags: Flags, words: Sequence[str]) -> list[str]:
    """The words of a conversion: the command without side effects, with Megatron's `--ckpt-convert-format`.

    Megatron builds model and optimizer as for training, loads the checkpoint, saves it and trains nothing.
    Optimizer state is saved in the form that loads onto any stages. Raises ConfigError for a command whose
    model comes from a checkpoint.
    """
    edited, _ = strip_side_effects(flags, words)
    values: dict[str, Any] = {
        "load": conversion.load,
        "exit_on_missing_checkpoint": True,
        "ckpt_convert_format": FORMAT,
        "ckpt_convert_save": conversion.save,
    }
    if conversion.step is not None:
        values["ckpt_step"] = conversion.step
    if conversion.is_weights_only:
        values |= dict.fromkeys(("no_load_optim", "no_load_rng", "no_save_optim", "no_save_rng"), True)
    elif flags.values(edited).use_distributed_optimizer:
        values["dist_ckpt_optim_fully_reshardable"] = True
    edited, _ = flags.edit(edited, remove={*values, *_STATE}, append=flags.words_for(values))
    return edited
