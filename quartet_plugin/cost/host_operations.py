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

# Operations of a layer beside its experts, as PyTorch's dispatcher counts them in Megatron-Core 0.19 without
# views, which are as many again: 76 in the forward (norms, attention, router, permutations, residuals), 64 in
# the backward and a hook of each weight.
LAYER_OPERATIONS = Times(75.0, 60.0, 15.0)
# Four parts of a layer that run beside another microbatch's: wait for an event, enter a stream, detach and
# keep the inputs, leave, record the event; in the backward also start autograd and take the gradients.
OVERLAP_OPERATIONS = Times(4 * 8.0, 4 * 10.0, 0.0)
# An expert's product: choose cuBLAS's algorithm and start it; of a weight's gradient also make an empty one
# for autograd, and call the hook that marks the sum as ready.
PRODUCT_OPERATIONS = Times(2.0, 2.0, 4.0)
# A scale a tensor: find the largest value, make the scale, cast, and make the tensor of both; of the input
# and of the output's gradient.
TENSOR_SCALE_OPERATIONS = Times(4.0, 4.0, 0.0)
# A scale a block: cast, make the tensor, and bring both operands' scales into the order of each product.
BLOCK_SCALE_OPERATIONS = Times(4.0, 4.0, 2.0)
# An expert's FFN: into the hidden width and out of it.
PRODUCTS_OF_EXPERT = 2
# Of an expert that is computed alone: beside its products, as PyTorch's dispatcher counts them in
# `SequentialMLP` without views (a gated activation and the router's weight, and their backward).
ALONE_OPERATIONS = Times(4.0, 8.0, 0.0)
# Kernels of an expert alone that start one after the other: two products and the activation.
ALONE_KERNELS = Times(3.0, 3.0, 2.0)


def operations(run: TrainingRun, experts: Experts) -> Times:
    """The host's operations in the passes of a layer with experts; those replayed from graphs are none."""
    if run.software.graphs:
        return Times()
    local = max(1.0, experts.num_experts / run.layout.expert_parallel)
    product = PRODUCT_OPERATIONS
    if run.has_narrow_products:
        product = product.plus(BLOCK_SCALE_OPERATIONS if run.has_block_scales else TENSOR_SCALE_OPERATIONS)
    layer = LAYER_OPERATIONS.scaled(1.0 - run.software.graphed_share)
    if run.software.expert_overlap:
        layer = layer.plus(OVERLAP_OPERATIONS)
    alone = Times() if run.software.grouped_experts else ALONE_OPERATIONS.scaled(local)
    return layer.plus(product.scaled(PRODUCTS_OF_EXPERT * local)).plus(alone)


def kernels_alone(run: TrainingRun, experts: Experts) -> Times:
    """The kernels of a layer's experts beside those of the first, where each expert is computed alone.

    Grouped products run beside each other, and the layer's own kernels count theirs once.
    """
    if run.software.grouped_experts:
        return Times()
    return ALONE_KERNELS.scaled(max(0.0, experts.num_experts / run.layout.expert_parallel - 1.0))


def exposed_times(host: Times, device: Times) -> Times:
    """What the device waits for the host in a forward and in a backward, whose directions share the wait."""
    backward_s = host.input_grad + host.weight_grad
    wait_s = max(0.0, backward_s - device.input_grad - device.weight_grad)
    share = wait_s / backward_s if backward_s else 0.0
    forward_s = max(0.0, host.forward - device.forward)
    return Times(forward_s, host.input_grad * share, host.weight_grad * share)
