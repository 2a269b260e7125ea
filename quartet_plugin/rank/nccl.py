"""NCCL on processes whose RANK a plan has changed.

ProcessGroupNCCL runs a barrier on the group's bound device, else on a device that the group has used, else on
RANK modulo the number of the node's devices. Frameworks choose the device by LOCAL_RANK, which a plan keeps:
where the two differ, the first barrier would take another process's device, and Megatron's first operation is
a barrier. Both ways out are taken: the default group is used once on the right device when it is made, and a
barrier names the device.
"""

import functools
from collections.abc import Callable
from typing import Any

from quartet_plugin.rank.seams import Installation, Redirect, redirect


def uses_nccl(backend: str) -> bool:
    """Whether a backend, such as `nccl` or `cpu:gloo,cuda:nccl`, moves tensors of a GPU by NCCL."""
    return "nccl" in backend


def backend_name(group: Any = None) -> str:
    """The backend of a group, by default of all processes.

    After `init_process_group()` without a name torch says `undefined`, and uses the accelerator's own.
    """
    import torch.distributed as dist

    name: str = dist.get_backend(group)
    return str(dist.get_backend_config(group)) if name == "undefined" else name


def keep_devices(local_rank: int) -> Installation:
    """Have the default group and every barrier run on device `local_rank` of this process's node."""
    names: dict[str, Callable[[Any], Any]] = {
        "init_process_group": functools.partial(_with_first_use, local_rank),
        "barrier": _on_current_device,
    }
    return redirect(
        Redirect("torch.distributed.distributed_c10d", name, wrap, aliases=("torch.distributed",))
        for name, wrap in names.items()
    )


def _with_first_use(local_rank: int, init_process_group: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init_process_group)
    def init_and_use(*args: Any, **kwargs: Any) -> None:
        import torch
        import torch.distributed as dist

        init_process_group(*args, **kwargs)
        if uses_nccl(backend_name()):
            dist.all_reduce(torch.zeros(1, device=f"cuda:{local_rank}"))

    return init_and_use


def _on_current_device(barrier: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(barrier)
    def barrier_on_device(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        import torch
        import torch.distributed as dist

        is_member = group is not dist.GroupMember.NON_GROUP_MEMBER
        if device_ids is None and is_member and uses_nccl(backend_name(group)):
            device_ids = [torch.cuda.current_device()]
        return barrier(group=group, async_op=async_op, device_ids=device_ids)

    return barrier_on_device
