"""Bytes that wait for a weight gradient between an input gradient and it, by matrix product.

A weight gradient needs its product's input and the gradient of its output. Under sequence parallelism the
ranks gather the input of a column parallel product, and the output gradient of a row parallel one. The
gradient is kept whole; the input is kept whole by Transformer Engine, and as this rank's shard by Megatron's
local layers, which gather it again. Of blocks that another tensor partition cuts, both are shards.
"""

from typing import NamedTuple

from quartet_plugin.cost import compute
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.model.job_description import Experts
from quartet_plugin.partition.layer import BLOCK_OF, linears_of


class HeldProduct(NamedTuple):
    """What one product keeps of one microbatch on one rank, in bytes."""

    name: str
    input_bytes: float
    gradient_bytes: float

    @property
    def total_bytes(self) -> float:
        """Input and gradient of the output together."""
        return self.input_bytes + self.gradient_bytes


def layer_products(run: TrainingRun, *, experts: Experts | None) -> list[HeldProduct]:
    """The products of one layer, with a dense FFN or with `experts`."""
    h, tp = run.shape.hidden_size, run.layout.tensor_parallel
    held = _attention(run) if run.has_attention else []
    if not run.has_ffn:
        return held
    if run.scan is not None:
        first, second = compute.dense_products(run)
        return [*held, _column(run, "in_proj", *first), _held(run, "out_proj", second[1], second[0])]
    if experts is None:
        return _cut(run, held + _ffn(run, "fc", run.shape.ffn_hidden_size / tp))
    # A token's copies lie on the ranks of its experts, whole on each that shares one.
    arriving, width = experts.experts_per_token * run.held_expert_load, h * run.expert_shards / tp
    up, down = compute.ffn_products(h, experts.ffn_hidden_size / tp, is_gated=run.shape.gated_ffn)
    routed = [
        _held(run, name, arriving * size_in, arriving * size_out)
        for name, size_out, size_in in (("routed_fc1", up[0], width), ("routed_fc2", width, down[1]))
    ]
    if not experts.shared_ffn_hidden_size:
        return held + routed
    return held + routed + _ffn(run, "shared_fc", experts.shared_ffn_hidden_size / tp)


def _attention(run: TrainingRun) -> list[HeldProduct]:
    *columns, row = compute.products(run)
    names = ("qkv",) if run.latent is None else ("q_down", "q_up", "kv_down", "kv_up")
    held = [_column(run, name, *sizes) for name, sizes in zip(names, columns, strict=True)]
    return [*held, _held(run, "proj", row[1], row[0])]


def _cut(run: TrainingRun, held: list[HeldProduct]) -> list[HeldProduct]:
    """The products, of which those that another partition cuts keep homes alone: a device's shards."""
    partition = run.layout.tensor_partition
    if partition is None:
        return held
    scale = float(run.element_bytes) * run.tokens_per_microbatch / run.layout.tensor_parallel
    linears = {linear.name: linear.sizes for linear in linears_of(run.shape, tokens=1)}
    return [
        product
        if partition.blocks[BLOCK_OF[product.name]].form == "stock"
        else HeldProduct(product.name, scale * linears[product.name][1], scale * linears[product.name][2])
        for product in held
    ]


def head_product(run: TrainingRun) -> HeldProduct:
    """The product with the vocabulary, a local layer whatever the other layers are."""
    shape, tp = run.shape, run.layout.tensor_parallel
    return _held(run, "head", shape.hidden_size / run.sequence_shards, shape.vocab_size / tp)


def joined_product(run: TrainingRun) -> HeldProduct:
    """The product that joins two hidden states before a layer of multi-token prediction."""
    h = run.shape.hidden_size
    return _column(run, "joined", h / run.layout.tensor_parallel, 2.0 * h)


def layer_bytes(run: TrainingRun, *, experts: Experts | None) -> float:
    """Bytes that one layer keeps of one microbatch between its input and its weight gradients."""
    return sum(product.total_bytes for product in layer_products(run, experts=experts))


def _ffn(run: TrainingRun, name: str, ffn: float) -> list[HeldProduct]:
    up, down = compute.ffn_products(run.shape.hidden_size, ffn, is_gated=run.shape.gated_ffn)
    return [_column(run, f"{name}1", *up), _held(run, f"{name}2", down[1], down[0])]


def _column(run: TrainingRun, name: str, size_out: float, size_in: float) -> HeldProduct:
    shards = 1 if run.software.keeps_gathered_inputs else run.sequence_shards
    return _held(run, name, size_in / shards, size_out)


def _held(run: TrainingRun, name: str, size_in: float, size_out: float) -> HeldProduct:
    scale = float(run.element_bytes) * run.tokens_per_microbatch
    return HeldProduct(name, scale * size_in, scale * size_out)
