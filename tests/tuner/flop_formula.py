"""The seconds of a machine made of arithmetic: a formula of FLOPs, unknown to every cost model."""

from quartet_plugin.model.plan import Plan
from quartet_plugin.split.layers import flops_end_loads

# Prices in FLOP-equivalents. An element of a blocking tensor-parallel all-reduce, a gradient element of the
# data-parallel one (mostly hidden or once an iteration), a boundary element between stages.
TENSOR_PARALLEL_FLOPS_PER_ELEMENT = 2000.0
DATA_PARALLEL_FLOPS_PER_ELEMENT = 200.0
PIPELINE_FLOPS_PER_ELEMENT = 500.0
# A microbatch of this many tokens runs at half the speed of an endless one.
HALF_SPEED_TOKENS = 64.0


def iteration_flops(plan: Plan) -> float:
    """FLOP-equivalents on the critical device of one iteration."""
    loads = _device_loads(plan)
    microbatches = plan.num_microbatches
    chunks = plan.layout.virtual_stages
    # The busiest device works all microbatches; filling and draining shows every other device once,
    # and interleaving shortens that by the number of chunks.
    busiest = max(loads)
    pipeline = microbatches * busiest + (sum(loads) - busiest) / chunks
    pipeline += _boundary(plan) * (plan.layout.num_stages - 1)
    return pipeline + _gradient_reduction(plan)


def _device_loads(plan: Plan) -> list[float]:
    """FLOP-equivalents of one microbatch on each pipeline rank, forward and backward."""
    shape, layout = plan.shape, plan.layout
    weights = flops_end_loads(shape, mtp_layers=plan.made_for.mtp_layers)
    loads = [0.0] * layout.pipeline_parallel
    for stage, num_layers in enumerate(plan.split.transformer_layers_per_stage):
        load = float(num_layers)
        if stage == 0:
            load += weights.embedding
        if stage == layout.num_stages - 1:
            load += weights.head
        loads[stage % layout.pipeline_parallel] += load
    tokens = layout.micro_batch_size * shape.seq_length / layout.context_parallel
    slowdown = 1.0 + HALF_SPEED_TOKENS / tokens
    recompute = 4.0 if layout.recompute == "full" else 3.0
    per_layer = recompute * layout.micro_batch_size * shape.forward_flops_per_layer
    compute = per_layer * slowdown / (layout.tensor_parallel * layout.context_parallel)
    reduction = 0.0
    if layout.tensor_parallel > 1:
        reduction = 4.0 * tokens * shape.hidden_size * TENSOR_PARALLEL_FLOPS_PER_ELEMENT
    return [load * (compute + reduction) for load in loads]


def _boundary(plan: Plan) -> float:
    tokens = plan.layout.micro_batch_size * plan.shape.seq_length
    return 2.0 * tokens * plan.shape.hidden_size * PIPELINE_FLOPS_PER_ELEMENT


def _gradient_reduction(plan: Plan) -> float:
    layout = plan.layout
    copies = layout.data_parallel * layout.context_parallel
    if copies == 1:
        return 0.0
    held = plan.shape.num_parameters / (layout.tensor_parallel * layout.pipeline_parallel)
    return 2.0 * held * (copies - 1) / copies * DATA_PARALLEL_FLOPS_PER_ELEMENT
