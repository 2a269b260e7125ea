"""The scan of state-space layers: products and bytes written out, and what autograd saves of operations."""

from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.cost import state_space
from quartet_plugin.cost.compute import Rates, layer_times
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.held_bytes import layer_products
from quartet_plugin.cost.iteration.step import tensors_of_layer
from quartet_plugin.cost.iteration.terms import layer_parts
from quartet_plugin.cost.layer_kinds import Scan, scan_of
from quartet_plugin.cost.memory import layer_activation_bytes, peak_memory, stage_activations
from quartet_plugin.cost.run import ON_CPU, TrainingRun
from quartet_plugin.model.shape import LayerKinds
from tests.cost.test_layer_kinds import job, layout

# The state-space layers of Nemotron 3 Nano.
HEADS, HEAD, GROUPS, STATE, CHUNK = 64, 64, 8, 128, 128
CHANNELS, KEYS = HEADS * HEAD, GROUPS * STATE
KINDS = LayerKinds(
    attention=0,
    mlp=0,
    experts=0,
    state_space=0,
    state_space_heads=HEADS,
    state_space_groups=GROUPS,
    projected_size=3 * CHANNELS + 2 * KEYS + HEADS,
)
HIDDEN, TOKENS = 2688, 8192


def run(kinds: LayerKinds = KINDS, **changes: Any) -> TrainingRun:
    """A layer of state-space layers on eight devices."""
    made = job(hidden_size=HIDDEN, num_attention_heads=32, seq_length=TOKENS)
    shape = replace(made.shape, num_layers=8, layer_kinds=kinds.with_pattern(8 * "M"))
    usual = replace(layout(), tensor_parallel=1, data_parallel=4, sequence_parallel=False)
    whole = replace(made, shape=shape).run(shape, replace(usual, **changes), (4, 4))
    return whole.runs_by_kind[0][0]


def on_cpu(made: TrainingRun) -> TrainingRun:
    return replace(made, software=ON_CPU, half="fp32", matmul="fp32")


def test_sizes_are_those_of_the_job_else_megatrons_defaults() -> None:
    assert scan_of(KINDS) == Scan(heads=64, groups=8, head_size=64.0, state_size=128)
    wide = replace(KINDS, state_size=256, projected_size=KINDS.projected_size + 2 * GROUPS * 128)
    assert scan_of(wide) == Scan(heads=64, groups=8, head_size=64.0, state_size=256)
    unsaid = replace(KINDS, state_space_heads=0, state_space_groups=0)
    assert scan_of(unsaid) == scan_of(KINDS)
    assert scan_of(replace(unsaid, projected_size=8)).head_size == 1.0


def test_products_are_those_of_the_chunked_scan() -> None:
    """Of a token a head: the state of its chunk, the state before it, and its row of scores times values."""
    made = run()
    each = [(2 * part.m * part.n * part.k, part) for part in state_space.products(made)]
    forward = sum(flops * part.forward for flops, part in each) / TOKENS
    backward = sum(flops * part.backward for flops, part in each) / TOKENS
    of_state, of_values, of_scores = 2 * HEAD * STATE, 2 * CHUNK * HEAD, 2 * CHUNK * STATE
    assert forward == HEADS * (2 * of_state + of_values) + GROUPS * of_scores
    assert backward == HEADS * (5 * of_state + 3 * of_values) + 3 * GROUPS * of_scores
    assert state_space.projections(made) == [
        (2 * CHANNELS + 2 * KEYS + HEADS, HIDDEN),
        (HIDDEN, CHANNELS),
    ]
    # A sequence shorter than a chunk is one.
    short = replace(made, shape=replace(made.shape, seq_length=32))
    assert {part.m for part in state_space.products(short)} == {32}


def test_bytes_are_those_of_the_kernels() -> None:
    """In bf16: what each reads and writes once, states and scores of groups in fp32."""
    states, scores = CHANNELS * STATE / CHUNK, GROUPS * CHUNK
    forward, backward = state_space.scan_bytes(run())
    assert forward / TOKENS == 2 * (7 * CHANNELS + 8 * KEYS + HEADS) + 12 * states + 8 * scores + 24 * HEADS
    assert backward > 2.5 * forward
    assert state_space.passes_bytes(run()) / TOKENS == 2 * 2 * CHANNELS
    # Several sequences are copied apart, and back.
    copied = state_space.passes_bytes(run(micro_batch_size=2)) / (2 * TOKENS)
    assert copied == 2 * (2 * CHANNELS + 2 * (3 * CHANNELS + 2 * KEYS + HEADS))


def test_a_layer_takes_its_projections_and_its_scan() -> None:
    constants = fitted()
    made = run()
    rates = Rates(made, constants)
    seconds = layer_times(made, constants, rates, experts=None)
    bare = layer_times(replace(made, scan=None), constants, rates, experts=None)
    assert seconds.gemm.total_s == pytest.approx(bare.gemm.total_s, rel=0.1)
    moved = state_space.scan_bytes(made)
    least = [num_bytes * constants.elementwise / rates.memory for num_bytes in moved]
    assert seconds.elementwise.forward_s > least[0]
    assert seconds.elementwise.input_grad_s > least[1]
    assert seconds.total.total_s > 1.2 * bare.total.total_s
    assert seconds.attention.total_s == 0.0
    # Recompute of attention and of MLPs repeats nothing of it.
    modules = ("core_attn", "mlp", "moe")
    again = run(recompute="selective")
    again = replace(again, recomputed_modules=modules)
    assert layer_times(again, constants, rates, experts=None).recompute_s == 0.0
    assert stage_activations(again)[0].tolist() == stage_activations(made)[0].tolist()
    # A wider state costs more, another one of as many tokens as much.
    wide = layer_times(run(replace(KINDS, state_size=64)), constants, rates, experts=None)
    assert wide.elementwise.total_s != seconds.elementwise.total_s


@pytest.mark.parametrize("tp", [1, 2])
def test_tensor_parallel_ranks_share_the_heads(tp: int) -> None:
    whole, shared = run(), run(tensor_parallel=tp, data_parallel=4 // tp)
    for quantity in (state_space.saved_bytes, state_space.backward_bytes):
        assert quantity(shared) == pytest.approx(quantity(whole) / tp)
    part = [num_bytes / tp for num_bytes in state_space.scan_bytes(whole)]
    assert state_space.scan_bytes(shared) == pytest.approx(part)


def test_ranks_that_share_sequences_exchange_them_for_heads() -> None:
    """More of them than groups repeat the groups' keys and queries."""
    constants = fitted()
    parts = {
        cp: layer_parts(made, constants, Rates(made, constants))
        for cp, made in ((cp, run(context_parallel=cp, data_parallel=4 // cp)) for cp in (1, 2))
    }
    assert parts[1]["cp_comm"].total_s == 0.0
    assert parts[2]["cp_comm"].forward_s == parts[2]["cp_comm"].input_grad_s > 0.0
    few = replace(KINDS, state_space_groups=1, projected_size=3 * CHANNELS + 2 * STATE + HEADS)
    alone, two = (
        state_space.exchanged_widths(run(few, context_parallel=cp, data_parallel=4 // cp)) for cp in (1, 2)
    )
    assert two[2] == 2 * alone[2]
    assert two[0] == alone[0]


def test_a_layer_keeps_what_the_kernels_save() -> None:
    """The projection's output, outputs before the gate, the norm's input and output; and the layer's norm."""
    made = run()
    inner = 2 * (2 * CHANNELS + 2 * KEYS + HEADS) + 2 * 3 * CHANNELS + 4 * GROUPS
    assert layer_activation_bytes(made, experts=None) == TOKENS * (inner + 2 * 2 * HIDDEN)
    assert sum(product.total_bytes for product in layer_products(made, experts=None)) == pytest.approx(
        2 * TOKENS * (2 * HIDDEN + 3 * CHANNELS + 2 * KEYS + HEADS)
    )
    wide = replace(KINDS, state_size=256, projected_size=KINDS.projected_size + 2 * GROUPS * 128)
    assert peak_memory(run(wide)).temporary_bytes > peak_memory(made).temporary_bytes
    assert tensors_of_layer(made) == tensors_of_layer(replace(made, scan=None)) + 6


def test_plain_operations_of_a_processor_are_counted_by_chunks() -> None:
    constants, made = fitted(), on_cpu(run())
    rates = Rates(made, constants)
    seconds = layer_times(made, constants, rates, experts=None)
    products_s = sum(
        part.forward * rates.half_gemm_s(part.m, part.n, part.k) for part in state_space.products(made)
    )
    assert seconds.elementwise.forward_s > products_s
    assert state_space.kernels(made).forward_s == 24 * TOKENS / CHUNK
    assert state_space.kernels(run()).forward_s == 6


@pytest.mark.parametrize("sizes", [(4, 32, 2, 32), (8, 8, 2, 16)])
def test_plain_operations_save_what_autograd_saves(sizes: tuple[int, int, int, int]) -> None:
    """The scan, its convolution and the norm of the CPU device, by the storages that autograd holds."""
    import torch

    from quartet_plugin.megatron.cpu_device.state_space import GroupedNorm, split_conv_scan

    heads, head, groups, state = sizes
    channels, keys, length = heads * head, groups * state, 256
    kinds = replace(
        KINDS,
        state_space_heads=heads,
        state_space_groups=groups,
        state_size=state,
        projected_size=3 * channels + 2 * keys + heads,
    )
    made = on_cpu(run(kinds))
    made = replace(made, shape=replace(made.shape, seq_length=length))
    into, out_of = torch.nn.Linear(16, 2 * channels + 2 * keys + heads), torch.nn.Linear(channels, 16)
    norm = GroupedNorm(
        channels,
        eps=1e-5,
        group_size=channels // groups,
        norm_before_gate=False,
        device=None,
        dtype=torch.float32,
    )
    weight, bias, decay = (
        torch.randn(*size, requires_grad=True)
        for size in ((channels + 2 * keys, 4), (channels + 2 * keys,), (heads,))
    )
    # Weights, and the layer's input, which its norm keeps.
    inputs = torch.randn(1, length, 16)
    others = {
        tensor.untyped_storage().data_ptr()
        for tensor in (inputs, weight, bias, decay, *into.parameters(), *out_of.parameters(), norm.weight)
    }
    saved: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scanned = split_conv_scan(
            into(inputs),
            weight,
            bias,
            decay,
            -decay.exp(),
            decay,
            state_space.CHUNK,
            activation="silu",
            headdim=head,
            ngroups=groups,
        )
        out_of(norm(scanned)).sum().backward()
    num_bytes = sum(
        tensor.untyped_storage().nbytes() for pointer, tensor in saved.items() if pointer not in others
    )
    assert num_bytes == pytest.approx(state_space.saved_bytes(made), rel=0.02)
