"""Failures that are provoked: their texts, and the kinds that the plugin takes them for."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Keep = Callable[[dict[str, Any]], None]

# Ranks import torch first, which takes a busy machine half a minute.
_WAIT_S = 75.0
_MAX_TEXT = 600


def failures(device: str, folder: Path, keep: Keep) -> None:
    """Every failure of the device in a process of its own, with the kind that is expected; None for any."""
    cases: list[tuple[str, Callable[..., None], int, str | None]] = [
        ("a tensor larger than the memory", allocate_too_much, 1, "out-of-memory"),
        ("a peer that is killed", lose_a_peer, 2, "network"),
    ]
    if device == "cuda":
        cases += [
            ("cuBLAS without memory", use_cublas_without_memory, 1, "out-of-memory"),
            ("two ranks on one device", share_a_device, 2, None),
        ]
    for name, provoke, num_ranks, expected in cases:
        reports = _provoked(provoke, num_ranks, device=device, folder=folder / name.replace(" ", "-"))
        keep({name: reports[0] if reports else "no failure was reported"})
        if not reports:
            keep({"faults": [f"{name}: no failure within {_WAIT_S:.0f} s"]})
        elif expected is not None and reports[0]["kind"] != expected:
            keep({"faults": [f"{name}: {reports[0]['kind']}, not {expected}"]})


def _provoked(
    provoke: Callable[..., None], num_ranks: int, *, device: str, folder: Path
) -> list[dict[str, Any]]:
    """The failures that the ranks reported, rank 0's first."""
    folder.mkdir(parents=True, exist_ok=True)
    # Of an earlier run, whose ranks would be taken for these.
    (folder / "store").unlink(missing_ok=True)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(provoke, rank, num_ranks, device, folder, queue))
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + _WAIT_S
    for process in ranks:
        process.join(max(0.1, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    reports = []
    while not queue.empty():
        reports.append(queue.get())
    return sorted(reports, key=lambda report: int(report["rank"]))


def _rank(
    provoke: Callable[..., None], rank: int, num_ranks: int, device: str, folder: Path, queue: Any
) -> None:
    from quartet_plugin.rank.failure import kind_of

    try:
        provoke(rank=rank, num_ranks=num_ranks, device=device, folder=folder)
    except BaseException as error:
        text = " ".join(str(error).split())[:_MAX_TEXT]
        queue.put(
            {"rank": rank, "kind": kind_of(error, num_steps=1), "type": type(error).__name__, "text": text}
        )


def allocate_too_much(*, device: str, **_: Any) -> None:
    """Ask torch's allocator for a petabyte."""
    import torch

    torch.empty(2**50, dtype=torch.uint8, device=device)


def use_cublas_without_memory(**_: Any) -> None:
    """Fill the device, then let cuBLAS make its handle and workspace."""
    import torch

    matrix = torch.ones(256, 256, device="cuda")
    filled = []
    size = torch.cuda.mem_get_info()[0]
    while size >= 2**20:
        try:
            filled.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()


def lose_a_peer(*, rank: int, num_ranks: int, folder: Path, **_: Any) -> None:
    """Rank 1 is killed while rank 0 waits for its tensor, over gloo."""
    import torch
    import torch.distributed as dist

    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.zeros(2**20), src=1)


def share_a_device(*, rank: int, num_ranks: int, folder: Path, **_: Any) -> None:
    """Two ranks of one NCCL communicator on one GPU, which NCCL refuses."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=num_ranks)
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
