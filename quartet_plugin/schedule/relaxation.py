"""Heads, tails and one-machine bounds of a pipeline whose split and placement are fixed.

The relaxed pipeline: on stage s every microbatch needs F (`forward_s`), then I (`input_grad_s`), then W
(`weight_grad_s`); F follows the F of the stage before and I the I of the stage behind, each after its
transfer; every device runs one action at a time. A full backward is I with W at once behind it, so the
relaxed costs of `relaxed_costs` make every legal mixture of full and split backwards a solution.

Two facts carry everything here. **Microbatches in order**: in any solution hand out each class (stage,
kind)'s time slots to the microbatches in ascending order. The i-th smallest start of a class is preceded
by at least i ends of the class it waits for (one for each microbatch started so far), so it is no earlier
than the i-th smallest of them plus the transfer; durations and bytes do not depend on the microbatch, so
device order, memory and makespan stay. **One machine**: a device's actions with release times r and
tails q need at least max over subsets J of min r(J) + sum d(J) + min q(J); the preemptive schedule that
always runs the available action with the largest tail attains that maximum (Carlier 1982).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.model.costs import Costs, FloatArray, IntArray, StageCosts
from quartet_plugin.schedule.compilation import compiled, inner
from quartet_plugin.schedule.kernel import MEMORY_TOLERANCE

CountArray = NDArray[np.int16]
# Steps to the stages before and behind; ints that are written out would be compiled for one by one.
_BEFORE, _BEHIND = np.int64(-1), np.int64(1)


class Relaxation(NamedTuple):
    """The relaxed pipeline as kernels take it; seconds, per stage in model order.

    `needs_i[s, i]` and `needs_w[s, i]` are the last microbatches whose I and W must have ended on stage s
    before F(s, i) may start under the device's limit, -1 for none [num_stages, num_microbatches].
    """

    num_devices: int
    num_microbatches: int
    device: IntArray
    f_s: FloatArray
    i_s: FloatArray
    w_s: FloatArray
    send_f_s: FloatArray
    send_i_s: FloatArray
    needs_i: IntArray
    needs_w: IntArray


class Classes(NamedTuple):
    """One number an action, [num_stages, num_microbatches] for each kind: ends, or tails, in seconds."""

    f: FloatArray
    i: FloatArray
    w: FloatArray


def relaxed_costs(stages: StageCosts) -> tuple[FloatArray, FloatArray]:
    """Durations of I and W [num_stages] that no legal backward, full or split, can beat.

    With B the full backward: I' = min(I, B) and I' + W' = min(I + W, B). A full backward covers I' and
    then W'; a split one covers I' in I, and W' in W when B >= I, while W' = 0 otherwise.
    """
    input_grad_s = np.minimum(stages.input_grad_s, stages.backward_s)
    both_s = np.minimum(stages.input_grad_s + stages.weight_grad_s, stages.backward_s)
    return input_grad_s, np.maximum(both_s - input_grad_s, 0.0)


def relaxation(costs: Costs, stages: StageCosts) -> Relaxation:
    """Relax `stages`, a split and placement of `costs`.

    Memory: just after F(s, i) has started, i + 1 forwards of stage s hold its bytes, less what their I and
    W freed: `(i + 1 - (1 - h) num_I - h num_W) bytes <= limit` with held fraction h and num_W <= num_I <= i.
    So num_I >= i + 1 - limit / bytes, and num_W >= (i + 1 - limit / bytes - (1 - h) i) / h.
    """
    input_grad_s, weight_grad_s = relaxed_costs(stages)
    num_microbatches = costs.num_microbatches
    needs_input = np.full((stages.num_stages, num_microbatches), -1, dtype=np.int64)
    needs_weight = needs_input.copy()
    held = stages.held_fraction
    if costs.memory_limit_bytes is not None:
        index = np.arange(num_microbatches)
        for stage, device in enumerate(stages.device_of_stage):
            if stages.activation_bytes[stage] <= 0:
                continue
            room = costs.memory_limit_bytes[device] / stages.activation_bytes[stage]
            over = index + 1 - room * (1 + 2 * MEMORY_TOLERANCE) - MEMORY_TOLERANCE
            needs_input[stage] = np.clip(np.ceil(over) - 1, -1, index - 1)
            if held > 0:
                over = (over - (1 - held) * index) / held - MEMORY_TOLERANCE
                needs_weight[stage] = np.clip(np.ceil(over) - 1, -1, index - 1)
    return Relaxation(
        num_devices=costs.num_devices,
        num_microbatches=num_microbatches,
        device=stages.device_of_stage,
        f_s=stages.forward_s,
        i_s=input_grad_s,
        w_s=weight_grad_s,
        send_f_s=stages.forward_transfer_s,
        send_i_s=stages.backward_transfer_s,
        needs_i=needs_input,
        needs_w=needs_weight,
    )


def root_bounds(relaxed: Relaxation) -> tuple[FloatArray, float]:
    """The one-machine bound of every device [num_devices], and the longest path, seconds."""
    shape = (len(relaxed.device), relaxed.num_microbatches)
    tail = tails(relaxed)
    end = Classes(np.zeros(shape), np.zeros(shape), np.zeros(shape))
    counts = np.zeros((shape[0], 3), dtype=np.int16)
    heads(relaxed, counts, np.zeros(relaxed.num_devices), end)
    path_s = max(float((e + t).max()) for e, t in zip(end, tail, strict=True))
    devices = range(relaxed.num_devices)
    return np.array([one_machine(relaxed, d, counts, end, tail) for d in devices]), path_s


@compiled
def tails(relaxed: Relaxation) -> Classes:
    """Seconds that must still pass after each action's end, by paths, class order, memory and load."""
    m, f_s, i_s, w_s = relaxed.num_microbatches, relaxed.f_s, relaxed.i_s, relaxed.w_s
    stages = len(relaxed.device)
    tail_f, tail_i, tail_w = np.zeros((stages, m)), np.zeros((stages, m)), np.zeros((stages, m))
    tail = Classes(tail_f, tail_i, tail_w)
    for i in range(m - 1, -1, -1):
        for s in range(stages):
            if i + 1 < m:
                tail_w[s, i] = w_s[s] + tail_w[s, i + 1]
                tail_i[s, i] = i_s[s] + tail_i[s, i + 1]
                tail_f[s, i] = f_s[s] + tail_f[s, i + 1]
            for later in range(i + 1, m):  # memory: F(s, later) waits for the W or I of i
                if relaxed.needs_w[s, later] == i:
                    tail_w[s, i] = max(tail_w[s, i], f_s[s] + tail_f[s, later])
                if relaxed.needs_i[s, later] == i:
                    tail_i[s, i] = max(tail_i[s, i], f_s[s] + tail_f[s, later])
            tail_i[s, i] = max(tail_i[s, i], w_s[s] + tail_w[s, i])
        for s in range(stages):
            if s > 0:
                tail_i[s, i] = max(tail_i[s, i], relaxed.send_i_s[s] + i_s[s - 1] + tail_i[s - 1, i])
            tail_i[s, i] = max(tail_i[s, i], _load_behind(relaxed, s, _BEFORE, i, tail_i))
        for s in range(stages - 1, -1, -1):
            tail_f[s, i] = max(tail_f[s, i], i_s[s] + tail_i[s, i])
            if s + 1 < stages:
                tail_f[s, i] = max(tail_f[s, i], relaxed.send_f_s[s] + f_s[s + 1] + tail_f[s + 1, i])
            tail_f[s, i] = max(tail_f[s, i], _load_behind(relaxed, s, _BEHIND, i, tail_i))
    return tail


@inner
def _load_behind(relaxed: Relaxation, s: int, step: np.int64, i: int, tail_i: FloatArray) -> float:
    """Seconds of load after F(s, i), with `step` 1, or after I(s, i), with `step` -1, on the busiest device.

    After F(s, i) every later stage still has all its work for the microbatches from i on, after I(s, i)
    every earlier stage their backwards.
    """
    num_left = relaxed.num_microbatches - i
    first = np.full(relaxed.num_devices, -1.0)
    without_w, load = np.zeros(relaxed.num_devices), np.zeros(relaxed.num_devices)
    rest = np.full(relaxed.num_devices, np.inf)
    way = 0.0
    for u in range(s + step, len(relaxed.device) if step > 0 else -1, step):
        way += relaxed.send_f_s[u - 1] if step > 0 else relaxed.send_i_s[u + 1]
        d = relaxed.device[u]
        if first[d] < 0:
            first[d] = way
        inner = relaxed.f_s[u] + relaxed.i_s[u] if step > 0 else relaxed.i_s[u]
        without_w[d] += inner
        load[d] += inner + relaxed.w_s[u]
        rest[d] = min(rest[d], tail_i[u, relaxed.num_microbatches - 1])
        way += relaxed.f_s[u] if step > 0 else relaxed.i_s[u]
    bound = 0.0
    for d in range(relaxed.num_devices):
        if first[d] >= 0:
            bound = max(bound, first[d] + max(load[d] * num_left, without_w[d] * num_left + rest[d]))
    return bound


@compiled
def heads(relaxed: Relaxation, counts: CountArray, ready: FloatArray, end: Classes) -> None:
    """Fill in the earliest ends of the actions that `counts` [num_stages, 3] has not done; others are given.

    `ready` [num_devices] is when each device is free.
    """
    device = relaxed.device
    stages = len(device)
    for i in range(relaxed.num_microbatches):
        for s in range(stages):
            if i >= counts[s, 0]:
                start = ready[device[s]]
                if i > 0:
                    start = max(start, end.f[s, i - 1])
                if s > 0:
                    start = max(start, end.f[s - 1, i] + relaxed.send_f_s[s - 1])
                if relaxed.needs_i[s, i] >= 0:
                    start = max(start, end.i[s, relaxed.needs_i[s, i]])
                if relaxed.needs_w[s, i] >= 0:
                    start = max(start, end.w[s, relaxed.needs_w[s, i]])
                end.f[s, i] = start + relaxed.f_s[s]
        for s in range(stages - 1, -1, -1):
            if i >= counts[s, 1]:
                start = max(ready[device[s]], end.f[s, i])
                if i > 0:
                    start = max(start, end.i[s, i - 1])
                if s + 1 < stages:
                    start = max(start, end.i[s + 1, i] + relaxed.send_i_s[s + 1])
                end.i[s, i] = start + relaxed.i_s[s]
            if i >= counts[s, 2]:
                start = max(ready[device[s]], end.i[s, i])
                if i > 0:
                    start = max(start, end.w[s, i - 1])
                end.w[s, i] = start + relaxed.w_s[s]


@inner
def class_duration(relaxed: Relaxation, s: int, k: int) -> float:
    """Seconds of F (k = 0), I (1) or W (2) on stage s."""
    if k == 0:
        return float(relaxed.f_s[s])
    return float(relaxed.i_s[s] if k == 1 else relaxed.w_s[s])


@compiled
def one_machine(relaxed: Relaxation, d: int, counts: CountArray, end: Classes, tail: Classes) -> float:
    """The preemptive one-machine bound of device `d`, in seconds, for the actions that `counts` has not done.

    Inside a class heads rise and tails fall with the microbatch, so only each class's first unfinished
    action can be the one to run.
    """
    m, device = relaxed.num_microbatches, relaxed.device
    stages = np.empty(len(device), dtype=np.int64)
    position = np.empty((len(device), 3), dtype=np.int64)
    left = np.empty((len(device), 3))
    num_stages = 0
    num_left = 0
    for s in range(len(device)):
        if device[s] != d:
            continue
        stages[num_stages] = s
        num_stages += 1
        for k in range(3):
            position[s, k] = counts[s, k]
            left[s, k] = class_duration(relaxed, s, k)
        num_left += 3 * m - counts[s, 0] - counts[s, 1] - counts[s, 2]
    now, bound = 0.0, 0.0
    while num_left > 0:
        best_s, best_k, best_tail, next_release = -1, -1, -1.0, np.inf
        for index in range(num_stages):
            s = stages[index]
            for k in range(3):
                i = position[s, k]
                if i >= m:
                    continue
                if k == 0:
                    head, after = end.f[s, i] - relaxed.f_s[s], tail.f[s, i]
                elif k == 1:
                    head, after = end.i[s, i] - relaxed.i_s[s], tail.i[s, i]
                else:
                    head, after = end.w[s, i] - relaxed.w_s[s], tail.w[s, i]
                if head > now:
                    next_release = min(next_release, head)
                elif after > best_tail:
                    best_s, best_k, best_tail = s, k, after
        if best_s < 0:
            now = next_release
        elif left[best_s, best_k] > next_release - now:
            left[best_s, best_k] -= next_release - now
            now = next_release
        else:
            now += left[best_s, best_k]
            bound = max(bound, now + best_tail)
            position[best_s, best_k] += 1
            num_left -= 1
            left[best_s, best_k] = class_duration(relaxed, best_s, best_k)
    return bound
