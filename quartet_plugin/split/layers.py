"""Axis 2: how many transformer layers each stage holds.

A split is a tuple of layer counts, one a stage in model order; embedding and head are not counted. Where they
are counted, as in a cost table, the tuple holds entries (`split.entries`); `entries_of` and `layers_of`
convert between the two.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from quartet_plugin.model.shape import ModelShape

# The loads of the ends are rounded to this part of a layer, so that nearly equal plans are one plan.
QUANTUM = 1.0 / 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndLoads:
    """The loads of embedding and head, in transformer layers.

    A load below 0 stands for an end's device that can take more than its share of the layers. `mtp` is that
    of multi-token prediction on the stage before the last one, which then has the head alone; None where the
    last stage has both, whose load `head` is.
    """

    embedding: float = 0.0
    head: float = 0.0
    mtp: float | None = None

    def rounded(self) -> "EndLoads":
        """The nearest multiples of `QUANTUM`."""
        return EndLoads(
            embedding=round(self.embedding / QUANTUM) * QUANTUM,
            head=round(self.head / QUANTUM) * QUANTUM,
            mtp=None if self.mtp is None else round(self.mtp / QUANTUM) * QUANTUM,
        )


def flops_end_loads(
    shape: ModelShape, *, mtp_layers: int | None = None, is_mtp_before_last: bool = False
) -> EndLoads:
    """The end loads by forward FLOPs; the embedding's is the FLOPs that its memory traffic stands for.

    Each of `mtp_layers` predicts a further token beside the head: a layer behind the product that joins two
    hidden states, and the head once more. With `is_mtp_before_last` the layers and their products are `mtp`,
    and `head` counts 1 + `mtp_layers` heads; all in transformer layers.
    """
    per_layer, count = shape.forward_flops_per_layer, mtp_layers or 0
    lookup = 20.0 * shape.seq_length * shape.hidden_size
    head = shape.forward_flops_of_head
    joined = _joined_flops(shape)
    if is_mtp_before_last:
        return EndLoads(
            embedding=lookup / per_layer,
            head=(1 + count) * head / per_layer,
            mtp=count * flops_mtp_load(shape),
        )
    return EndLoads(
        embedding=lookup / per_layer, head=(head + count * (per_layer + joined + head)) / per_layer
    )


def flops_mtp_load(shape: ModelShape) -> float:
    """A layer of multi-token prediction by forward FLOPs, in transformer layers, without its head."""
    return 1.0 + _joined_flops(shape) / shape.forward_flops_per_layer


def _joined_flops(shape: ModelShape) -> float:
    """Forward FLOPs of the product that joins two hidden states."""
    return 4.0 * shape.seq_length * shape.hidden_size**2


def entries_of(layers: Sequence[int], *, embedding: bool = True, head: bool = True) -> tuple[int, ...]:
    """The split with embedding and head counted on the stages that hold them."""
    entries = list(layers)
    entries[0] += embedding
    entries[-1] += head
    return tuple(entries)


def layers_of(entries: Sequence[int]) -> tuple[int, ...]:
    """The inverse of `entries_of` for a model with both embedding and head."""
    layers = list(entries)
    layers[0] -= 1
    layers[-1] -= 1
    return tuple(layers)


def even_split(num_layers: int, *, num_stages: int, is_mtp_before_last: bool = False) -> tuple[int, ...]:
    """The even split: stage s of S holds floor((s+1) L / S) - floor(s L / S) layers.

    With multi-token prediction on the stage before the last one, the stages before the last one share them.
    """
    if is_mtp_before_last:
        return (*even_split(num_layers, num_stages=num_stages - 1), 0)
    return tuple(
        (stage + 1) * num_layers // num_stages - stage * num_layers // num_stages
        for stage in range(num_stages)
    )


@lru_cache(maxsize=4096)
def even_split_with_ends(num_layers: int, *, num_stages: int, embedding: int, head: int) -> tuple[int, ...]:
    """The even split when the embedding counts as `embedding` whole layers and the head as `head`.

    Leftover layers go to the stages before the last one, which hold fewer microbatches than the first ones.
    `split_for_end_loads` takes fractions of a layer and balances devices instead of stages.
    """
    if num_stages == 1:
        return (num_layers,)
    base, rest = divmod(num_layers + embedding + head, num_stages)
    counts = [base] * num_stages
    for stage in [*range(num_stages - 2, -1, -1), num_stages - 1][:rest]:
        counts[stage] += 1
    counts[0], counts[-1] = counts[0] - embedding, counts[-1] - head
    for end in (0, -1):
        while counts[end] < 0:
            # The end alone is more than a stage's share: the other stages carry fewer layers.
            counts[counts.index(max(counts))] -= 1
            counts[end] += 1
    while min(counts[1:-1], default=1) == 0 and max(counts) > 1:
        counts[counts.index(max(counts))] -= 1
        counts[1 + counts[1:-1].index(0)] += 1
    while 0 in counts[1:-1] and max(counts[0], counts[-1]) > 0:
        # Of as many stages as layers, or more, the ends are empty first.
        counts[0 if counts[0] else -1] -= 1
        counts[1 + counts[1:-1].index(0)] += 1
    return tuple(counts)


def split_for_end_loads(
    num_layers: int,
    *,
    num_devices: int,
    num_chunks: int = 1,
    end_loads: EndLoads,
    placement: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The split of equal layers that balances devices under `end_loads`.

    Stage k lies on device `placement[k]`, by default on k % num_devices.

    Layers go one by one to the least loaded device, ties to the inner stages, then to the first. As the end
    loads vary, all splits that are optimal for some end loads appear; for two stages these are all splits.
    Only the first and the last stage may end up empty. `num_layers` must fill the inner stages. With
    `end_loads.mtp` the last stage has no layer, and the one before it may have none.
    """
    num_stages = num_devices * num_chunks
    device = (stage % num_devices for stage in range(num_stages)) if placement is None else placement
    return _split_for_end_loads(num_layers, num_devices, end_loads, tuple(device))


@lru_cache(maxsize=4096)
def _split_for_end_loads(
    num_layers: int, num_devices: int, end_loads: EndLoads, device: tuple[int, ...]
) -> tuple[int, ...]:
    """The split for stages on `device` [num_stages]."""
    loads, last_load = [0.0] * num_devices, end_loads.head
    if end_loads.mtp is not None:
        loads[device[-1]] += end_loads.head
        device, last_load = device[:-1], end_loads.mtp
    # A last stage with the head alone follows the others.
    last_stage = () if end_loads.mtp is None else (0,)
    if len(device) == 1:
        return (num_layers, *last_stage)
    num_stages = len(device)
    inner = range(1, num_stages - 1)
    assert num_layers >= len(inner), "fewer layers than inner stages"
    counts = [0] * num_stages
    for stage in inner:
        counts[stage] = 1
    loads[device[0]] += end_loads.embedding
    loads[device[-1]] += last_load
    fixed = {0: max(0.0, end_loads.embedding), num_stages - 1: max(0.0, last_load)}
    # Of each device its stages, those with the least to do first.
    stages_of: list[list[tuple[float, int, int]]] = [[] for _ in range(num_devices)]
    for place, stage in enumerate([*inner, *sorted({0, num_stages - 1})]):
        loads[device[stage]] += counts[stage]
        heapq.heappush(stages_of[device[stage]], (counts[stage] + fixed.get(stage, 0.0), place, stage))
    devices = [(loads[number], *stages[0][:2], number) for number, stages in enumerate(stages_of) if stages]
    heapq.heapify(devices)
    for _ in range(num_layers - len(inner)):
        load, _, _, number = devices[0]
        stages = stages_of[number]
        _, place, stage = stages[0]
        counts[stage] += 1
        heapq.heapreplace(stages, (counts[stage] + fixed.get(stage, 0.0), place, stage))
        heapq.heapreplace(devices, (load + 1.0, *stages[0][:2], number))
    return (*counts, *last_stage)


def end_loads_for_split(split: Sequence[int], *, num_devices: int, num_chunks: int = 1) -> EndLoads | None:
    """End loads from which `split_for_end_loads` makes `split`; None where the grid of guesses has none."""
    num_layers = sum(split)
    if len(split) == 2:
        first = (0.0, float(split[0] - split[-1]))
    else:
        inner = split[1:-1]
        usual = sum(inner) / len(inner) if inner else sum(split) / len(split)
        first = (usual - split[0], usual - split[-1])
    offsets = (0.0, 0.25, -0.25, 0.5, -0.5, 1.0, -1.0, 1.5, -1.5)
    grid = [(first[0] + a, first[1] + b) for a in offsets for b in offsets]
    grid += [(a / 2, b / 2) for a in range(-8, 9) for b in range(-8, 2 * min(num_layers, 24) + 1)]
    for embedding, head in grid:
        if max(abs(embedding), abs(head)) > num_layers:
            continue
        end_loads = EndLoads(embedding=embedding, head=head)
        if split_for_end_loads(
            num_layers, num_devices=num_devices, num_chunks=num_chunks, end_loads=end_loads
        ) == tuple(split):
            return end_loads
    return None


def is_legal_split(
    split: Sequence[int], *, num_layers: int, num_stages: int, is_mtp_before_last: bool = False
) -> bool:
    """Whether the split has one count a stage, holds all layers, and leaves no inner stage empty.

    With multi-token prediction on the stage before the last one that may be empty, and the last one is.
    """
    last = num_stages - (2 if is_mtp_before_last else 1)
    return (
        len(split) == num_stages
        and sum(split[: last + 1]) == sum(split) == num_layers
        and all(count >= 0 for count in split)
        and all(count > 0 for count in split[1:last])
    )
