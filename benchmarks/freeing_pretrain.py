"""The example's training with a heap that gives freed tensors back: `freeing_pretrain.py FLAGS...`.

The CPU device lets freed memory stay in the heap, where it is fast to get again; the holes between tensors
then count as the process's. Here each tensor is a mapping of its own, so that the process grows and shrinks
with its tensors.
"""

import ctypes
import runpy
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "pretrain_gpt.py"
# glibc's numbers of M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD, and bytes.
SETTINGS = {-1: 2**17, -2: 2**17, -3: 2**16}


def main() -> None:
    """Set the heap's thresholds, and run the example."""
    libc = ctypes.CDLL(None)
    for name, num_bytes in SETTINGS.items():
        if not libc.mallopt(name, num_bytes):
            raise SystemExit("this C library has no such setting of its heap")
    sys.argv[0] = str(EXAMPLE)
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
