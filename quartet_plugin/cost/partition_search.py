"""A transformer layer's operators as a graph of partition sequences with costs, and the cheapest of them.

Seconds of an operator: all-reduces over the bits that a phase sums over, and what its products do not hide
of the rings; every sequence computes equally much on each device. Seconds of an edge: the part of the tensor
that a device needs and does not hold, forward and backward (PrimePar's Eq. 8 and 9). The slower links count
as soon as a bit of the group, or for an edge any bit, tells domains of fast links apart. Memory is free.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from quartet_plugin.cost.partitions import SCALE_OUT, SCALE_UP, PartitionRates
from quartet_plugin.errors import PlanError
from quartet_plugin.partition.search import CostMatrix, OperatorGraph, cheapest_states
from quartet_plugin.partition.sequences import (
    RING_SIDES,
    Sequence,
    SliceLayout,
    num_bits,
    overlaps,
    pieces_of,
    sequences,
    slice_layout,
    summed_bits,
)
from quartet_plugin.partition.table import Phase

_LINEAR = ("B", "M", "N", "K", "P2", "P4")
_PLAIN = ("B", "M", "K")
# Attention keeps sequences whole: a device has whole heads.
_HEADS = ("B", "K")
MAX_BITS = 5
# Tensors of each phase's product by their dimensions: two factors and the result.
_DIMS = {
    Phase.F: (("B", "M", "N"), ("N", "K"), ("B", "M", "K")),
    Phase.B: (("B", "M", "K"), ("N", "K"), ("B", "M", "N")),
    Phase.G: (("B", "M", "N"), ("B", "M", "K"), ("N", "K")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOperator:
    """An operator with its sizes: `inner` columns of the input, `columns` of the output.

    A linear has a weight and may be cut along N and by rings; `multiple` is what pieces of K must divide.
    """

    name: str
    letters: tuple[str, ...]
    inner: int
    columns: int
    multiple: int

    @property
    def is_linear(self) -> bool:
        """Whether the operator has a weight."""
        return "N" in self.letters

    @property
    def input_dims(self) -> tuple[str, str, str]:
        """The dimensions of its input."""
        return ("B", "M", "N") if self.is_linear else ("B", "M", "K")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSearch:
    """The cheapest sequences of a layer: operator -> sequence, and its seconds beside products."""

    sequences: dict[str, Sequence]
    cost_s: float
    num_states: int


def layer_operators(*, hidden: int, num_heads: int) -> tuple[LayerOperator, ...]:
    """The 13 operators of PrimePar's Fig. 6, from a layer's input to its second residual."""

    def plain(name: str) -> LayerOperator:
        return LayerOperator(name=name, letters=_PLAIN, inner=hidden, columns=hidden, multiple=hidden)

    def attention(name: str) -> LayerOperator:
        return LayerOperator(name=name, letters=_HEADS, inner=hidden, columns=hidden, multiple=num_heads)

    def linear(name: str, inner: int, columns: int, multiple: int) -> LayerOperator:
        return LayerOperator(name=name, letters=_LINEAR, inner=inner, columns=columns, multiple=multiple)

    return (
        plain("input"),
        plain("norm1"),
        linear("qkv", hidden, 3 * hidden, num_heads),
        attention("scores"),
        attention("softmax"),
        attention("context"),
        linear("proj", hidden, hidden, hidden),
        plain("add1"),
        plain("norm2"),
        linear("fc1", hidden, 4 * hidden, 4 * hidden),
        LayerOperator(
            name="activation", letters=_PLAIN, inner=4 * hidden, columns=4 * hidden, multiple=4 * hidden
        ),
        linear("fc2", 4 * hidden, hidden, hidden),
        plain("add2"),
    )


# The columns that an edge carries, in hidden sizes; qkv sends values to the context past the scores.
EDGES = {
    (0, 1): 1,
    (1, 2): 1,
    (2, 3): 2,
    (2, 5): 1,
    # Scores and weights of attention stay with their heads: [heads, sequence, sequence] is never moved.
    (3, 4): 1,
    (4, 5): 1,
    (5, 6): 1,
    (6, 7): 1,
    (0, 7): 1,
    (7, 8): 1,
    (8, 9): 1,
    (9, 10): 4,
    (10, 11): 4,
    (11, 12): 1,
    (7, 12): 1,
}


def search_layer(
    *, hidden: int, num_heads: int, batch: int, tokens: int, num_devices: int, rates: PartitionRates
) -> LayerSearch:
    """The cheapest sequence of every operator of a layer, `batch` samples of `tokens` tokens a microbatch.

    Raises PlanError for a number of devices that is no power of two up to 32, or sizes that nothing divides.
    """
    bits = num_devices.bit_length() - 1
    if num_devices != 2**bits or not 1 <= bits <= MAX_BITS:
        raise PlanError(f"{num_devices} devices: must be a power of two from 2 to {2**MAX_BITS}")
    operators = layer_operators(hidden=hidden, num_heads=num_heads)
    states = [_states(operator, batch, tokens, bits) for operator in operators]
    graph = OperatorGraph(
        [
            np.array([operator_s(operator, state, batch * tokens, bits, rates) for state in of_operator])
            for operator, of_operator in zip(operators, states, strict=True)
        ],
        {
            (i, j): edge_costs(
                states[i],
                operators[j],
                states[j],
                elements=batch * tokens * hidden * width,
                bits=bits,
                rates=rates,
            )
            for (i, j), width in EDGES.items()
        },
    )
    cost, chosen = cheapest_states(graph)
    return LayerSearch(
        sequences={
            operator.name: of_operator[index]
            for operator, of_operator, index in zip(operators, states, chosen, strict=True)
        },
        cost_s=cost,
        num_states=max(map(len, states)),
    )


def operator_s(
    operator: LayerOperator, sequence: Sequence, tokens: int, bits: int, rates: PartitionRates
) -> float:
    """Seconds of an operator's all-reduces and exposed rings in all phases; zero without a weight."""
    if not operator.is_linear:
        return 0.0
    pieces = pieces_of(sequence)
    # Batch and tokens together are M.
    sizes = {"B": 1.0, "M": float(tokens), "N": float(operator.inner), "K": float(operator.columns)}
    product_s = 2 * tokens * operator.inner * operator.columns / 2**bits / rates.flops_per_s
    seconds = 0.0
    for phase in Phase:
        blocks = [
            rates.element_bytes * prod(sizes[dim] / pieces[dim] for dim in dims) for dims in _DIMS[phase]
        ]
        summed = summed_bits(sequence, phase)
        if summed:
            group = 2 ** len(summed)
            bandwidth = _bandwidth(summed, bits, rates)
            seconds += 2 * (group - 1) / group * blocks[2] / bandwidth + 2 * rates.hop_s
        seconds += _exposed_rings_s(phase, sequence, blocks, product_s, bits, rates)
    return seconds


def _exposed_rings_s(
    phase: Phase,
    sequence: Sequence,
    blocks: list[float],
    product_s: float,
    bits: int,
    rates: PartitionRates,
) -> float:
    """What products do not hide: both factors in all steps but the last, W or dW in that of B and G."""
    seconds, position = 0.0, 0
    for letter in sequence:
        width = num_bits(letter)
        if letter in RING_SIDES:
            side = RING_SIDES[letter]
            bandwidth = _bandwidth(tuple(range(position, position + width)), bits, rates)
            ring_s = (blocks[0] + blocks[1]) / bandwidth + rates.hop_s
            seconds += (side - 1) * max(0.0, ring_s - product_s / side)
            if phase is not Phase.F:
                last_s = blocks[1 if phase is Phase.B else 2] / bandwidth + rates.hop_s
                seconds += max(0.0, last_s - product_s / side)
        position += width
    return seconds


def edge_costs(
    before_states: list[Sequence],
    after: LayerOperator,
    after_states: list[Sequence],
    *,
    elements: int,
    bits: int,
    rates: PartitionRates,
) -> CostMatrix:
    """Seconds of redistributing a tensor of `elements` and its gradient, [state before, state after]."""
    moved = _redistributed(tuple(before_states), tuple(after_states), after.input_dims, bits)
    return moved * elements * rates.element_bytes / _bandwidth(tuple(range(bits)), bits, rates)


@lru_cache(maxsize=32)
def _redistributed(
    before: tuple[Sequence, ...], after: tuple[Sequence, ...], input_dims: tuple[str, str, str], bits: int
) -> CostMatrix:
    """The parts of a tensor and of its gradient that devices must receive; edges of a layer are alike."""
    output = ("B", "M", "K")
    forward = _missing(
        [slice_layout(state, Phase.F, output, is_end=True, bits=bits) for state in before],
        [slice_layout(state, Phase.F, input_dims, is_end=False, bits=bits) for state in after],
    )
    backward = _missing(
        [slice_layout(state, Phase.B, input_dims, is_end=True, bits=bits) for state in after],
        [slice_layout(state, Phase.B, output, is_end=False, bits=bits) for state in before],
    )
    return forward + backward.T


def _missing(before: list[SliceLayout], after: list[SliceLayout]) -> CostMatrix:
    """The part of a tensor that a device must receive, computed once for each pair of different layouts."""
    first, rows = _different(before)
    second, columns = _different(after)
    needed = np.array([1 / prod(layout.pieces) for layout in second])
    missing = np.maximum(0.0, needed - overlaps(first, second))
    return np.asarray(missing[np.ix_(rows, columns)], dtype=np.float64)


def _different(layouts: list[SliceLayout]) -> tuple[list[SliceLayout], list[int]]:
    places: dict[tuple[tuple[int, ...], bytes], int] = {}
    different: list[SliceLayout] = []
    for layout in layouts:
        if layout.key not in places:
            places[layout.key] = len(different)
            different.append(layout)
    return different, [places[layout.key] for layout in layouts]


def _states(operator: LayerOperator, batch: int, tokens: int, bits: int) -> list[Sequence]:
    """The sequences whose pieces divide the sizes. Raises PlanError where there are none."""
    sizes = {"B": batch, "M": tokens, "N": operator.inner, "K": operator.multiple}
    states = [
        sequence
        for sequence in sequences(operator.letters, bits)
        if all(sizes[dim] % count == 0 for dim, count in pieces_of(sequence).items())
    ]
    if not states:
        raise PlanError(f"{operator.name}: no sequence divides its sizes among {2**bits} devices")
    return states


def _bandwidth(group: tuple[int, ...], bits: int, rates: PartitionRates) -> float:
    """The bandwidth inside a group of devices that differ in these bits, of the most significant first."""
    inside = rates.devices_per_domain.bit_length() - 1
    return rates.bytes_per_s[SCALE_OUT if min(group) < bits - inside else SCALE_UP]
