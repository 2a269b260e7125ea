"""A simulated schedule as a trace for Perfetto or chrome://tracing: one track a device, one slice an action.

The format is the Trace Event Format's JSON object form; its times are microseconds.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from quartet_plugin.report.timeline import KIND_NAMES
from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.schedule.schedule import Schedule

if TYPE_CHECKING:
    from quartet_plugin.model.costs import StageCosts
    from quartet_plugin.schedule.simulate import Simulation

MAX_FLOWS = 50_000
_PROCESS = 1
_US = 1e6

Event = dict[str, Any]


def trace(
    schedule: Schedule,
    simulation: "Simulation",
    *,
    name: str = "schedule",
    costs: "StageCosts | None" = None,
) -> dict[str, Any]:
    """The trace of `schedule` at the times of `simulation`, a value for `json.dump`.

    One process, a thread a device, a complete event an action with its stage, microbatch and chunk, and an
    arrow for every hand-over between devices (up to 50,000 of them). With `costs`, also each device's
    activation bytes over time.
    """
    events = _names(schedule, name)
    for device in range(schedule.num_devices):
        events += _slices(schedule, simulation, device)
    events += _flows(schedule, simulation)
    if costs is not None:
        for device in range(schedule.num_devices):
            events += _memory(schedule, simulation, device, costs)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": name,
            "makespan_s": float(simulation.makespan_s),
            "bubble_fraction": float(simulation.bubble_fraction),
        },
    }


def _names(schedule: Schedule, name: str) -> list[Event]:
    events: list[Event] = [
        {"ph": "M", "pid": _PROCESS, "tid": 0, "name": "process_name", "args": {"name": name}}
    ]
    for device in range(schedule.num_devices):
        common = {"ph": "M", "pid": _PROCESS, "tid": device}
        events.append({**common, "name": "thread_name", "args": {"name": f"device {device}"}})
        events.append({**common, "name": "thread_sort_index", "args": {"sort_index": device}})
    return events


def _slices(schedule: Schedule, simulation: "Simulation", device: int) -> list[Event]:
    starts = (simulation.start_s[device] * _US).tolist()
    ends = (simulation.end_s[device] * _US).tolist()
    pair_of = {
        part: entry for entry in schedule.entries(device) if isinstance(entry, tuple) for part in entry
    }
    return [
        {
            "ph": "X",
            "pid": _PROCESS,
            "tid": device,
            "ts": start,
            "dur": end - start,
            "name": str(action),
            "cat": KIND_NAMES[action.kind],
            "args": {"stage": action.stage, "kind": action.kind.name, "microbatch": action.microbatch}
            | ({"pair": str(pair_of[action])} if action in pair_of else {}),
        }
        for action, start, end in zip(schedule.actions(device), starts, ends, strict=True)
    ]


def _flows(schedule: Schedule, simulation: "Simulation") -> list[Event]:
    """An arrow from the middle of each producer to the middle of its consumer on another device."""
    middles: dict[tuple[int, bool, int], tuple[int, float]] = {}
    for device in range(schedule.num_devices):
        times = ((simulation.start_s[device] + simulation.end_s[device]) * (_US / 2)).tolist()
        for action, middle in zip(schedule.actions(device), times, strict=True):
            if action.kind != ActionKind.W:
                boundary = action.stage, action.kind != ActionKind.F, action.microbatch
                middles[boundary] = device, middle
    events: list[Event] = []
    for (stage, is_backward, microbatch), (device, middle) in middles.items():
        target = middles.get((stage - 1 if is_backward else stage + 1, is_backward, microbatch))
        if target is None or target[0] == device:
            continue
        number = len(events) // 2 + 1
        common = {"pid": _PROCESS, "name": "gradient" if is_backward else "activation", "cat": "transfer"}
        events.append({**common, "ph": "s", "id": number, "tid": device, "ts": middle})
        events.append({**common, "ph": "f", "bp": "e", "id": number, "tid": target[0], "ts": target[1]})
        if number >= MAX_FLOWS:
            break
    return events


def _memory(schedule: Schedule, simulation: "Simulation", device: int, costs: "StageCosts") -> list[Event]:
    """A counter of one device: up at the start of F, down at the end of I, W or B."""
    codes = schedule.orders[device]
    kinds = codes & 3
    size = costs.activation_bytes[(codes >> 2) // schedule.num_microbatches]
    freed = np.array([0.0, 1.0 - costs.held_fraction, costs.held_fraction, 1.0])[kinds]
    change = np.where(kinds == ActionKind.F, size, -freed * size)
    times = np.where(kinds == ActionKind.F, simulation.start_s[device], simulation.end_s[device]) * _US
    levels = np.maximum(np.cumsum(change), 0.0)
    name = f"activations of device {device}"
    return [
        {"ph": "C", "pid": _PROCESS, "name": name, "ts": time_us, "args": {"bytes": level}}
        for time_us, level in zip(times.tolist(), levels.tolist(), strict=True)
    ]
