"""Reduces a large bucket group of DDP in several parts, each as soon as its own gradients are complete.

Megatron makes one bucket of all parameters of a chunk, except on the first pipeline rank's first chunk, since
under its own schedules only the gradients there are complete last. Under a custom schedule every device may
end with the backward of a large chunk, whose reduction could not start before its last gradient. A part is a
bucket group of Megatron's with a range of the bucket's gradients: DDP's buffers, gathers and checkpoints
know nothing of it, and the sums are the same. The distributed optimizer gives each rank one range of a whole
bucket, so that its groups stay whole.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any


class BucketPart:
    """A part of a bucket group that is reduced by itself; the group waits for all of its parts."""

    def __init__(self, group: Any, whole: "_PartReductions", buckets: Sequence[Any]) -> None:
        """`buckets` have ranges of the gradients of the group's buckets."""
        self._reduced = copy.copy(group)
        self._reduced.buckets = list(buckets)
        self._reduced.cached_grad_buffer_shard_list = [None] * len(buckets)
        self._reduced.params = self.params = {p for bucket in buckets for p in bucket.params_list}
        self._whole = whole

    def start_grad_sync(self) -> None:
        """Start the reduction of this part; DDP's wait for the group waits for it too."""
        self._reduced.grad_reduce_handle = None
        self._reduced.start_grad_sync()
        self._whole.started(self._reduced.grad_reduce_handle)


class _PartReductions:
    """In place of the handle of a group's reduction: those of its parts."""

    def __init__(self, group: Any, *, num_parts: int) -> None:
        self._group = group
        self._num_parts = num_parts
        self._handles: list[Any] = []

    def started(self, handle: Any) -> None:
        self._handles.append(handle)
        if len(self._handles) == self._num_parts:
            self._group.grad_reduce_handle = self

    def wait(self) -> None:
        """Block until the reduction of every part is over."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()


def parts_of(group: Any) -> list[Any]:
    """The parts of a bucket group in the order of its gradients, or the group alone where it stays whole.

    A part has as many parameters as DDP's configuration wants in a bucket, or a few more.
    """
    config = group.ddp_config
    if config.use_distributed_optimizer or config.bucket_size is None:
        return [group]
    buckets = [part for bucket in group.buckets for part in _cut(bucket, config.bucket_size)]
    if len(buckets) == len(group.buckets):
        return [group]
    whole = _PartReductions(group, num_parts=len(buckets))
    return [BucketPart(group, whole, [bucket]) for bucket in buckets]


def _cut(bucket: Any, size: int) -> Iterator[Any]:
    """Buckets over consecutive ranges of a bucket's gradients, each with `size` elements or more."""
    params: list[Any] = []
    begin, last = 0, bucket.params_list[-1]
    for parameter in bucket.params_list:
        params.append(parameter)
        _, end = bucket.param_to_index[parameter]
        if end - begin < size and parameter is not last:
            continue
        part = copy.copy(bucket)
        part.params_list, part.params = params, set(params)
        if hasattr(bucket, "params_with_extra_main_grads"):  # since 0.17
            extra = bucket.params_with_extra_main_grads
            part.params_with_extra_main_grads = [p for p in extra if p in part.params]
        part.grad_data = bucket.grad_data[begin:end]
        yield part
        params, begin = [], end
