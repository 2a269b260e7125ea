"""The flags that a trial leaves out of the user's command: those that write, load, serve or evaluate.

The list is fixed and shown. Flags that decide about the training itself stay, `--train-iters` in
particular, on which the learning rate and the order of the data depend.
"""

from collections.abc import Sequence
from typing import Any

from quartet_plugin.errors import ConfigError
from quartet_plugin.megatron.arguments import Flags

REMOVED = (
    # Checkpoints written.
    "save",
    "save_interval",
    "save_retain_interval",
    "save_params_interval",
    "save_activations_interval",
    "save_tokens_per_expert_interval",
    "save_wgrads_interval",
    "save_dgrads_interval",
    "non_persistent_save_interval",
    "non_persistent_ckpt_type",
    "non_persistent_global_ckpt_dir",
    "non_persistent_local_ckpt_dir",
    "replication",
    "ckpt_convert_format",
    "ckpt_convert_save",
    "ckpt_convert_update_legacy_dist_opt_format",
    "async_save",
    "use_persistent_ckpt_worker",
    "log_progress",
    # Checkpoints read.
    "load",
    "load_main_params_from_ckpt",
    "pretrained_checkpoint",
    "ckpt_step",
    "exit_on_missing_checkpoint",
    "auto_detect_ckpt_format",
    "override_ckpt_iteration",
    "ict_load",
    "bert_load",
    # Logging services.
    "tensorboard_dir",
    "wandb_project",
    "wandb_exp_name",
    "wandb_save_dir",
    "wandb_entity",
    "log_energy",
    "logits_save_dir",
    # Evaluation; its interval stays, since Megatron counts the validation samples with it.
    "full_validation",
    # Profilers and snapshots.
    "profile",
    "use_pytorch_profiler",
    "record_memory_history",
    "rl_profile",
    # Servers, and what ends or restarts a job by itself.
    "log_straggler",
    "run_workload_inspector_server",
    "exit_interval",
    "exit_duration_in_mins",
    "exit_signal_handler",
    "exit_signal_handler_for_training",
    "exit_signal_handler_for_dataloader",
    "adlr_autoresume",
    "inprocess_restart",
    "enable_ft_package",
    "calc_ft_timeouts",
    "result_rejected_tracker_filename",
)
# Set whether given or not: Megatron evaluates and asks for its logger by default.
SET: dict[str, Any] = {"eval_iters": 0, "enable_one_logger": False}
# A trial's own watchdog must speak before a collective's timeout does. The interval is never reached.
SET_UNLESS_GIVEN: dict[str, Any] = {"distributed_timeout_minutes": 5, "eval_interval": 1000}
# Random at every forward pass, and off unless given.
_NOISE = ("moe_input_jitter_eps",)
_REFUSED = {
    "use_checkpoint_args": "the model comes from a checkpoint, which no trial loads; write its flags out",
    "use_mp_args_from_checkpoint_args": "the layout comes from a checkpoint; write its flags out",
    "yaml_cfg": "the configuration is not in flags; write it as flags",
    "skip_train": "nothing is trained; leave it out",
}


def strip_side_effects(flags: Flags, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a trial, and the user's flags that the trial leaves out or sets.

    Raises ConfigError for a command whose model or layout no trial could know.
    """
    given = flags.given(words)
    for dest, reason in _REFUSED.items():
        if given.get(dest):
            raise ConfigError(f"{flags.flag_of(dest)}: {reason}")
    settings = {**SET, **{dest: value for dest, value in SET_UNLESS_GIVEN.items() if dest not in given}}
    edited, removed = flags.edit(words, remove={*REMOVED, *SET}, append=flags.words_for(settings))
    return edited, list(dict.fromkeys(item.flag for item in removed))


def compare_from(
    flags: Flags, words: Sequence[str], *, weights: str | None, save_weights: str | None
) -> list[str]:
    """The words of a trial of the parity gate: dropout and jitter off, weights loaded or ready to be saved.

    Both are weights alone in Megatron's torch_dist form, which loads under any layout.
    """
    values: dict[str, Any] = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "ckpt_format": "torch_dist"}
    if weights is not None:
        values |= {
            "load": weights,
            "finetune": True,
            "no_load_optim": True,
            "no_load_rng": True,
            "exit_on_missing_checkpoint": True,
        }
    if save_weights is not None:
        # The interval is never reached: Megatron only insists on one.
        values |= {"save": save_weights, "save_interval": 10**9, "no_save_optim": True, "no_save_rng": True}
    edited, _ = flags.edit(words, remove={*values, *_NOISE}, append=flags.words_for(values))
    return edited
