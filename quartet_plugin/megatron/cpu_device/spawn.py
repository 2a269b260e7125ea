"""Children that multiprocessing starts anew get the CPU device before they import anything of the parent's.

A checkpoint writer started by `spawn` or `forkserver` is a fresh interpreter: it unpickles its work, imports
Megatron for that, and without the device fails while the parent waits for it. multiprocessing runs the
parent's main module in such a child first; a module of ours (`spawned`) is named in its place, installs the
device and then runs the parent's main module itself. Nothing is written into site-packages.
"""

import functools
from multiprocessing import spawn
from typing import Any

_CHILD_MODULE = "quartet_plugin.megatron.cpu_device.spawned"
MARK = "--quartet-spawned-main"


def carry_to_children() -> None:
    """Wrap the function that tells a child how to prepare itself."""
    get_preparation_data = spawn.get_preparation_data

    @functools.wraps(get_preparation_data)
    def with_device(name: str) -> dict[str, Any]:
        return prepare_with_device(get_preparation_data(name))

    spawn.get_preparation_data = with_device


def prepare_with_device(data: dict[str, Any]) -> dict[str, Any]:
    """Name our module as the child's main, and pass the parent's own through the child's arguments.

    `sys_path` and `sys_argv` are set in a child before its main module runs, so ours can be imported and can
    read which module it stands in for. runpy sets the first argument, and puts it back, by itself.
    """
    kind = next((key for key in ("init_main_from_name", "init_main_from_path") if key in data), "")
    first, *arguments = data.get("sys_argv") or [""]
    data["sys_argv"] = [first, MARK, kind, data.pop(kind, ""), *arguments]
    data["init_main_from_name"] = _CHILD_MODULE
    return data
