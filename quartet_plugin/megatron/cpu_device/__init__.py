"""Trains unmodified `megatron.training` on CPU and gloo, to rehearse a GPU command where there is no GPU.

Importing this package does nothing and imports neither torch nor Megatron. A rank calls, in this order:

1. `ensure_environment()`, before torch is imported: allocator and thread settings that libraries read when
   a process starts;
2. `install()`, before Megatron is imported: torch's CUDA surface then answers for the CPU;
3. the training script, with `required_flags()` appended to its arguments;
4. `exit_now()`, when the script has ended well.

`uninstall()` restores every redirected name; modules that have imported one by name meanwhile keep it.
"""

from quartet_plugin.megatron.cpu_device.flags import required_flags
from quartet_plugin.megatron.cpu_device.installation import install, is_installed, uninstall
from quartet_plugin.megatron.cpu_device.process import ensure_environment, environment, exit_now

__all__ = [
    "ensure_environment",
    "environment",
    "exit_now",
    "install",
    "is_installed",
    "required_flags",
    "uninstall",
]
