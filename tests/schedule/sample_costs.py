"""Stage costs and random schedules shared by the tests of this room."""

from collections.abc import Sequence

import numpy as np

from quartet_plugin.model.costs import EMBEDDING, HEAD, Costs, LayerCost, StageCosts


def uniform(
    placement: Sequence[int], *, shares: tuple[float, float, float] = (1.0, 1.0, 1.0), held: float = 1.0
) -> StageCosts:
    """A device's share of one microbatch costs F, I, W = `shares` and 1 byte; no transfer time."""
    num_stages = len(placement)
    part = np.full(num_stages, (max(placement) + 1) / num_stages)
    forward, input_grad, weight_grad = shares
    return StageCosts(
        device_of_stage=np.array(placement, dtype=np.int64),
        forward_s=part * forward,
        input_grad_s=part * input_grad,
        weight_grad_s=part * weight_grad,
        backward_s=part * (input_grad + weight_grad),
        activation_bytes=part,
        forward_transfer_s=np.zeros(num_stages),
        backward_transfer_s=np.zeros(num_stages),
        held_fraction=held,
    )


def uneven(placement: Sequence[int], seed: int) -> StageCosts:
    """Random costs, transfers where the device changes, and a random held fraction."""
    rng = np.random.default_rng(seed)
    device = np.array(placement, dtype=np.int64)
    num_stages = len(device)
    input_grad, weight_grad = rng.uniform(0.2, 2.0, (2, num_stages))
    moved = np.append(device[1:] != device[:-1], False)
    return StageCosts(
        device_of_stage=device,
        forward_s=rng.uniform(0.2, 2.0, num_stages),
        input_grad_s=input_grad,
        weight_grad_s=weight_grad,
        backward_s=(input_grad + weight_grad) * rng.uniform(0.8, 1.0),
        activation_bytes=rng.uniform(0.5, 2.0, num_stages),
        forward_transfer_s=rng.uniform(0.0, 0.5, num_stages) * moved,
        backward_transfer_s=rng.uniform(0.0, 0.5, num_stages) * np.concatenate(([False], moved[:-1])),
        held_fraction=float(rng.uniform()),
    )


def random_costs(
    *,
    num_devices: int,
    num_microbatches: int,
    num_layers: int,
    seed: int,
    cap_shares: float | None = None,
    head: float = 2.0,
) -> Costs:
    """A cost table with unequal F, I, W, an embedding, a head, unequal devices and links.

    `cap_shares`: the memory limit in an even share of all layers' bytes, None for no limit.
    """
    rng = np.random.default_rng(seed)

    def layer(name: str, scale: float, size: float) -> LayerCost:
        forward, input_grad, weight_grad = scale * rng.uniform(0.7, 1.3, 3)
        return LayerCost(
            name=name,
            forward_s=float(forward),
            input_grad_s=float(input_grad),
            weight_grad_s=float(weight_grad),
            activation_bytes=size,
        )

    layers = [layer(EMBEDDING, 0.1, 0.1)]
    layers += [layer(f"layer.{i}", 1.0, 1.0) for i in range(num_layers)]
    layers.append(layer(HEAD, head, 0.5))
    transfer = rng.uniform(0.0, 0.3, (num_devices, num_devices))
    np.fill_diagonal(transfer, 0.0)
    total = sum(item.activation_bytes for item in layers)
    limit = None if cap_shares is None else np.full(num_devices, cap_shares * total / num_devices)
    return Costs(
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        layers=tuple(layers),
        device_slowdown=np.where(rng.uniform(size=num_devices) < 0.75, 1.0, 1.3),
        transfer_s=transfer,
        memory_limit_bytes=limit,
        weight_grad_held_fraction=float(rng.choice([1.0, 0.5])),
        backward_fused_s=None,
    )
