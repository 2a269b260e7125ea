"""How fast a device multiplies and copies, while all others of its node do the same."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# Side of the square products, by device and format; large enough that a larger one is no faster.
_SIDES = {
    "cpu": {"fp32": 768, "bf16": 384},
    "cuda": {"fp32": 4096, "bf16": 8192, "fp16": 8192},
}
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Beyond the last level of a processor's cache.
_COPY_BYTES = {"cpu": 128 * 2**20, "cuda": 1024 * 2**20}
_WINDOW_S = 0.4
_LEAST_REPEATS = 3


def measure(device: torch.device) -> dict[str, Any]:
    """`matmul_flops`, the highest FLOP/s of a product by format, and `copy_bytes_per_s`, read and written."""
    found: dict[str, float] = {}
    for precision, side in _SIDES[device.type].items():
        left = torch.randn(side, side, device=device).to(_TYPES[precision])
        seconds = shortest(_product(left), device=device)
        found[precision] = 2 * side**3 / seconds
    size = _COPY_BYTES[device.type]
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    seconds = shortest(lambda: target.copy_(source), device=device)
    return {"matmul_flops": found, "copy_bytes_per_s": 2 * size / seconds}


def _product(left: torch.Tensor) -> Callable[[], Any]:
    out = torch.empty_like(left)
    return lambda: torch.mm(left, left, out=out)


def shortest(action: Callable[[], Any], *, device: torch.device) -> float:
    """The shortest time of an action, begun by all ranks together and repeated for a moment."""
    action()
    dist.barrier()
    end = time.perf_counter() + _WINDOW_S
    times: list[float] = []
    while len(times) < _LEAST_REPEATS or time.perf_counter() < end:
        begin = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)
