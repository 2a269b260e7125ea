"""`torch.cuda` as Megatron asks it: one device a rank, which is the CPU."""

import contextlib
import functools
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from quartet_plugin.rank.device import peak_resident_bytes
from quartet_plugin.rank.seams import Redirect

# bf16 is allowed from 8.0 on and FP8 from 8.9 on: a CPU has the first and not the second.
_CAPABILITY = (8, 0)


class Stream:
    """Work on a CPU is done when the call returns: a stream has nothing to wait for."""

    def __init__(self, device: Any = None, priority: int = 0, **_kwargs: Any) -> None:
        self.device = device
        self.priority = priority
        self.cuda_stream = 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least and the highest priority, as torch gives them."""
        return (0, -1)

    def synchronize(self, *_awaited: Any) -> None:
        """Wait for nothing: all work is done."""

    wait_stream = wait_event = synchronize

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record `event`, or a new one, and return it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True


class Event:
    """A point in time; `elapsed_time` is in milliseconds, as torch's."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._recorded_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Take the time of this moment."""
        del stream
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to `end`."""
        return (end._recorded_s - self._recorded_s) * 1e3

    def synchronize(self, *_stream: Any) -> None:
        """Wait for nothing: the event has passed."""

    wait = synchronize

    def query(self) -> bool:
        """Whether the event has passed: always."""
        return True


def resident_bytes(_device: Any = None) -> int:
    """Bytes of this process that are in RAM now."""
    return int(psutil.Process().memory_info().rss)


def peak_bytes(_device: Any = None) -> int:
    """The most bytes of this process that were in RAM since its start or since `reset_peak`."""
    return peak_resident_bytes() or resident_bytes()  # a kernel without the counter, such as a sandbox's


def reset_peak(_device: Any = None) -> None:
    """Let `peak_bytes` start anew; without an effect where the kernel does not allow it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def free_and_total_bytes(_device: Any = None) -> tuple[int, int]:
    """Bytes free and installed on the machine, which its ranks share."""
    machine = psutil.virtual_memory()
    return int(machine.available), int(machine.total)


def memory_statistics(_device: Any = None) -> dict[str, int]:
    """The keys of `torch.cuda.memory_stats` that Megatron logs; counts that a CPU does not keep are 0."""
    counts = ("allocation.all.current", "allocation.all.peak", "num_alloc_retries", "num_ooms")
    kinds = ("allocated_bytes", "reserved_bytes")
    return {
        **{f"{kind}.all.current": resident_bytes() for kind in kinds},
        **{f"{kind}.all.peak": peak_bytes() for kind in kinds},
        **dict.fromkeys(counts, 0),
    }


def redirects() -> list[Redirect]:
    """The functions of `torch.cuda` and its modules for RNG, memory and NVTX; the data loader's start."""
    torch_cuda = ("torch.cuda",)
    tables: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
        ("torch.cuda", (), _identity() | _execution()),
        ("torch.cuda.random", torch_cuda, _random()),
        ("torch.cuda.memory", torch_cuda, _memory()),
        ("torch.cuda.nvtx", (), _nothing("range_push", "range_pop", "mark")),
        # torch's data loader asks here whether to pin, and its answer must be the truth.
        (
            "torch.accelerator",
            (),
            {"is_available": _always(False), "device_count": _always(0), **_nothing("current_accelerator")},
        ),
    )
    return [
        *(
            Redirect(module, name, _always(replacement), aliases)
            for module, aliases, table in tables
            for name, replacement in table.items()
        ),
        Redirect("torch.utils.data.dataloader", "_BaseDataLoaderIter.__init__", _restoring_generator),
    ]


def _always(value: Any) -> Callable[..., Any]:
    # A function of its own each time: torch keeps tables by function, and refuses one under two names.
    return lambda *_args, **_kwargs: value


def _nothing(*names: str) -> dict[str, Any]:
    return {name: _always(None) for name in names}


def _local_rank() -> int:
    # Read when it is asked for: a trial server installs the device before it is any rank's.
    return int(os.environ.get("LOCAL_RANK", "0"))


def _identity() -> dict[str, Any]:
    properties = SimpleNamespace(
        name="CPU",
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=psutil.virtual_memory().total,
        multi_processor_count=1,
    )
    return {
        "is_available": _always(True),
        "is_initialized": _always(True),
        "is_bf16_supported": _always(True),
        "is_current_stream_capturing": _always(False),
        "device_count": lambda: max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), _local_rank() + 1),
        "current_device": _local_rank,
        "get_device_name": _always(properties.name),
        "get_device_capability": _always(_CAPABILITY),
        "get_device_properties": _always(properties),
        **_nothing("set_device", "init", "_lazy_init"),
        "_lazy_call": lambda function, **_: function(),
    }


def _execution() -> dict[str, Any]:
    stream = Stream()
    return {
        "Stream": Stream,
        "Event": Event,
        "stream": contextlib.nullcontext,
        "device": contextlib.nullcontext,
        "current_stream": _always(stream),
        "default_stream": _always(stream),
        "default_generators": defaultdict(lambda: torch.default_generator),
        "device_memory_used": resident_bytes,
        **_nothing("set_stream", "synchronize", "check_error", "ipc_collect"),
        "cudart": _always(SimpleNamespace(cudaProfilerStart=_always(0), cudaProfilerStop=_always(0))),
    }


def _random() -> dict[str, Any]:
    """The CPU's one generator is the device's: dropout on CPU tensors draws from it."""
    generator = torch.default_generator
    return {
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda new_state, *_, **__: torch.set_rng_state(new_state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda new_states: [torch.set_rng_state(state) for state in new_states],
        "manual_seed": lambda seed: generator.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: generator.manual_seed(int(seed)),
        "initial_seed": generator.initial_seed,
    }


def _memory() -> dict[str, Any]:
    return {
        "memory_allocated": resident_bytes,
        "memory_reserved": resident_bytes,
        "max_memory_allocated": peak_bytes,
        "max_memory_reserved": peak_bytes,
        "memory_stats": memory_statistics,
        "mem_get_info": free_and_total_bytes,
        "reset_peak_memory_stats": reset_peak,
        "reset_max_memory_allocated": reset_peak,
        **_nothing("empty_cache"),
    }


def _restoring_generator(start: Any) -> Any:
    """The start of a data loader that leaves the generator's state as it was.

    It draws a seed from the CPU's generator. On a GPU that leaves dropout's generator alone; here it would
    give a run that resumes from a checkpoint other masks than the run that goes on.
    """

    @functools.wraps(start)
    def start_and_restore(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.random.fork_rng(devices=()):
            start(self, *args, **kwargs)

    return start_and_restore


def silence_fork_warning() -> None:
    """Silence Megatron's warning that its CUDA generator's context advanced the CPU's: they are one here."""
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
