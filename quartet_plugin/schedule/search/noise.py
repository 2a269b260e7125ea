"""Whether an order's advantage survives the noise of profiling: costs off by up to a tenth."""

from dataclasses import dataclass

import numpy as np

from quartet_plugin.model.costs import Costs, FloatArray
from quartet_plugin.schedule.kernel import run_orders
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.simulate import flatten, one_route

NUM_DRAWS = 64
SPREAD = 0.1


@dataclass(frozen=True, slots=True)
class NoisyCosts:
    """Paired draws: `prefix[k, kind, device]`, cumulated seconds over layers with slowdown applied."""

    costs: Costs
    prefix: FloatArray

    @classmethod
    def draw(cls, costs: Costs, rng: np.random.Generator, *, num_draws: int = NUM_DRAWS) -> "NoisyCosts":
        """Every (layer, kind, device) cost times U(0.9, 1.1)."""
        base = np.array([[x.forward_s, x.input_grad_s, x.weight_grad_s] for x in costs.layers]).T
        num_layers, num_devices = len(costs.layers), costs.num_devices
        factor = rng.uniform(1 - SPREAD, 1 + SPREAD, (num_draws, 4, num_devices, num_layers))
        seconds = np.empty_like(factor)
        seconds[:, :3] = factor[:, :3] * base[None, :, None, :]
        if costs.backward_fused_s is None:
            seconds[:, 3] = seconds[:, 1] + seconds[:, 2]
        else:
            seconds[:, 3] = factor[:, 3] * np.array(costs.backward_fused_s)
        seconds *= costs.device_slowdown[None, None, :, None]
        zero = np.zeros((num_draws, 4, num_devices, 1))
        return cls(costs, np.concatenate((zero, np.cumsum(seconds, axis=3)), axis=3))

    def mean_makespan(self, schedule: Schedule) -> float:
        """The mean over the draws, order and split fixed."""
        assert schedule.layers_per_stage is not None
        device = np.array(schedule.placement, dtype=np.int64)
        edges = np.concatenate(([0], np.cumsum(schedule.layers_per_stage)))
        seconds = self.prefix[:, :, device, edges[1:]] - self.prefix[:, :, device, edges[:-1]]
        transfer = self.costs.transfer_s
        send = np.zeros((2, len(device)))
        send[0, :-1] = transfer[device[:-1], device[1:]]
        send[1, 1:] = transfer[device[1:], device[:-1]]
        orders, offsets = flatten(schedule)
        lanes = one_route(schedule.placement, schedule.num_microbatches)
        total = 0.0
        for draw in np.ascontiguousarray(seconds):
            _, _, end, _ = run_orders(orders, offsets, lanes._replace(cost_s=draw, send_s=send))
            total += float(end.max())
        return total / len(seconds)
