"""Start and exit of a CPU rank's process: the environment and the flags that it needs, and its exit.

glibc reads its allocator settings and OpenMP its thread count at process start, so setting them later has no
effect. They move step times as much as a layout does: every run of a comparison must have the same.
"""

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Mapping, Set
from typing import NoReturn

from quartet_plugin.errors import ConfigError
from quartet_plugin.protocol.environment import CPU_REEXECUTED, CPU_SETTINGS
from quartet_plugin.rank.session import exit_now as exit_process

# Flags whose values may need CUDA are appended even when the command has them: argparse takes the last value.
_REPLACED = {
    "--distributed-backend": "gloo",
    "--transformer-impl": "local",
    "--attention-backend": "unfused",
}
# Kernels of Transformer Engine and Apex, for each of which Megatron also has plain PyTorch.
_ADDED = (
    "--no-persist-layer-norm",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
)
# Worker processes would take the cores that the ranks train on; the order of the data is the same without.
_ADDED_WITH_VALUE = {"--num-workers": "0"}
_REFUSED = {
    "--async-save": "the writer would read weights while training changes them; omit it",
    "--fp8-format": "a CPU has no FP8; use --bf16 or fp32",
    "--fp8": "a CPU has no FP8; use --bf16 or fp32",
    "--fp4-format": "a CPU has no FP4; use --bf16 or fp32",
}


def missing_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The CPU_SETTINGS that `environ` lacks or has with another value."""
    return {name: value for name, value in CPU_SETTINGS.items() if environ.get(name) != value}


def ensure_environment() -> None:
    """Start this process anew, once, when it was started without CPU_SETTINGS; the pid stays.

    Returns without an effect when the settings are there, when the process was already started anew, or when
    torch is imported: a half-initialized process is not replaced, it only runs with other settings.
    """
    missing = missing_settings(os.environ)
    if not missing or CPU_REEXECUTED in os.environ or "torch" in sys.modules:
        return
    # The interpreter's own arguments (-m, -X, ...) are in orig_argv, not in argv.
    command = [sys.executable, *sys.orig_argv[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, {**os.environ, **missing, CPU_REEXECUTED: "1"})  # noqa: S606 - same program


def required_flags(command: Set[str]) -> list[str]:
    """The flags of Megatron to append to a GPU training command so that it runs on the CPU device.

    `command` holds the command's arguments: all of them, or the flags alone; `--flag=value` counts as the
    flag. A flag that only turns a fused kernel off is left out where the command has it. Backend,
    implementation and attention are appended unless the command has the needed value too. Raises
    `ConfigError` for a flag without a CPU counterpart.
    """
    words = {part for argument in command for part in argument.split("=", 1)}
    for flag, reason in _REFUSED.items():
        if flag in words:
            raise ConfigError(f"{flag} cannot run on the CPU device: {reason}")
    flags = [
        *(pair for pair in _REPLACED.items() if not words.issuperset(pair)),
        *(pair for pair in _ADDED_WITH_VALUE.items() if pair[0] not in words),
        *((flag,) for flag in _ADDED if flag not in words),
    ]
    return [word for pair in flags for word in pair]


def exit_now() -> NoReturn:
    """End this process with code 0, exit handlers run, without the interpreter's teardown.

    The teardown destroys gloo's communicators while their threads run, and now and then the process is then
    aborted ("terminate called without an active exception", torch 2.11) though everything was trained and
    saved; the launcher reports a failure that was none.
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    with contextlib.suppress(Exception):  # it has printed what went wrong
        atexit._run_exitfuncs()
    exit_process(0)
