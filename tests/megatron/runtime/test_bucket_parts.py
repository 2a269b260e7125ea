"""Parts of Megatron's own bucket groups: every gradient is reduced once, as soon as its part is complete."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed import param_and_grad_buffer as buffers

from quartet_plugin.megatron.runtime.bucket_parts import parts_of
from quartet_plugin.megatron.runtime.reduction import GradReductions

# Of four parameters in the order of a backward.
SIZES = (5, 3, 4, 2)
SCALE = 0.5


@pytest.fixture
def process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A group of this process alone; DDP asks for the stream of a GPU."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def bucket_group(process_group: Any, *, size: int | None, distributed: bool = False) -> Any:
    """Megatron's group of one bucket, with gradients 0, 1, 2, ..."""
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, bucket_size=size, use_distributed_optimizer=distributed
    )
    params = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    ends = [sum(SIZES[: n + 1]) for n in range(len(SIZES))]
    bucket = buffers._ParamAndGradBucket(
        params=params,
        param_data=None,
        grad_data=torch.arange(sum(SIZES), dtype=torch.float32),
        offset=0,
        numel_unpadded=sum(SIZES),
        gradient_scaling_factor=SCALE,
        bucket_id=0,
        param_index_map={p: (end - p.numel(), end, 0) for p, end in zip(params, ends, strict=True)},
        params_with_extra_main_grads=[],
    )
    return buffers._ParamAndGradBucketGroup([bucket], config, process_group, 1)


def expected(*, num_reduced: int) -> list[float]:
    """The gradients when those of the first elements have been averaged."""
    return [n * (SCALE if n < num_reduced else 1) for n in range(sum(SIZES))]


@pytest.mark.parametrize(("size", "ends"), [(1, (5, 8, 12, 14)), (6, (8, 14)), (9, (12, 14))])
def test_parts_together_are_the_group(process_group: Any, size: int, ends: tuple[int, ...]) -> None:
    group = bucket_group(process_group, size=size)
    parts = parts_of(group)
    assert len(parts) == len(ends)
    assert set.union(*(part.params for part in parts)) == group.params
    assert sum(len(part.params) for part in parts) == len(SIZES)
    for step in range(2):
        data = group.buckets[0].grad_data
        data.copy_(torch.arange(sum(SIZES)))
        for part, end in zip(parts, ends, strict=True):
            assert group.grad_reduce_handle is None, step
            part.start_grad_sync()
            assert data.tolist() == expected(num_reduced=end)
        group.finish_grad_sync()
        group.reset()
        assert data.tolist() == expected(num_reduced=sum(SIZES))


@pytest.mark.parametrize(
    ("size", "distributed"),
    [(None, False), (14, False), (1, True)],
    ids=["no buckets wanted", "small enough", "distributed optimizer"],
)
def test_a_group_that_stays_whole(process_group: Any, size: int | None, *, distributed: bool) -> None:
    group = bucket_group(process_group, size=size, distributed=distributed)
    assert parts_of(group) == [group]


def test_parts_are_reduced_at_their_last_gradient(process_group: Any) -> None:
    group = bucket_group(process_group, size=6)
    params = group.buckets[0].params_list
    chunk: Any = torch.nn.Module()
    chunk.bucket_groups, chunk.expert_parallel_bucket_groups = [group], []
    reductions = GradReductions()
    (make_wrapper,) = reductions.wrappers().values()
    make_hook = make_wrapper(lambda *_: lambda: None)
    hooks = [make_hook(SimpleNamespace(), parameter) for parameter in params]
    for step in range(3):
        data = group.buckets[0].grad_data
        data.copy_(torch.arange(sum(SIZES)))
        running = reductions.begin([chunk], num_microbatches=1, is_overlapped=True)
        hooks[0]()
        hooks[1]()
        # The first step shows what to wait for.
        assert data.tolist() == expected(num_reduced=8 if step else 0)
        hooks[2]()
        hooks[3]()
        running.microbatch_done(0)
        assert data.tolist() == expected(num_reduced=14)
        reductions.end()
        group.finish_grad_sync()
        group.reset()


def test_an_interrupted_step_leaves_no_part_behind(process_group: Any) -> None:
    group = bucket_group(process_group, size=6)
    chunk: Any = torch.nn.Module()
    chunk.bucket_groups, chunk.expert_parallel_bucket_groups = [group], []
    reductions = GradReductions()
    running = reductions.begin([chunk], num_microbatches=1, is_overlapped=True)
    parts = running._groups[0]
    parts[0].start_grad_sync()
    reductions.abort()
    running = reductions.begin([chunk], num_microbatches=1, is_overlapped=True)
    running.microbatch_done(0)
    group.finish_grad_sync()
    assert len(running._groups[0]) == len(parts)
    assert group.grad_reduce_finished
