"""The host's time of a layer with experts, and what of it the device waits for.

The host starts a layer's operations one after the other while the device executes those before. In each
forward it reads the numbers of tokens of the experts from the device, so that it is never a layer ahead: a
pass of a layer takes the longer of the device's time and the host's. A dense layer has few operations, and
its device needs longer for them.

Counted are operations of Megatron-Core with Transformer Engine: PyTorch's and the library's calls, each of
which starts a kernel, allocates or does both. Its grouped product is one call to cuBLAS an expert.
"""

from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.cost.times import Times
from quartet_plugin.model.job_description import Experts

# Numbers of operations or kernels by direction: their seconds where each takes one.
Counts = Times

# Operations of a layer beside its experts, as PyTorch's dispatcher counts them in Megatron-Core 0.19 without
# views, which are as many again: 76 in the forward (norms, attention, router, permutations, residuals), 64 in
# the backward and a hook of each weight.
NUM_LAYER_OPERATIONS = Counts(75.0, 60.0, 15.0)
# Four parts of a layer that run beside another microbatch's: wait for an event, enter a stream, detach and
# keep the inputs, leave, record the event; in the backward also start autograd and take the gradients.
NUM_OVERLAP_OPERATIONS = Counts(4 * 8.0, 4 * 10.0, 0.0)
# An expert's product: choose cuBLAS's algorithm and start it; of a weight's gradient also make an empty one
# for autograd, and call the hook that marks the sum as ready.
NUM_PRODUCT_OPERATIONS = Counts(2.0, 2.0, 4.0)
# A scale a tensor: find the largest value, make the scale, cast, and make the tensor of both; of the input
# and of the output's gradient.
NUM_TENSOR_SCALE_OPERATIONS = Counts(4.0, 4.0, 0.0)
# A scale a block: cast, make the tensor, and bring both operands' scales into the order of each product.
NUM_BLOCK_SCALE_OPERATIONS = Counts(4.0, 4.0, 2.0)
# An expert's FFN: into the hidden width and out of it.
NUM_PRODUCTS_OF_EXPERT = 2
# Of an expert that is computed alone: beside its products, as PyTorch's dispatcher counts them in
# `SequentialMLP` without views (a gated activation and the router's weight, and their backward).
NUM_ALONE_OPERATIONS = Counts(4.0, 8.0, 0.0)
# Kernels of an expert alone that start one after the other: two products and the activation.
NUM_ALONE_KERNELS = Counts(3.0, 3.0, 2.0)


def operations(run: TrainingRun, experts: Experts) -> Counts:
    """The host's operations in the passes of a layer with experts; those replayed from graphs are none."""
    if run.software.is_graphed:
        return Counts()
    local = max(1.0, experts.num_experts / run.layout.expert_parallel)
    product = NUM_PRODUCT_OPERATIONS
    if run.has_narrow_products:
        product = product.plus(
            NUM_BLOCK_SCALE_OPERATIONS if run.has_block_scales else NUM_TENSOR_SCALE_OPERATIONS
        )
    # Experts alone have their part of the operations of a layer with attention.
    share = run.kernel_ratio(has_experts=True) / 2
    layer = NUM_LAYER_OPERATIONS.scaled((1.0 - run.software.graphed_share) * share)
    if run.software.expert_overlap:
        layer = layer.plus(NUM_OVERLAP_OPERATIONS)
    alone = Counts() if run.software.grouped_experts else NUM_ALONE_OPERATIONS.scaled(local)
    return layer.plus(product.scaled(NUM_PRODUCTS_OF_EXPERT * local)).plus(alone)


def kernels_alone(run: TrainingRun, experts: Experts) -> Counts:
    """The kernels of a layer's experts beside those of the first, where each expert is computed alone.

    Grouped products run beside each other, and the layer's own kernels count theirs once.
    """
    if run.software.grouped_experts:
        return Counts()
    return NUM_ALONE_KERNELS.scaled(max(0.0, experts.num_experts / run.layout.expert_parallel - 1.0))


def exposed_times(host: Times, device: Times) -> Times:
    """What the device waits for the host in a forward and in a backward, whose directions share the wait."""
    backward_s = host.input_grad_s + host.weight_grad_s
    wait_s = max(0.0, backward_s - device.input_grad_s - device.weight_grad_s)
    share = wait_s / backward_s if backward_s else 0.0
    forward_s = max(0.0, host.forward_s - device.forward_s)
    return Times(forward_s, host.input_grad_s * share, host.weight_grad_s * share)
