"""A machine that is not what the cost model assumes: some causes of time take several times as long."""

import hashlib
from collections.abc import Sequence

import numpy as np

from quartet_plugin.calibration.machine_prior import machine_model_of
from quartet_plugin.calibration.predictor import PlanPredictor
from quartet_plugin.cost.coefficients import INDEX, Coefficient, MachineModel
from quartet_plugin.cost.iteration.cache import IterationModelCache
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.job_description import Experts
from quartet_plugin.model.plan import NodeInfo, Plan


class Truth:
    """Seconds an iteration of any plan: the iteration model under given coefficients, times a residual.

    `coefficients` are multiples of what is assumed, by their names; `slowdowns` those of the slots.
    """

    def __init__(
        self,
        nodes: Sequence[NodeInfo],
        *,
        slowdowns: Sequence[float] = (),
        residual: float = 0.0,
        experts: Experts | None = None,
        **coefficients: float,
    ) -> None:
        self.machine_model: MachineModel = machine_model_of(nodes, precision="fp32", experts=experts)
        self.theta = np.zeros(self.machine_model.num_coefficients)
        for name, ratio in coefficients.items():
            self.theta[INDEX[Coefficient(name)]] = np.log(ratio)
        for slot, slowdown in enumerate(slowdowns):
            self.theta[len(INDEX) + slot] = np.log(slowdown)
        self._iteration_models = IterationModelCache(self.machine_model)
        self._residual = residual
        self._known: dict[object, float] = {}

    def __call__(self, plan: Plan) -> float:
        key = plan.identity
        if key not in self._known:
            seconds, _ = self._iteration_models.of(plan).evaluate(self.theta)
            digest = hashlib.sha256(plan.key.encode()).digest()
            chance = int.from_bytes(digest[:4], "big") / 2**32
            self._known[key] = seconds * (1.0 + self._residual * (2.0 * chance - 1.0))
        return self._known[key]


def learned_ratios(ranker: PlanPredictor) -> tuple[FloatArray, FloatArray]:
    """Each coefficient's posterior mean as a ratio to what is assumed, and the spread of its logarithm."""
    samples = ranker.posterior_samples()
    weights = np.array([sample.weight for sample in samples])
    points = np.stack([sample.point for sample in samples])
    mean = weights @ points
    return np.exp(mean), np.sqrt(weights @ (points - mean) ** 2)
