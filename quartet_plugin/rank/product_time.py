"""The time of a matrix product of fixed size: a rank's speed without any waiting for other ranks.

Iterations of synchronous training take all ranks as long as the slowest, so they do not tell which one that
is.
"""

import sys
import time

from quartet_plugin.rank.device import is_on_cpu

# Samples, and the products in one of them: some milliseconds on a device of today.
NUM_SAMPLES = 9
_CPU_SIZE, _CPU_PRODUCTS = 512, 1
_CUDA_SIZE, _CUDA_PRODUCTS = 2048, 128


def product_times() -> tuple[float, ...] | None:
    """Seconds of NUM_SAMPLES equal runs of products on this rank's device; None where it cannot compute them.

    Call it when training has ended on all ranks: what shares the device or its cores changes the times.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    on_cpu = is_on_cpu()
    size, num_products = (_CPU_SIZE, _CPU_PRODUCTS) if on_cpu else (_CUDA_SIZE, _CUDA_PRODUCTS)
    kind = torch.float32 if on_cpu else torch.bfloat16
    try:
        with torch.no_grad():
            device = "cpu" if on_cpu else "cuda"
            factors = torch.linspace(-1.0, 1.0, size**2, device=device, dtype=torch.float32)
            factors = factors.view(size, size).to(kind)
            product = torch.empty_like(factors)
            # Of the first sample the library's start is a part.
            times = []
            for _ in range(NUM_SAMPLES + 1):
                begin_s = time.perf_counter()
                for _ in range(num_products):
                    torch.mm(factors, factors, out=product)
                if not on_cpu:
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - begin_s)
    except RuntimeError:
        # No memory, or a device that refuses: what was trained before is measured all the same.
        return None
    return tuple(times[1:])
