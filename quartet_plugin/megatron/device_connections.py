"""CUDA_DEVICE_MAX_CONNECTIONS, which Megatron wants to be 1 before Blackwell with TP or CP above 1.

A command without either need not set it. Where a plan raises one of them, the entry sets the variable, before
CUDA starts: later it has no effect. With Megatron-FSDP Megatron refuses 1, on every GPU: where a plan turns
that on, the entry takes the variable away.
"""

import subprocess
from argparse import Namespace
from collections.abc import Callable, MutableMapping

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
# The first architecture whose streams keep their order with several connections.
_BLACKWELL = 10
_QUERY = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
_QUERY_TIMEOUT_S = 20.0
# Megatron leaves the variable to these, which want several connections.
_OTHERWISE = ("use_torch_fsdp2", "use_megatron_fsdp", "overlap_moe_expert_parallel_comm")


def device_architecture() -> int | None:
    """The major compute capability of the first GPU (9: Hopper, 10: Blackwell), without starting CUDA.

    None where nvidia-smi does not tell it.
    """
    try:
        done = subprocess.run(
            _QUERY, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    major = done.stdout.strip().partition(".")[0]
    return int(major) if major.isdecimal() else None


def set_connections(
    user: Namespace,
    planned: Namespace,
    *,
    environment: MutableMapping[str, str],
    architecture: Callable[[], int | None] = device_architecture,
) -> list[str]:
    """Set or unset the variable where the plan's flags ask for it and the user's do not; a line to print.

    A GPU of unknown architecture is taken for one before Blackwell, on which a start without it is refused.
    """
    set_by_user = environment.get(VARIABLE)
    if set_by_user == "1" and _refuses_one(planned) and not _refuses_one(user):
        del environment[VARIABLE]
        return [f"{VARIABLE} is unset, not 1: Megatron refuses 1 with --use-megatron-fsdp"]
    if not _needs_one(planned) or _needs_one(user) or set_by_user == "1":
        return []
    if (architecture() or 0) >= _BLACKWELL:
        return []
    environment[VARIABLE] = "1"
    before = "" if set_by_user is None else f", not {set_by_user}"
    return [f"{VARIABLE} is set to 1{before}: Megatron needs it with TP or CP above 1 before Blackwell"]


def _refuses_one(args: Namespace) -> bool:
    """Whether Megatron refuses the value 1 (validate_args)."""
    return bool(getattr(args, "use_megatron_fsdp", False))


def _needs_one(args: Namespace) -> bool:
    """Whether Megatron refuses another value than 1 before Blackwell (validate_args)."""
    is_split = args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1
    return is_split and not any(getattr(args, name, False) for name in _OTHERWISE)
