"""The compiled part of `rules.order_of_slots`."""

import numpy as np

from quartet_plugin.model.costs import IntArray
from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.schedule.compilation import compiled

_FORWARD, _INPUT, _WEIGHT = int(ActionKind.F), int(ActionKind.I), int(ActionKind.W)
_FULL = int(ActionKind.B)
# Forwards, backwards and weight gradients are counted apart; I and B are the same backward.
_FORWARDS, _BACKWARDS, _WEIGHTS = 0, 1, 2


@compiled
def numbered_slots(slots: IntArray, base: IntArray, count: IntArray) -> IntArray:
    """The action codes of one device's `slots`, with the actions that the slots do not reach.

    A slot is `chunk * 4 + kind`; below 0 it is the weight gradient that has waited longest. `base[chunk]` is
    the code of the forward of the chunk's first microbatch, `count[chunk]` the number of its microbatches.
    """
    num_slots, num_chunks = len(slots), len(base)
    done = np.zeros((3, num_chunks), dtype=np.int64)
    # Codes in order, -1 for dropped slots, and behind them what is left of each chunk.
    body = np.full(num_slots + 2 * count.sum(), -1, dtype=np.int64)
    has_oldest = splits = False
    for index in range(num_slots):
        slot = slots[index]
        if slot < 0:
            has_oldest = True
            continue
        chunk, kind = slot >> 2, slot & 3
        splits |= kind == _INPUT
        row = _FORWARDS if kind == _FORWARD else _WEIGHTS if kind == _WEIGHT else _BACKWARDS
        number = done[row, chunk]
        if number < count[chunk]:
            done[row, chunk] = number + 1
            body[index] = base[chunk] + 4 * number + kind
    num = num_slots
    backward = _INPUT if splits else _FULL
    for chunk in range(num_chunks):
        for number in range(done[_FORWARDS, chunk], count[chunk]):
            body[num] = base[chunk] + 4 * number + _FORWARD
            num += 1
        for number in range(done[_BACKWARDS, chunk], count[chunk]):
            body[num] = base[chunk] + 4 * number + backward
            num += 1
    weights = np.empty(num, dtype=np.int64)
    num_weights = 0
    for index in range(num):
        if body[index] >= 0 and body[index] & 3 == _INPUT:
            weights[num_weights] = body[index] + (_WEIGHT - _INPUT)
            num_weights += 1
    order = np.empty(num + num_weights, dtype=np.int64)
    num_ordered = num_taken = 0
    for index in range(num):
        code = body[index]
        if index < num_slots and slots[index] < 0 and num_taken < num_weights:
            code = weights[num_taken]
            num_taken += 1
        if code >= 0:
            order[num_ordered] = code
            num_ordered += 1
    for index in range(num_taken, num_weights):
        is_left = has_oldest
        for chunk in range(num_chunks):
            number = (weights[index] - base[chunk]) >> 2
            is_left |= done[_WEIGHTS, chunk] <= number < count[chunk]
        if is_left:
            order[num_ordered] = weights[index]
            num_ordered += 1
    return order[:num_ordered]
