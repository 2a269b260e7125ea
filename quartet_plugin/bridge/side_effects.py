"""What a trial changes in a configuration beside its plan: nothing is written, loaded or evaluated."""

from typing import Any

from quartet_plugin.errors import ConfigError

# Section -> its fields with the values of a trial.
_CHANGED: dict[str, dict[str, Any]] = {
    "checkpoint": {
        **dict.fromkeys(("save", "save_interval", "load", "pretrained_checkpoint"), None),
        **dict.fromkeys(("non_persistent_save_interval", "non_persistent_ckpt_type"), None),
        **dict.fromkeys(("async_save", "replication"), False),
    },
    "logger": {
        **dict.fromkeys(("tensorboard_dir", "wandb_project", "wandb_exp_name", "mlflow_experiment"), None),
        **dict.fromkeys(("save_config_filepath", "comet_project"), None),
        **dict.fromkeys(("log_progress", "log_energy"), False),
        "timing_log_level": 0,
    },
    "train": {
        **dict.fromkeys(("exit_interval", "exit_duration_in_mins"), None),
        "exit_signal_handler": False,
        "eval_iters": 0,
    },
    "validation": {"eval_iters": 0},
    "profiling": {
        **dict.fromkeys(("use_pytorch_profiler", "use_nsys_profiler", "record_memory_history"), False)
    },
    "straggler": {"log_straggler": False},
}
# Sections that a trial leaves out as a whole.
_LEFT_OUT = ("ft", "nvrx_straggler", "inprocess_restart", "tensor_inspect")
# Ranks wait in a collective while one of them compiles in its first step; a trial's watchdog speaks before.
_LEAST_TIMEOUT_MINUTES = 60
# Fields that the Bridge has by default: to change them is not worth a line.
_SILENT = {"train.eval_iters", "validation.eval_iters", "checkpoint.save_interval"}


def strip_side_effects(config: Any) -> list[str]:
    """Change the configuration to a trial's; the user's fields that this takes away, `SECTION.FIELD`.

    Raises ConfigError for a configuration that trains nothing.
    """
    if any(getattr(getattr(config, name, None), "skip_train", False) for name in ("train", "validation")):
        raise ConfigError("skip_train: it trains nothing; omit it")
    left_out = []
    is_adapted = getattr(config, "peft", None) is not None
    for name in _LEFT_OUT:
        if getattr(config, name, None) is not None:
            setattr(config, name, None)
            left_out.append(name)
    for name, fields in _CHANGED.items():
        section = getattr(config, name, None)
        for field, value in fields.items():
            if section is None or field not in vars(section):
                continue
            if field == "pretrained_checkpoint" and is_adapted:
                continue  # an adapter is of nothing without the model that it adapts
            if getattr(section, field) != value:
                setattr(section, field, value)
                left_out.append(f"{name}.{field}")
    if "distributed_timeout_minutes" in vars(config.dist):
        given = config.dist.distributed_timeout_minutes or 0
        config.dist.distributed_timeout_minutes = max(given, _LEAST_TIMEOUT_MINUTES)
    return [name for name in left_out if name not in _SILENT]
