"""Counts the products and bytes of a state-space layer (Mamba-2) between its projections.

The scan goes by chunks of a sequence (Dao & Gu 2024, state space duality). Inside of a chunk outputs are
products as in attention, with the channels of a state in the place of keys; each chunk makes a state, and
reads the one that the chunks before it leave.

On GPUs the kernels of mamba_ssm's `mamba_split_conv1d_scan_combined` are counted, which Megatron's
`mamba_mixer.py` calls: each reads its operands once and writes its results, sums and states in fp32. The
backward makes the convolution, the states and the scores again. Without fused kernels those are counted that
stand in their place (`megatron/cpu_device/state_space.py`). All sizes are those of one rank: tensor and
context parallelism share the heads.
"""

from dataclasses import dataclass
from typing import NamedTuple

from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.cost.times import Times

# Positions of a chunk, as Megatron's mixer sets it.
CHUNK = 128
SINGLE = 4.0
# Kernels of the scan and its convolution, forward and backward: on GPUs, and one by one of each chunk.
FUSED_KERNELS = Times(6.0, 17.0, 0.0)
PLAIN_KERNELS = Times(24.0, 48.0, 0.0)


class Product(NamedTuple):
    """Equal products [m, k] x [k, n] of a microbatch: how many a forward has, and a backward."""

    forward: float
    backward: float
    m: float
    n: float
    k: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """The sizes of a rank's scan: heads of `head` channels, groups of `state` channels, and a chunk.

    `channels` are those of all heads, `keys` those of all groups, `projected` all that the first projection
    writes. `states` are the elements of the chunks' states, and `scores` those of groups' products, a token.
    """

    heads: float
    groups: float
    head: float
    state: int
    chunk: int
    channels: float
    projected: float

    @property
    def keys(self) -> float:
        return self.groups * self.state

    @property
    def states(self) -> float:
        return self.channels * self.state / self.chunk

    @property
    def scores(self) -> float:
        return self.groups * self.chunk


def _sizes(run: TrainingRun) -> _Sizes:
    scan, tp, cp = run.scan, run.layout.tensor_parallel, run.layout.context_parallel
    assert scan is not None, "only a state-space layer has a scan"
    channels, heads = scan.heads * scan.head_size / tp, scan.heads / tp
    keys = 2.0 * scan.groups * scan.state_size / tp
    return _Sizes(
        heads=heads,
        # Ranks that share the heads of a group have its keys and queries each.
        groups=max(float(cp), scan.groups / tp),
        head=scan.head_size,
        state=scan.state_size,
        chunk=min(CHUNK, run.shape.seq_length),
        channels=channels,
        projected=2.0 * channels + keys + heads,
    )


def projections(run: TrainingRun) -> list[tuple[float, float]]:
    """(out, in) sizes of the two projections."""
    sizes = _sizes(run)
    return [(sizes.projected, run.shape.hidden_size), (run.shape.hidden_size, sizes.channels)]


def products(run: TrainingRun) -> list[Product]:
    """The products of the scan; a chunk's are computed whole, as blocks on attention's diagonal are.

    Scores of queries and keys, their sums of values, the states of chunks, and the queries of states. The
    backward of the kernels makes the first and the third again; it has each gradient of a product, and that
    of the decays once more out of outputs and values.
    """
    sizes = _sizes(run)
    num_chunks = run.tokens_per_microbatch / sizes.chunk
    chunk, head, state = sizes.chunk, sizes.head, sizes.state
    heads, groups = num_chunks * sizes.heads, num_chunks * sizes.groups
    if run.software.plain_operations:
        scores = Product(heads, 2 * heads, chunk, chunk, state)
        return [
            scores,
            Product(heads, 2 * heads, chunk, head, chunk),
            Product(2 * heads, 4 * heads, chunk, head, state),
        ]
    return [
        Product(groups, 3 * groups, chunk, chunk, state),
        Product(heads, 3 * heads, chunk, head, chunk),
        Product(2 * heads, 5 * heads, chunk, head, state),
    ]


def mean_channels(run: TrainingRun) -> float:
    """The mean of a head's channels and a state's, which are attention's values and keys."""
    sizes = _sizes(run)
    return (sizes.state + sizes.head) / 2


def scan_bytes(run: TrainingRun) -> tuple[float, float]:
    """Bytes of a microbatch that the kernels of scan and convolution move, forward and backward.

    Forward: the convolution; the sums of decays; the states, their passing on, the scores, the outputs.
    Backward: convolution, sums, states, passing on and scores again; the gradients of gate and outputs, of
    the states, their passing back, of values, keys, queries and scores, of keys and queries by the scores, of
    the decays, and of the convolution.
    """
    sizes, size = _sizes(run), float(run.element_bytes)
    forward = size * (7 * sizes.channels + 8 * sizes.keys + sizes.heads)
    forward += (8.0 + 2 * size) * sizes.states + 8.0 * sizes.scores + 24.0 * sizes.heads
    backward = size * (22 * sizes.channels + 25 * sizes.keys + 2 * sizes.heads)
    backward += (24.0 + 5 * size) * sizes.states + 24.0 * sizes.scores + 64.0 * sizes.heads
    return run.tokens_per_microbatch * forward, run.tokens_per_microbatch * backward


def passes_bytes(run: TrainingRun, *, scan: float = 1.0) -> float:
    """Bytes of a microbatch's other operations in a forward: the norm, and copies to sequences and back.

    Of a single sequence nothing is copied. Without fused kernels the scan's operations count here, `scan`
    times.
    """
    sizes = _sizes(run)
    elements = 2.0 * sizes.channels
    if run.layout.micro_batch_size > 1:
        elements += 2.0 * (sizes.projected + sizes.channels)
    if run.software.plain_operations:
        elements += scan * (28 * sizes.channels + 10 * sizes.keys + 2 * sizes.heads * sizes.state)
        elements += scan * (10 * sizes.heads * sizes.chunk + 6 * sizes.states)
    return run.element_bytes * run.tokens_per_microbatch * elements


def exchanged_widths(run: TrainingRun) -> tuple[float, ...]:
    """Elements a token of each tensor that the ranks which share a sequence exchange."""
    sizes = _sizes(run)
    return (sizes.channels, sizes.channels, sizes.keys, sizes.keys, sizes.heads, sizes.channels)


def kernels(run: TrainingRun) -> Times:
    """The kernels of scan and convolution that start, by direction."""
    if not run.software.plain_operations:
        return FUSED_KERNELS
    return PLAIN_KERNELS.scaled(run.shape.seq_length / _sizes(run).chunk)


def saved_bytes(run: TrainingRun) -> float:
    """Bytes that the layer keeps of a microbatch for its backward, beside its input.

    The kernels save the first projection's output and the outputs before the gate; the norm saves its input
    and an element a group, the second projection the norm's output.
    """
    sizes, size = _sizes(run), float(run.element_bytes)
    if run.software.plain_operations:
        return run.tokens_per_microbatch * _plain_saved_bytes(sizes)
    saved = size * (sizes.projected + 3 * sizes.channels) + SINGLE * sizes.groups
    return run.tokens_per_microbatch * saved


def _plain_saved_bytes(sizes: _Sizes) -> float:
    """Bytes of a token that PyTorch's operations save, each its operands, in fp32.

    The projection's output; the convolution's, before and behind its activation; keys and queries repeated
    for each head; of the scores four tensors of a head and a mask that heads share; outputs out of the state,
    values that leave it, the sum of outputs, the activated gate, their product, the normalized outputs and
    the result; a state a chunk; and twelve elements a head.
    """
    elements = sizes.projected + 2 * (sizes.channels + 2 * sizes.keys) + 2 * sizes.heads * sizes.state
    elements += 7 * sizes.channels + sizes.states + 4 * sizes.heads * sizes.chunk + 12 * sizes.heads
    return SINGLE * (elements + sizes.groups) + sizes.chunk


def backward_bytes(run: TrainingRun) -> float:
    """Bytes of a microbatch that the backward's kernels hold at once.

    They hold the convolved elements with their gradients, the gradients of the projection's output and of the
    outputs before the gate, states and scores with their gradients in fp32, and states with their gradients
    once more in the layers' precision.
    """
    sizes, size = _sizes(run), float(run.element_bytes)
    convolved = sizes.channels + 2 * sizes.keys
    held = size * (2 * convolved + sizes.projected + sizes.channels + 2 * sizes.states)
    return run.tokens_per_microbatch * (held + 2 * SINGLE * (sizes.states + sizes.scores))
