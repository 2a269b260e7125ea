"""The cheapest live fidelity: a plan with fewer layers a stage, before the whole model.

Width, layout, order of actions and ranks stay; only layers are left out, in proportion. The calibrated cost
model, which has seen the baseline whole and cropped, says what the cropped model's time means for the whole
one, and how surely. A plan that is clearly behind by then ends there.
"""

import math
import statistics
from dataclasses import dataclass, replace

from quartet_plugin.calibration.observations import spread_of
from quartet_plugin.calibration.predictor import DepthProxyTime
from quartet_plugin.model.frameworks import capabilities
from quartet_plugin.model.launch import DEPTH_PROXY, Observer
from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.model.score import score_of_median
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord
from quartet_plugin.space.features import Axis
from quartet_plugin.space.plan_space import Space
from quartet_plugin.study.tune_study import Proposal
from quartet_plugin.trial.request import TrialResult
from quartet_plugin.tuner.events import EventLog
from quartet_plugin.tuner.finalists import BASELINE
from quartet_plugin.tuner.launches import Launches
from quartet_plugin.tuner.proposer import Proposer
from quartet_plugin.tuner.run_folder import TuningRun
from quartet_plugin.tuner.trial_launcher import TrialLauncher

# `auto` keeps a quarter of the layers, where that saves this much of a launch, and more than a minute.
AUTO_SHARE = 0.25
LEAST_SAVED, LEAST_SAVED_S = 0.5, 60.0
# A prediction as sure as this learns too little from a cropped model.
SURE = 0.03
# Deviations that a plan must be behind the best by to end at its cropped model.
BEHIND = 2.0


def cropped(plan: Plan, *, layers: int) -> Plan | None:
    """The plan with `layers` layers on its largest stage, others in proportion; None if it has no more.

    A stage that has layers keeps at least one.
    """
    counts = plan.split.transformer_layers_per_stage
    if max(counts) <= layers:
        return None
    share = layers / max(counts)
    kept = tuple(max(1, round(count * share)) if count else 0 for count in counts)
    return replace(
        plan,
        shape=replace(plan.shape, num_layers=sum(kept)),
        split=Split(transformer_layers_per_stage=kept),
        measurement=None,
    )


def depth_proxy_for(
    space: Space,
    result: TrialResult,
    *,
    run: TuningRun,
    proposer: Proposer | None,
    is_alone: bool,
    launches: Launches,
    launching: TrialLauncher,
    observer: Observer,
    events: EventLog,
) -> "DepthProxy | None":
    """What measures a run's plans cropped; None where that is not asked for or saves nothing.

    `result` is the baseline's; `is_alone` says whether one trial runs at a time.
    """
    asked = run.config.trial.crop
    layers, why = layers_to_keep(space, result, asked=asked)
    if layers is not None and (proposer is None or not is_alone):
        layers = None
        if asked != "auto":
            why = f"trial.crop: {asked}; only trials that the cost model proposes one at a time are cropped"
    if why:
        observer.message(why)
    if layers is None or proposer is None:
        return None
    return DepthProxy(
        run=run,
        launches=launches,
        launching=launching,
        proposer=proposer,
        observer=observer,
        events=events,
        baseline=space.baseline,
        layers=layers,
    )


def layers_to_keep(space: Space, result: TrialResult, *, asked: str | int) -> tuple[int | None, str]:
    """Layers on the largest stage of the baseline that a cropped model keeps, None for none; and why not.

    `result` is the baseline's. The reason is empty where nothing was asked for.
    """
    largest = _largest_stage(space.baseline)
    if asked == "none":
        return None, ""
    framework = capabilities(space.baseline.made_for.framework)
    if Axis.SCALING in space.locked or not framework.changes_num_layers:
        why = space.locked.get(Axis.SCALING, framework.title)
        return None, "" if asked == "auto" else f"trial.crop: {asked}; {why} keeps the number of layers"
    if isinstance(asked, int):
        is_less = asked < largest
        return (asked, "") if is_less else (None, f"trial.crop: {asked}; a stage has {largest} layers")
    layers = math.ceil(AUTO_SHARE * largest)
    saved_s = (result.wall_s - result.start_s) * (1.0 - layers / largest)
    is_worth_it = saved_s >= max(LEAST_SAVED_S, LEAST_SAVED * result.wall_s)
    return (layers if is_worth_it else None), ""


@dataclass(slots=True, kw_only=True)
class DepthProxy:
    """Measures plans cropped, and tells which are not worth their whole model.

    `layers` stay on the baseline's largest stage, and the same share of every other plan's.
    """

    run: TuningRun
    launches: Launches
    launching: TrialLauncher
    proposer: Proposer
    observer: Observer
    events: EventLog
    baseline: Plan
    layers: int
    is_on: bool = True
    is_open: bool = False

    @property
    def is_begun(self) -> bool:
        """Whether an earlier process has cropped models measured."""
        return self._is_recorded(self.baseline, number=BASELINE)

    def open(self, trials: list[FinishedTrial], *, num_left: int) -> None:
        """Measure the baseline cropped, and take in what an earlier process measured."""
        self.is_open = True
        self.proposer.ranker.learn(trials)
        self.observer.message(
            f"plans are tried with {self.layers} of {_largest_stage(self.baseline)} layers a stage first"
        )
        drift = 1.0 if self.is_begun else self.launching.drift
        if not self._measure(self.baseline, number=BASELINE, num_left=num_left, drift=drift):
            self._end("the cropped baseline could not be measured")
        for trial in trials:
            plan, number = trial.plan, trial.number
            if self.is_on and number != BASELINE and self._is_recorded(plan, number=number):
                self._measure(plan, number=number, num_left=num_left, drift=trial.record.drift)

    def judge(self, proposal: Proposal, *, num_left: int) -> TrialRecord | None:
        """What to tell of a proposal that its cropped model shows to be behind; None for one worth more."""
        if not self.is_on or proposal.predicted_spread is None or proposal.predicted_spread < SURE:
            return None
        plan, drift = proposal.plan, self.launching.drift
        result = self._measure(plan, number=proposal.number, num_left=num_left, drift=drift)
        if result is None:
            return None
        forecast = self.proposer.ranker.predict([plan])[0]
        lead = self.proposer.lead(plan, forecast)
        self.events.add("cropped", trial=proposal.number, predicted_s=forecast.iteration_s, lead=lead)
        if lead + BEHIND * forecast.spread >= 0.0:
            return None
        own = self.launching.yardstick
        assert own is not None
        record = TrialRecord(
            verdict="measured",
            outcome=DEPTH_PROXY,
            reason=(
                f"its cropped model is behind: {forecast.iteration_s:.3g} s +- {forecast.spread:.0%} expected"
            ),
            attempt_id=result.attempt_id,
            wall_s=result.wall_s,
            num_iterations=0,
            spread=forecast.spread,
            drift=drift,
        )
        scored = score_of_median(plan, iteration_s=forecast.iteration_s / drift)
        return record.scored(scored, objective=own.objective)

    def _measure(self, plan: Plan, *, number: int, num_left: int, drift: float) -> TrialResult | None:
        """Launch the plan's cropped model, or find it measured, and learn from it; None without a time.

        `drift` is the machine's when it was launched, see `TrialLauncher`.
        """
        small = self._small(plan)
        if small is None or not self.proposer.ranker.knows(small):
            return None
        result = self.launching.launch(
            small,
            number=number,
            folder=self.run.folder.cropped(number),
            label=f"{number} cropped",
            stage="cropped",
            num_left=num_left,
        )
        if not result.is_measured:
            return None
        self.proposer.ranker.learn_depth_proxy(
            DepthProxyTime(
                number=number,
                plan=plan,
                small=small,
                iteration_s=statistics.median(result.iteration_s) * drift,
                spread=spread_of(result.iteration_s),
            )
        )
        return result

    def _small(self, plan: Plan) -> Plan | None:
        share = self.layers / _largest_stage(self.baseline)
        return cropped(plan, layers=max(1, round(share * _largest_stage(plan))))

    def _is_recorded(self, plan: Plan, *, number: int) -> bool:
        small = self._small(plan)
        folder = self.run.folder.cropped(number)
        return small is not None and self.launches.recorded(folder, plan_key=small.key) is not None

    def _end(self, why: str) -> None:
        self.is_on = False
        self.observer.message(f"{why}: plans are tried whole")


def _largest_stage(plan: Plan) -> int:
    return max(plan.split.transformer_layers_per_stage)
