"""What the device and its libraries are, and what communicators, events and memory cost on it."""

import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Keep = Callable[[dict[str, Any]], None]

_PACKAGES = (
    "megatron-core",
    "transformer-engine",
    "apex",
    "deepspeed",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
_MIB = 2**20
_REPEATS = 20
_EVENT_STEPS = 30
_MAX_OVERHEAD = 0.01
_MAX_CLOCK_ERROR = 0.02


def versions(device: str, _: Path, keep: Keep) -> None:
    """Versions of what takes part, and the device's size."""
    import torch

    def installed(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    keep({"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()})
    keep({name: installed(name) for name in _PACKAGES})
    if device == "cpu":
        keep({"device": f"cpu ({platform.machine()})"})
        return
    properties = torch.cuda.get_device_properties(0)
    keep(
        {
            "device": properties.name,
            "num_devices": torch.cuda.device_count(),
            "memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),
            "cudnn": torch.backends.cudnn.version(),
        }
    )
    query = ("nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader")
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        keep({"driver, clock, power": done.stdout.strip().splitlines()[0]})
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        keep({"faults": [f"nvidia-smi: {error}"]})


def communicators(_device: str, folder: Path, keep: Keep) -> None:
    """Device memory of an NCCL group of one rank, when it is made and when it is first used."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    used: list[tuple[str, int]] = []

    def note(moment: str) -> None:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        used.append((moment, total - free))
        before = dict(zip([name for name, _ in used[1:]], [size for _, size in used], strict=False))
        keep({f"{name} (MiB more)": (size - before[name]) / _MIB for name, size in used[1:]})

    tensor = torch.ones(_MIB, device="cuda")
    note("start")
    (folder / "store").unlink(missing_ok=True)
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    dist.all_reduce(tensor)
    note("first use of the world")
    for index in range(2):
        group = dist.new_group([0], group_desc=f"first_run_{index}")
        note(f"new group {index}")
        dist.all_reduce(tensor, group=group)
        note(f"first use of group {index}")
    received = torch.zeros_like(tensor)
    operations = [dist.P2POp(dist.isend, tensor, 0), dist.P2POp(dist.irecv, received, 0)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    note("batched send and receive with itself")
    if not torch.equal(received, tensor):
        keep({"faults": ["a batched send and receive with itself changed the tensor"]})
    dist.destroy_process_group()


def events(_device: str, _: Path, keep: Keep) -> None:
    """The recorder's cost in a step of many actions, and its seconds against the host's."""
    import torch

    from quartet_plugin.runtime.records import CudaClock, NullRecorder, Recorder

    matrix = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)

    def step(recorder: Any) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        recorder.begin()
        for _ in range(_EVENT_STEPS):
            recorder.starts()
            for _ in range(8):
                torch.mm(matrix, matrix)
            recorder.ends()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    recorder, nothing = Recorder(CudaClock()), NullRecorder()
    for each in (recorder, nothing, recorder, nothing):
        step(each)
    pairs = [(step(recorder), step(nothing)) for _ in range(_REPEATS)]
    overhead = statistics.median(with_events / without - 1.0 for with_events, without in pairs)
    host_s = step(recorder)
    last = recorder.times()[-1]
    error = abs(last.end_s / host_s - 1.0)
    keep({"recorder's share of a step": overhead, "events against the host": error, "step (s)": host_s})
    limits = (
        (overhead, _MAX_OVERHEAD, "the recorder's share"),
        (error, _MAX_CLOCK_ERROR, "the clocks' difference"),
    )
    keep({"faults": [f"{what} is {value:.3f}" for value, most, what in limits if value > most]})


def memory(_device: str, _: Path, keep: Keep) -> None:
    """Four counts of one training step of four transformer layers, hidden 2048, in bf16."""
    import torch

    free, total = torch.cuda.mem_get_info()
    context = total - free
    layers = [
        torch.nn.TransformerEncoderLayer(2048, 16, 8192, dropout=0.0, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    ]
    model = torch.nn.Sequential(*layers)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    batch = torch.randn(1024, 4, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    storages: dict[int, int] = {}

    def count(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        output = model(batch)
    held = torch.cuda.memory_allocated() - before
    output.float().sum().backward()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    keep(
        {
            "saved tensors (bytes)": sum(storages.values()),
            "held after the forward (bytes)": held,
            "allocated at the peak (bytes)": torch.cuda.max_memory_allocated(),
            "reserved at the peak (bytes)": torch.cuda.max_memory_reserved(),
            "outside of torch (bytes)": total - free - reserved,
            "before torch allocated (bytes)": context,
        }
    )
    if not 0.5 <= sum(storages.values()) / max(1, held) <= 1.5:
        keep({"faults": ["saved tensors and allocated memory differ by more than half"]})
