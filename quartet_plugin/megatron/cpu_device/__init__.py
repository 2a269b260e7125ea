"""Trains unmodified `megatron.training` on CPU and gloo, to rehearse a GPU command where there is no GPU.

Importing this package does nothing and imports neither torch nor Megatron. A rank calls, in this order:

1. `ensure_environment()`, before torch is imported: allocator and thread settings that libraries read when
   a process starts;
2. `install()`, before Megatron is imported: torch's CUDA surface then answers for the CPU;
3. the training script, with `required_flags()` appended to its arguments;
4. `leave()`, when the script has ended well.

There is no way back inside a process: what Megatron imports binds the redirected names.
"""

from quartet_plugin.megatron.cpu_device.ending import leave
from quartet_plugin.megatron.cpu_device.environment import ensure_environment, environment
from quartet_plugin.megatron.cpu_device.flags import required_flags
from quartet_plugin.megatron.cpu_device.installation import install, is_installed

__all__ = ["ensure_environment", "environment", "install", "is_installed", "leave", "required_flags"]
