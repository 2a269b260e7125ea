"""Megatron's own flags that a CPU run needs, so that a GPU command can be rehearsed as it is."""

from collections.abc import Set

from quartet_plugin.errors import ConfigError

# What has a value that cannot work without CUDA is replaced even when the command gives it: argparse takes
# the last one.
_REPLACED = {
    "--distributed-backend": "gloo",
    "--transformer-impl": "local",
    "--attention-backend": "unfused",
}
# Kernels of Transformer Engine and Apex, each with a plain PyTorch twin inside Megatron.
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
    "--async-save": "the writer would read weights that training is changing; leave it out",
    "--sequence-parallel": "its norm layer needs Transformer Engine or Apex; leave it out",
    "--fp8-format": "a CPU has no FP8; use --bf16 or fp32",
    "--fp8": "a CPU has no FP8; use --bf16 or fp32",
    "--fp4-format": "a CPU has no FP4; use --bf16 or fp32",
}


def required_flags(given: Set[str]) -> list[str]:
    """The flags to append to a training command so that it runs on the CPU device.

    `given` holds the command's arguments: all of them, or the flags alone; `--flag=value` counts as the flag.
    A flag that only turns a fused kernel off is left out when given. Backend, implementation and attention
    are appended also when given, unless the needed value is in `given` too. Raises `ConfigError` for a flag
    without a CPU counterpart.
    """
    words = {part for argument in given for part in argument.split("=", 1)}
    for flag, reason in _REFUSED.items():
        if flag in words:
            raise ConfigError(f"{flag} cannot run on the CPU device: {reason}")
    flags = []
    for flag, value in _REPLACED.items():
        if not {flag, value} <= words:
            flags += [flag, value]
    for flag, value in _ADDED_WITH_VALUE.items():
        if flag not in words:
            flags += [flag, value]
    return [*flags, *(flag for flag in _ADDED if flag not in words)]
