"""`torch.cuda` as Megatron asks it: one device a rank, which is the CPU."""

import functools
import logging
import os
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import psutil
import torch

from quartet_plugin.megatron.cpu_device import memory

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
        return (0, -1)

    def wait_stream(self, stream: "Stream") -> None: ...

    def wait_event(self, event: "Event") -> None: ...

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Event:
    """A point in time; `elapsed_time` is in milliseconds, as torch's."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._recorded_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        del stream
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return (end._recorded_s - self._recorded_s) * 1e3

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Context:
    """Stands for `torch.cuda.stream(...)` and `torch.cuda.device(...)`."""

    def __init__(self, target: Any = None) -> None:
        self.target = target

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def redirect() -> None:
    """Rebind the functions of `torch.cuda` and of its modules for RNG, memory and NVTX."""
    for target, functions in (
        (torch.cuda, {**_identity(), **_execution(), **_random(), **_memory()}),
        (torch.cuda.random, _random()),
        (torch.accelerator, _no_accelerator()),
        (torch.cuda.memory, _memory()),
        (torch.cuda.nvtx, {name: _always(None) for name in ("range_push", "range_pop", "mark")}),
    ):
        for name, function in functions.items():
            setattr(target, name, function)
    _allow_fork_to_advance_the_generator()
    _keep_data_loaders_off_the_generator()


def _always(value: Any) -> Callable[..., Any]:
    # A function of its own each time: torch keeps tables by function, and refuses one under two names.
    return lambda *_args, **_kwargs: value


def _identity() -> dict[str, Any]:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
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
        "device_count": _always(max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), local_rank + 1)),
        "current_device": _always(local_rank),
        "set_device": _always(None),
        "get_device_name": _always(properties.name),
        "get_device_capability": _always(_CAPABILITY),
        "get_device_properties": _always(properties),
        "init": _always(None),
        "_lazy_init": _always(None),
        "_lazy_call": _call_at_once,
    }


def _no_accelerator() -> dict[str, Any]:
    # torch's data loader asks here whether to pin, and its answer must be the truth.
    return {
        "is_available": _always(False),
        "current_accelerator": _always(None),
        "device_count": _always(0),
    }


def _call_at_once(function: Callable[[], Any], **_kwargs: Any) -> None:
    function()


def _execution() -> dict[str, Any]:
    stream = Stream()
    return {
        "Stream": Stream,
        "Event": Event,
        "stream": _Context,
        "device": _Context,
        "current_stream": _always(stream),
        "default_stream": _always(stream),
        "set_stream": _always(None),
        "synchronize": _always(None),
        "cudart": _always(SimpleNamespace(cudaProfilerStart=_always(0), cudaProfilerStop=_always(0))),
        "check_error": _always(None),
    }


def _random() -> dict[str, Any]:
    """The CPU's one generator is the device's: dropout on CPU tensors draws from it."""

    def get_rng_state(device: Any = None) -> Any:
        del device
        return torch.get_rng_state()

    def set_rng_state(new_state: Any, device: Any = None) -> None:
        del device
        torch.set_rng_state(new_state)

    def get_rng_state_all() -> list[Any]:
        return [torch.get_rng_state()]

    def set_rng_state_all(new_states: Iterable[Any]) -> None:
        for state in new_states:
            torch.set_rng_state(state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    return {
        "default_generators": _SameForEveryDevice(torch.default_generator),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": get_rng_state_all,
        "set_rng_state_all": set_rng_state_all,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "initial_seed": torch.default_generator.initial_seed,
    }


class _SameForEveryDevice:
    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, index: int) -> Any:
        del index
        return self._value


def _memory() -> dict[str, Any]:
    return {
        "memory_allocated": memory.resident_bytes,
        "memory_reserved": memory.resident_bytes,
        "max_memory_allocated": memory.peak_resident_bytes,
        "max_memory_reserved": memory.peak_resident_bytes,
        "device_memory_used": memory.resident_bytes,
        "memory_stats": memory.statistics,
        "mem_get_info": memory.free_and_total_bytes,
        "reset_peak_memory_stats": memory.reset_peak,
        "reset_max_memory_allocated": memory.reset_peak,
        "empty_cache": _always(None),
        "ipc_collect": _always(None),
    }


def _keep_data_loaders_off_the_generator() -> None:
    """Let a data loader that is started leave the state as it was.

    It draws a seed from the CPU's generator. On a GPU that leaves dropout's generator alone; here it would
    give a run that resumes from a checkpoint other masks than the run that goes on.
    """
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    start = _BaseDataLoaderIter.__init__

    @functools.wraps(start)
    def start_and_restore(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.random.fork_rng(devices=()):
            start(self, *args, **kwargs)

    _BaseDataLoaderIter.__init__ = start_and_restore


def _allow_fork_to_advance_the_generator() -> None:
    """Silence Megatron's warning that its CUDA generator's context advanced the CPU's: they are one here."""
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
