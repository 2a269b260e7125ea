"""DeepSpeed's releases, and every function of DeepSpeed that the adapter replaces or relies on.

`rank.seams` defines a seam. `check` comes before anything of DeepSpeed is changed.
"""

import re
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version

from quartet_plugin.errors import SeamError
from quartet_plugin.rank import seams
from quartet_plugin.rank.seams import Framework, Wrapper, install, resolve
from quartet_plugin.rank.source_tree import KnownFunction

__all__ = ["DEEPSPEED", "Seam", "Wrapper", "check", "install", "resolve"]


_OLDEST, _BEFORE = (0, 19, 8), (0, 20, 0)


def _installed_version() -> str:
    try:
        return version("deepspeed").partition("+")[0]
    except PackageNotFoundError as error:
        raise SeamError("deepspeed: not installed; pip install 'quartet-plugin[deepspeed]'") from error


DEEPSPEED = Framework(
    name="DeepSpeed",
    package="deepspeed",
    needed="deepspeed >= 0.19.8, < 0.20",
    installed_version=_installed_version,
)


def check_version(version: str | None = None) -> str:
    """The installed version, or `version`. Raises SeamError if it is absent or not supported."""
    release = version or DEEPSPEED.installed_version()
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", release)
    parsed = tuple(map(int, numbers.groups())) if numbers else ()
    if not _OLDEST <= parsed < _BEFORE:
        raise SeamError(f"deepspeed {release}: not supported; install {DEEPSPEED.needed}")
    return release


class Seam(seams.FrameworkSeam):
    """A function of DeepSpeed."""

    framework = DEEPSPEED


def _seam(module: str, owner: str, name: str, parameters: str, source: str) -> Seam:
    """The seam `owner.name`."""
    known = {"0.19.8": KnownFunction(parameters=parameters, source=source)}
    return Seam(module, owner + name, known)


_base = partial(_seam, "deepspeed.runtime.engine", "DeepSpeedEngine.")
_engine = partial(_seam, "deepspeed.runtime.pipe.engine", "PipelineEngine.")
_module = partial(_seam, "deepspeed.runtime.pipe.module", "PipelineModule.")
_grid = partial(_seam, "deepspeed.runtime.pipe.topology", "PipelineParallelGrid.")
INITIALIZE_ARGUMENTS = (
    "args model optimizer model_parameters training_data lr_scheduler distributed_port mpu "
    "dist_init_required collate_fn config mesh_param config_params"
)
# Replaced: the first two for every plan, the others in a trial.
INITIALIZE = _seam("deepspeed", "", "initialize", INITIALIZE_ARGUMENTS, "7311d2dd74b7628a")
CONSTRUCTOR = _module(
    "__init__",
    "self layers num_stages topology loss_fn seed_layers seed_fn base_seed partition_method "
    "activation_checkpoint_interval activation_checkpoint_func checkpointable_layers dynamic_shape",
    "b117888b0f4d1c54",
)
TRAIN_BATCH = _engine("train_batch", "self data_iter", "a055fcc3f34e1958")
NEXT_BATCH = _engine("_next_batch", "self", "22f37859ba1c9c29")
SAVE = _base(
    "save_checkpoint",
    "self save_dir tag client_state save_latest exclude_frozen_parameters",
    "4a52ba6c01fb1bf8",
)
LOAD = _base(
    "load_checkpoint",
    "self load_dir tag load_module_strict load_optimizer_states load_lr_scheduler_states "
    "load_module_only custom_load_fn",
    "1272ffebde16c076",
)
SAVE_16BIT = _base(
    "save_16bit_model", "self save_dir save_filename exclude_frozen_parameters", "e7c026217e29c8e5"
)
SEAMS = (
    *(INITIALIZE, CONSTRUCTOR, TRAIN_BATCH, NEXT_BATCH, SAVE, LOAD, SAVE_16BIT),
    # Overridden by PlannedModule, PlannedEngine and GuardedEngine, as SAVE and LOAD are.
    _module("_partition_layers", "self method", "7863964978e93664"),
    _module("_build", "self", "0678f208d6586e20"),
    _module("stage_owner", "self layer_idx", "d4b5ec39e67511f2"),
    _module("_precompute_checkpointable_values", "self", "369e31623a3a627a"),
    _module("ckpt_layer_path", "self ckpt_dir local_layer_idx", "9647f48298d20844"),
    _module("ckpt_layer_path_list", "self ckpt_dir local_layer_idx", "ca42d0cb4b07b8b5"),
    _module("_synchronize_tied_weights", "self", "c4bf800d5d1934df"),
    _engine("_train_schedule", "self", "3989f15a2f1a41e2"),
    _engine("_inference_schedule", "self micro_batches", "d1161b7b06e52789"),
    _engine("is_first_stage", "self", "c14db1ac5589f524"),
    _engine("is_last_stage", "self", "dc307f547867a1b4"),
    _engine("_loss_stage_global_rank", "self", "562325bdfdc9d476"),
    _engine("reset_activation_shape", "self", "6cfc19f98b864541"),
    _engine(
        "load_module_state_dict",
        "self checkpoint strict custom_load_fn fetch_z3_params z3_params_to_fetch allowed_missing_keys",
        "fbb4229e2362d19b",
    ),
    # Relied on: a checkpoint is handed to `load_module_state_dict` before anything of it is loaded.
    _base(
        "_load_checkpoint",
        "self load_dir tag load_module_strict load_optimizer_states load_lr_scheduler_states "
        "load_module_only custom_load_fn",
        "b11759e7b733749a",
    ),
    _base(
        "_common_checkpoint_state",
        "self module_state_dict zero_optimizer_state save_frozen_param",
        "c93ab8e233e0ecfb",
    ),
    _grid("get_model_parallel_rank", "self", "bb67cc1565c63491"),
    # Called.
    _base("_get_zero_param_shapes", "self", "be006dacf8fde745"),
    _module("_set_bounds", "self start stop", "a62126a801d42ab6"),
    _engine("_exec_schedule", "self pipe_schedule", "37c06cd97479c2d7"),
    _engine("_exec_load_micro_batch", "self buffer_id", "50dfde0a302abacb"),
    _engine("_exec_optimizer_step", "self lr_kwargs", "923cdf5310179502"),
    # Done by EngineStages for one stage.
    _engine("_exec_forward_pass", "self buffer_id", "7e67ae799a874b08"),
    _engine("_exec_backward_pass", "self buffer_id", "a5708aecadada145"),
)


@cache
def check() -> None:
    """Compare the release and its functions with the seams, once a process: later some of them are replaced.

    Raises SeamError, naming function and release, for the first difference.
    """
    check_version()
    for seam in SEAMS:
        resolve(seam)
