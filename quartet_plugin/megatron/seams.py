"""Megatron's releases, and its seams of every plan and trial; `rank.seams` defines a seam."""

import importlib.util
import re
from pathlib import Path

from quartet_plugin.errors import SeamError
from quartet_plugin.rank import seams
from quartet_plugin.rank.seams import Framework, Wrapper, chain, install, resolve

__all__ = ["MEGATRON", "Seam", "Wrapper", "chain", "check_version", "install", "installed_version", "resolve"]


def installed_version() -> str:
    """The version of the Megatron that would be imported, read from its source.

    Nothing is imported, because the CPU device must come first, and no package database is asked, because a
    source checkout on the path counts. Raises SeamError where there is no Megatron.
    """
    spec = importlib.util.find_spec("megatron")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    sources = [path for folder in folders if (path := Path(folder, "core", "package_info.py")).is_file()]
    if not sources:
        raise SeamError(
            f"Megatron is not installed; {MEGATRON.supported} is needed: "
            "pip install 'quartet-plugin[megatron]'"
        )
    assignment = r"""^(MAJOR|MINOR|PATCH|PRE_RELEASE) *= *['"]?([^'"\s]*)"""
    values: dict[str, str] = dict(
        re.findall(assignment, sources[0].read_text(encoding="utf-8"), re.MULTILINE)
    )
    numbers = [values.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(numbers) + values.get("PRE_RELEASE", "")


MEGATRON = Framework(
    name="Megatron",
    package="megatron-core",
    oldest=(0, 19, 2),
    before=(0, 20, 0),
    installed_version=installed_version,
)
check_version = MEGATRON.check_version


class Seam(seams.FrameworkSeam):
    """A function or class of Megatron."""

    framework = MEGATRON


ARGUMENTS = Seam(
    "megatron.training.arguments",
    "add_megatron_arguments",
    "parser",
    {"0.19.2": "2bb2becaea466370"},
    use_sites=("megatron.training.arguments:parse_args",),
)
TOKENIZER = Seam(
    "megatron.training.global_vars",
    "_build_tokenizer",
    "args",
    {"0.19.2": "4f6360dccb69c04f"},
    use_sites=(
        "megatron.training.global_vars:rebuild_tokenizer",
        "megatron.training.global_vars:set_global_variables",
    ),
)
TRAIN_STEP = Seam(
    "megatron.training.training",
    "train_step",
    "forward_step_func data_iterator model optimizer opt_param_scheduler config "
    "forward_backward_func iteration pg_collection p2p_communicator",
    {"0.19.2": "02a0757a48486714"},
    use_sites=("megatron.training.training:train",),
)
