"""A machine that is not what the cost model assumes: some causes of time take several times as long."""

import hashlib
from collections.abc import Sequence

import numpy as np

from quartet_plugin.calibration.machine_prior import machine_model_of
from quartet_plugin.calibration.predictor import identity
from quartet_plugin.cost.coefficients import INDEX, MachineModel
from quartet_plugin.cost.iteration import IterationModelCache
from quartet_plugin.model.plan import NodeInfo, Plan


class Truth:
    """Seconds an iteration of any plan: the anatomy under these factors, and a residual of each plan's own.

    `factors` say how many times what is assumed, by the factors' names; `paces` those of the slots.
    """

    def __init__(
        self,
        nodes: Sequence[NodeInfo],
        *,
        paces: Sequence[float] = (),
        residual: float = 0.0,
        **factors: float,
    ) -> None:
        self.ground: MachineModel = machine_model_of(nodes, precision="fp32")
        self.theta = np.zeros(self.ground.num_factors)
        for name, ratio in factors.items():
            self.theta[next(at for factor, at in INDEX.items() if factor.value == name)] = np.log(ratio)
        for slot, pace in enumerate(paces):
            self.theta[len(INDEX) + slot] = np.log(pace)
        self._anatomies = IterationModelCache(self.ground)
        self._residual = residual
        self._known: dict[object, float] = {}

    def __call__(self, plan: Plan) -> float:
        key = identity(plan)
        if key not in self._known:
            seconds, _ = self._anatomies.of(plan).evaluate(self.theta)
            digest = hashlib.sha256(plan.key.encode()).digest()
            chance = int.from_bytes(digest[:4], "big") / 2**32
            self._known[key] = seconds * (1.0 + self._residual * (2.0 * chance - 1.0))
        return self._known[key]
