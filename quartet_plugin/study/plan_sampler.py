"""An Optuna sampler whose points are the planner's: the plan with the largest expected improvement.

It needs no command line and no run folder. The study stays an ordinary one: points are the sampler's relative
parameters, and what the sampler knows it reads from the finished trials, by decoding their parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Literal
from weakref import WeakKeyDictionary

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from quartet_plugin.calibration.machine_prior import KnownMachine, machine_model_of_space
from quartet_plugin.calibration.predictor import PlanPredictor
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord, Verdict, score_of_median
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.plan_scorer import PlanScorer, is_samplers_turn
from quartet_plugin.planner.space_request import request_of_space
from quartet_plugin.space.param_sources import FixedParams, Params
from quartet_plugin.space.plan_space import Space
from quartet_plugin.study.trial_params import TrialParams, parted, recorded_params

# What a study's objective returns, and the direction that belongs to it.
PlanObjective = Literal["iteration_s", "tokens_per_s", "model_flops_per_s_per_device"]
_DIRECTIONS: dict[PlanObjective, StudyDirection] = {
    "iteration_s": StudyDirection.MINIMIZE,
    "tokens_per_s": StudyDirection.MAXIMIZE,
    "model_flops_per_s_per_device": StudyDirection.MAXIMIZE,
}
# A pruned trial's plan does not run or fit; a failed trial says nothing of its plan.
_VERDICTS: dict[TrialState, Verdict] = {
    TrialState.COMPLETE: "measured",
    TrialState.PRUNED: "infeasible",
    TrialState.FAIL: "lost",
}


def suggest_plan(trial: Any, space: Space) -> Plan:
    """The plan that an Optuna trial proposes; its parameters are suggested under the space's names."""
    if isinstance(trial, optuna.trial.Trial):
        _ = trial.relative_params  # drawn first: an order of actions is a text, which draws nothing
    return space.decode(TrialParams(trial), trial=trial.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPoint:
    """A plan and the relative parameters of its trial, with their distributions and the texts beside them."""

    plan: Plan
    params: Params
    texts: dict[str, str]
    distributions: dict[str, BaseDistribution]


@dataclass(slots=True)
class _StudyState:
    """What the sampler keeps of one study: what it learned, and by trial number plans and proposed points.

    A trial's parameters are in the study only after its point was taken, so that other threads do not see it.
    """

    scorer: PlanScorer
    plans: dict[int, Plan | None] = field(default_factory=dict)
    proposed: dict[int, PlanPoint] = field(default_factory=dict)


class PlanSampler(BaseSampler):  # type: ignore[misc]  # Optuna is read as untyped here
    """Proposes plans of `space` by a cost model that learns every finished trial of a study.

    Trial 0 is the baseline, where the space holds it. `explorer` (default: TPE) proposes every `explore`-th
    trial (0: none), the trials for which the planner has no plan left, and every parameter that is not of
    the space. `objective` is what the study's objective returns: seconds per iteration, to be minimized, or a
    rate, to be maximized. A plan does not fit whose trial is pruned, violates a constraint, or has a value
    that no plan can have, as infinite seconds. `machine` is what was measured of the machine before. Until a
    trial is measured, the plans are those of `quartet plan`. `job` is the described job that the space was
    made of (`described_space.space_of`), which has no baseline to begin with.
    """

    def __init__(
        self,
        space: Space,
        *,
        explorer: BaseSampler | None = None,
        objective: PlanObjective = "iteration_s",
        explore: int = 5,
        machine: KnownMachine | None = None,
        job: PlanRequest | None = None,
    ) -> None:
        self._space = space
        self._explorer = optuna.samplers.TPESampler(seed=space.seed) if explorer is None else explorer
        self._objective = objective
        self._explore = explore
        known = machine or KnownMachine()
        self._machine_model = machine_model_of_space(space, known)
        self._begins_with_baseline = job is None
        self._request = request_of_space(space, machine=known) if job is None else job
        self._constants = known.constants
        # By storage and id: a pruner may wrap the same study in a new object for every call.
        self._states: WeakKeyDictionary[Any, dict[int, _StudyState]] = WeakKeyDictionary()
        self._lock = Lock()

    def reseed_rng(self) -> None:
        """Seed the explorer again; the planner draws no random numbers."""
        self._explorer.reseed_rng()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The parameters of the proposed plan, or those of the explorer where the trial is its turn."""
        with self._lock:
            point = self._point(study, trial)
            if point is not None:
                self._state_of(study).proposed[trial.number] = point
        if point is None:
            return dict(self._explorer.infer_relative_search_space(study, trial))
        return point.distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The proposed plan's values, or the explorer's."""
        state = self._known_state(study)
        point = None if state is None else state.proposed.get(trial.number)
        if point is None:
            return dict(self._explorer.sample_relative(study, trial, search_space))
        for name, text in point.texts.items():
            study._storage.set_trial_user_attr(trial._trial_id, name, text)
        return dict(point.params)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """The explorer's value: of its own trials, and of parameters that are not of the space."""
        return self._explorer.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Raises ConfigError for a study that optimizes the other way; the rest is the explorer's."""
        expected = _DIRECTIONS[self._objective]
        if study.direction != expected:
            raise ConfigError(
                f"PlanSampler: the study is to {study.direction.name.lower()}; {self._objective} needs "
                f"direction={expected.name.lower()!r}"
            )
        self._explorer.before_trial(study, trial)

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """The explorer's; the planner reads the finished trials when it is asked."""
        if (known := self._known_state(study)) is not None:
            known.proposed.pop(trial.number, None)
        self._explorer.after_trial(study, trial, state, values)

    def _point(self, study: Study, trial: FrozenTrial) -> PlanPoint | None:
        """The planner's point for a trial; None where it is left to the explorer."""
        if "fixed_params" in trial.system_attrs:
            return None
        others = [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]
        state = self._state_of(study)
        finished = [record for other in others if (record := self._finished_trial(state, other)) is not None]
        scorer = state.scorer
        scorer.predictor.learn(finished)
        if trial.number == 0 and self._begins_with_baseline:
            params = self._space.params_of(self._space.baseline)
            return None if params is None else self._point_of(self._space.baseline, params)
        if scorer.predictor.is_ready and is_samplers_turn(finished, explore=self._explore):
            return None
        running = [other for other in others if other.state == TrialState.RUNNING]
        pending = [plan for other in running if (plan := self._pending_plan(state, other)) is not None]
        known = {plan.identity for plan in (*pending, *(record.plan for record in finished))}
        for point in scorer.plans_to_try(pending):
            if point.plan.identity not in known and self._space.refusal_of(point.plan) is None:
                return self._point_of(point.plan, point.params)
        return None

    def _known_state(self, study: Study) -> _StudyState | None:
        """The state for one study; None before its first proposal."""
        return self._states.get(study._storage, {}).get(study._study_id)

    def _state_of(self, study: Study) -> _StudyState:
        """The sampler's state for one study."""
        states = self._states.setdefault(study._storage, {})
        if study._study_id not in states:
            objective = "tokens_per_s" if self._objective == "iteration_s" else self._objective
            scorer = PlanScorer(
                self._space,
                predictor=PlanPredictor(self._machine_model, num_iterations=1),
                objective=objective,
                request=self._request,
                constants=self._constants,
            )
            states[study._study_id] = _StudyState(scorer)
        return states[study._study_id]

    def _pending_plan(self, state: _StudyState, trial: FrozenTrial) -> Plan | None:
        """The plan of a running trial: the proposed one, or that of its parameters."""
        proposed = state.proposed.get(trial.number)
        return self._plan_of(recorded_params(trial)) if proposed is None else proposed.plan

    def _finished_trial(self, state: _StudyState, trial: FrozenTrial) -> FinishedTrial | None:
        """A finished trial with its plan and time; None for one that is not finished or not of the space."""
        if trial.state not in _VERDICTS:
            return None
        if trial.number not in state.plans:
            state.plans[trial.number] = self._plan_of(recorded_params(trial))
        plan = state.plans[trial.number]
        if plan is None:
            return None
        verdict = _VERDICTS[trial.state]
        iteration_s = self._iteration_s(plan, trial.value)
        is_violated = any(excess > 0 for excess in trial.constraints.values())
        if is_violated or (verdict == "measured" and iteration_s is None):
            verdict = "infeasible"
        is_measured = verdict == "measured"
        record = TrialRecord(
            verdict=verdict,
            outcome="OK" if is_measured else trial.state.name,
            reason="",
            attempt_id="",
            iteration_s=iteration_s if is_measured else None,
        )
        return FinishedTrial(number=trial.number, plan=plan, record=record)

    def _iteration_s(self, plan: Plan, value: float | None) -> float | None:
        """Seconds of an iteration by the objective's value; None for a value that no plan can have."""
        if value is None or not 0.0 < value < float("inf"):
            return None
        if self._objective == "iteration_s":
            return value
        return score_of_median(plan, iteration_s=1.0).value(self._objective) / value

    def _plan_of(self, params: Params) -> Plan | None:
        """The plan of a trial's parameters; None where they are not all there."""
        try:
            return self._space.decode(FixedParams(params), trial=0)
        except (KeyError, ValueError):
            return None

    def _point_of(self, plan: Plan, params: Params) -> PlanPoint:
        """The plan's point, with the distributions under which the space suggests it."""
        source = _RecordedDistributions(params)
        self._space.decode(source, trial=0)
        kept = {name: params[name] for name in source.distributions}
        texts = parted(params)[1]
        return PlanPoint(plan=plan, params=kept, texts=texts, distributions=source.distributions)


class _RecordedDistributions(FixedParams):
    """Recorded parameters, and the distribution of each that was asked for."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.distributions: dict[str, BaseDistribution] = {}

    def category(self, name: str, choices: Sequence[str]) -> str:
        """The recorded choice."""
        self.distributions[name] = CategoricalDistribution(list(choices))
        return super().category(name, choices)

    def integer(self, name: str, low: int, high: int) -> int:
        """The recorded number."""
        self.distributions[name] = IntDistribution(low, high)
        return super().integer(name, low, high)

    def unit_float(self, name: str) -> float:
        """The recorded number."""
        self.distributions[name] = FloatDistribution(-1.0, 1.0)
        return super().unit_float(name)
