"""Children that multiprocessing starts anew get the CPU device before they import anything of the parent's.

A checkpoint writer started by `spawn` or `forkserver` is a fresh interpreter: it unpickles its work, imports
Megatron for that, and without the device fails while the parent waits for it. multiprocessing runs the
parent's main module in such a child first; the plugin's module `spawned` is named in its place, installs the
device and then runs the parent's main module itself. Nothing is written into site-packages.
"""

import functools
import sys
from typing import Any

from quartet_plugin.rank.seams import Redirect

_CHILD_MODULE = "quartet_plugin.megatron.cpu_device.spawned"
MARK = "--quartet-spawned-main"
# Imported in a child where the parent has it: not every training loop is Megatron's own.
TRAINING = "megatron.training"


def _with_device(get_preparation_data: Any) -> Any:
    """Name `spawned` as the child's main module, and pass the parent's through the child's arguments.

    `sys_path` and `sys_argv` are set in a child before its main module runs, so `spawned` can be imported and
    can read which module it stands in for. runpy sets the first argument, and restores it, by itself.
    """

    @functools.wraps(get_preparation_data)
    def prepare(name: str) -> dict[str, Any]:
        data: dict[str, Any] = get_preparation_data(name)
        kind = next((key for key in ("init_main_from_name", "init_main_from_path") if key in data), "")
        first, *arguments = data.get("sys_argv") or [""]
        loop = TRAINING if TRAINING in sys.modules else ""
        data["sys_argv"] = [first, MARK, loop, kind, data.pop(kind, ""), *arguments]
        data["init_main_from_name"] = _CHILD_MODULE
        return data

    return prepare


REDIRECT = Redirect("multiprocessing.spawn", "get_preparation_data", _with_device)
