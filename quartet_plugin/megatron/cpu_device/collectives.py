"""torch.distributed on gloo: NCCL's options dropped, and sends whose storage stays until they are waited for.

Megatron's pipeline schedules free an activation's storage as soon as its asynchronous send was issued
(`deallocate_output_tensor`). NCCL has then ordered the copy on a stream; gloo is still reading the memory,
and sends whatever the allocator put there: training goes on with wrong numbers and exit code 0.
"""

import functools
from typing import Any

import torch

from quartet_plugin.rank.seams import Redirect


class PendingSend:
    """The `Work` of a send, together with the tensor it reads, until it is waited for.

    Megatron rebinds the `data` of the tensor it sent. That changes the tensor but not an alias of it, so the
    alias is what is sent and held. A send that nobody waits for is held until the process ends.
    """

    _pending: "set[PendingSend]" = set()  # noqa: RUF012 - one registry a process, on purpose

    def __init__(self, work: Any, alias: Any) -> None:
        self._work = work
        self._alias = alias
        self._pending.add(self)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the send as `Work.wait`, then let go of the storage."""
        result = self._work.wait(*args, **kwargs)
        self._alias = None
        self._pending.discard(self)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _on_gloo(function: Any) -> Any:
    @functools.wraps(function)
    def call_on_gloo(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if argument == "nccl" else argument for argument in args)
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        for option in ("device_id", "device_ids", "pg_options"):
            kwargs.pop(option, None)
        return function(*args, **kwargs)

    return call_on_gloo


def _holding(isend: Any) -> Any:
    @functools.wraps(isend)
    def isend_and_hold(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        alias = tensor.detach()
        work = isend(alias, *args, **kwargs)
        return work if work is None else PendingSend(work, alias)

    return isend_and_hold


def _with_listed_sizes(exchange: Any) -> Any:
    """An all-to-all that takes the sizes of its parts as tensors too.

    Megatron's dispatchers of experts make arrays of them as they fetch them from the GPU; on a CPU they are
    fetched already, and stay tensors, which torch does not take.
    """

    @functools.wraps(exchange)
    def exchange_listed(output: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(_listed(argument) for argument in args)
        kwargs = {name: _listed(argument) for name, argument in kwargs.items()}
        return exchange(output, source, *args, **kwargs)

    return exchange_listed


def _listed(argument: Any) -> Any:
    return argument.tolist() if isinstance(argument, torch.Tensor) else argument


def _of_any_sizes(all_gather: Any) -> Any:
    """An all-gather whose ranks may have other lengths, [n_r, ...], as NCCL takes them and gloo does not.

    Tensor-parallel ranks that share experts gather the tokens that each was sent.
    """

    @functools.wraps(all_gather)
    def gather_any(tensor_list: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        most = _uneven(tensor_list)
        if most is None:
            return all_gather(tensor_list, tensor, *args, **kwargs)
        gathered = [_padded(part, most) for part in tensor_list]
        work = all_gather(gathered, _padded(tensor, most), *args, **kwargs)
        if work is not None:
            work.wait()
        for part, padded in zip(tensor_list, gathered, strict=True):
            part.copy_(padded[: part.size(0)])
        return work

    return gather_any


def _to_any_sizes(reduce_scatter: Any) -> Any:
    """A reduce-scatter to ranks of other lengths, [n_r, ...]: what `_of_any_sizes` has as its backward."""

    @functools.wraps(reduce_scatter)
    def scatter_any(output: Any, input_list: Any, *args: Any, **kwargs: Any) -> Any:
        most = _uneven(input_list)
        if most is None:
            return reduce_scatter(output, input_list, *args, **kwargs)
        padded = _padded(output, most)
        work = reduce_scatter(padded, [_padded(part, most) for part in input_list], *args, **kwargs)
        if work is not None:
            work.wait()
        output.copy_(padded[: output.size(0)])
        return work

    return scatter_any


def _uneven(tensors: Any) -> int | None:
    """The largest length of tensors that have several; None where they are alike."""
    lengths = {tensor.size(0) for tensor in tensors if tensor.dim()}
    return max(lengths) if len(lengths) > 1 else None


def _padded(tensor: Any, length: int) -> Any:
    return torch.cat((tensor, tensor.new_zeros(length - tensor.size(0), *tensor.shape[1:])))


# The asynchronous send, and the functions whose arguments name CUDA or NCCL. `batch_isend_irecv` calls the
# names in distributed_c10d, and its check compares them.
REDIRECTS = tuple(
    Redirect("torch.distributed.distributed_c10d", name, wrap, aliases=("torch.distributed",))
    for name, wrap in {
        **dict.fromkeys(("init_process_group", "new_group", "barrier"), _on_gloo),
        "isend": _holding,
        "all_to_all_single": _with_listed_sizes,
        "all_gather": _of_any_sizes,
        "reduce_scatter": _to_any_sizes,
    }.items()
)
