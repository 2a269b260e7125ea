"""Messages of CUDA, cuBLAS, cuDNN, NCCL, HIP and XPU libraries that mean no memory, a fault or a lost peer.

A library reports a lack of memory in its own words, and torch raises a plain RuntimeError for most of them.
`tests/rank/failure_messages.json` holds the messages that these patterns were written for.
"""

import re

_NO_MEMORY = (
    # Allocators of torch, and the words of cudaGetErrorString and hipGetErrorString.
    r"out of memory",
    r"can(?:'t|not) allocate memory",
    r"bad_alloc",
    # Names of error codes, such as CUDA_ERROR_OUT_OF_MEMORY and hipErrorOutOfMemory.
    r"out_?of_?(?:host_|device_)?memory",
    r"memoryallocation",
    r"UR_RESULT_ERROR_OUT_OF_RESOURCES",
    # cuBLAS, cuDNN, cuSOLVER, cuSPARSE, hipBLAS; rocBLAS has a word of its own.
    r"_alloc(?:ation)?_failed",
    r"rocblas_status_memory_error",
    # NCCL and RCCL.
    r"failed to cuda (?:host )?[cm]?alloc",
)
_LOST_PEER = (
    r"address already in use",
    r"connection (?:was )?(?:closed|reset|refused)",
    r"broken pipe",
    r"socket timeout",
    r"timed out waiting",
    r"connectfullmesh",
    r"no route to host",
    # NCCL: a network error, a completion with an error of an InfiniBand card, an abort after another's error.
    r"remote process exit(?:ed|ing)",
    r"got completion from peer",
    r"communicator was aborted",
    r"collective operation timeout",
)
# `Tried to allocate 2.50 GiB` of torch, `Failed to CUDA calloc async 608 bytes` of NCCL.
_WANTED = re.compile(
    r"(?:tried to allocate|failed to cuda [\w ]*alloc(?: async)?) ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE
)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_NO_MEMORY_PATTERN = re.compile("|".join(_NO_MEMORY), re.IGNORECASE)
_LOST_PEER_PATTERN = re.compile("|".join(_LOST_PEER), re.IGNORECASE)
# torch's words before those of an error that a call of the device's library returned.
_DEVICE_FAULT_PATTERN = re.compile(r"^(?:cuda|hip)(?: driver)? error: ", re.IGNORECASE)


def means_no_memory(text: str) -> bool:
    """Whether a message says that memory of the device, or of the host, was not enough."""
    return _NO_MEMORY_PATTERN.search(text) is not None


def means_lost_peer(text: str) -> bool:
    """Whether a message says that another process, or the network to it, went away."""
    return _LOST_PEER_PATTERN.search(text) is not None


def means_device_fault(text: str) -> bool:
    """Whether a message is that of a call of CUDA or HIP that failed in this process."""
    return _DEVICE_FAULT_PATTERN.search(text) is not None


def wanted_bytes_of(text: str) -> int:
    """The size in bytes of the allocation that failed, as its message has it; 0 where it has none."""
    match = _WANTED.search(text)
    return round(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
