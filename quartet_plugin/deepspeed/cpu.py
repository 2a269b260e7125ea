"""Lets DeepSpeed train on the CPU."""

import os

from quartet_plugin.protocol.environment import CPU_INSTRUCTIONS, CPU_SETTINGS


def use_cpu() -> None:
    """Choose the CPU as DeepSpeed's accelerator, before torch or DeepSpeed is imported."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault(CPU_INSTRUCTIONS, CPU_SETTINGS[CPU_INSTRUCTIONS])
    import deepspeed

    # An all-reduce inside a node that would be compiled for a minute at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
