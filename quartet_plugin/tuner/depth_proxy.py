"""Depth proxies, the cheapest live fidelity: a plan is measured with fewer layers a stage before it is whole.

Width, layout, order of actions and ranks stay; only layers are left out, in proportion. The calibrated cost
model, which has learned the baseline whole and as a proxy, predicts the whole model from the proxy's time,
with its uncertainty. A plan that is clearly behind by then ends there.
"""

import math
import statistics
from dataclasses import dataclass, replace

from quartet_plugin.calibration.observations import spread_of
from quartet_plugin.calibration.predictor import DepthProxyTime
from quartet_plugin.model.frameworks import capabilities
from quartet_plugin.model.launch import DEPTH_PROXY
from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord, score_of_median
from quartet_plugin.space.features import Axis
from quartet_plugin.space.plan_space import Space
from quartet_plugin.study.tune_study import Proposal
from quartet_plugin.trial.request import TrialResult
from quartet_plugin.tuner.context import TuningContext
from quartet_plugin.tuner.finalists import BASELINE
from quartet_plugin.tuner.proposer import Proposer
from quartet_plugin.tuner.trial_launcher import BaselineScore, TrialLaunch, TrialLauncher

# `auto` keeps a quarter of the layers, where that saves this part of a launch, and more than a minute.
AUTO_FRACTION = 0.25
LEAST_SAVED, LEAST_SAVED_S = 0.5, 60.0
# A prediction with a smaller relative deviation learns too little from a depth proxy.
SURE = 0.03
# A plan ends at its depth proxy where it is this many deviations behind the best.
BEHIND = 2.0


def reduced_depth(plan: Plan, *, layers: int) -> Plan | None:
    """The plan with `layers` layers on its largest stage, others in proportion; None if it has no more.

    A stage that has layers keeps at least one.
    """
    counts = plan.split.transformer_layers_per_stage
    if max(counts) <= layers:
        return None
    fraction = layers / max(counts)
    kept = tuple(max(1, round(count * fraction)) if count else 0 for count in counts)
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
    context: TuningContext,
    launcher: TrialLauncher,
    baseline: BaselineScore,
    proposer: Proposer | None,
    is_sequential: bool,
) -> "DepthProxy | None":
    """The depth proxies of a run; None where they are not asked for or save nothing.

    `result` is the baseline's; `is_sequential`: trials run one after the other.
    """
    asked = context.run.config.trial.crop
    layers, why = layers_to_keep(space, result, asked=asked)
    if layers is not None and (proposer is None or not is_sequential):
        layers = None
        if asked != "auto":
            why = (
                f"trial.crop: {asked}; depth proxies need study.starts: auto and a run without --workers; "
                "set trial.crop: none"
            )
    if why:
        context.observer.message(why)
    if layers is None or proposer is None:
        return None
    return DepthProxy(context=context, launcher=launcher, baseline=baseline, proposer=proposer, layers=layers)


def layers_to_keep(space: Space, result: TrialResult, *, asked: str | int) -> tuple[int | None, str]:
    """The layers that a depth proxy of the baseline keeps on its largest stage, None for no proxies; and why.

    `result` is the baseline's. The reason is empty where nothing was asked for.
    """
    largest = _largest_stage(space.baseline)
    if asked == "none":
        return None, ""
    framework = capabilities(space.baseline.made_for.framework)
    if Axis.SCALING in space.locked or not framework.changes_num_layers:
        why = space.locked.get(Axis.SCALING, framework.title)
        fault = f"trial.crop: {asked}; {why} keeps the number of layers; set trial.crop: none"
        return None, "" if asked == "auto" else fault
    if isinstance(asked, int):
        fault = f"trial.crop: {asked}; the largest stage has {largest} layers; give fewer, or set it to none"
        return (asked, "") if asked < largest else (None, fault)
    layers = math.ceil(AUTO_FRACTION * largest)
    saved_s = (result.wall_s - result.start_s) * (1.0 - layers / largest)
    is_worth_it = saved_s >= max(LEAST_SAVED_S, LEAST_SAVED * result.wall_s)
    return (layers if is_worth_it else None), ""


@dataclass(slots=True, kw_only=True)
class DepthProxy:
    """Measures plans with fewer layers, and ends those that are not worth their whole model.

    `layers` stay on the baseline's largest stage, and the same fraction of every other plan's.
    """

    context: TuningContext
    launcher: TrialLauncher
    baseline: BaselineScore
    proposer: Proposer
    layers: int
    is_on: bool = True
    is_open: bool = False

    @property
    def is_begun(self) -> bool:
        """Whether an earlier process has measured depth proxies."""
        return self._is_recorded(self.baseline.plan, number=BASELINE)

    def open(self, trials: list[FinishedTrial], *, num_left: int, drift: float) -> None:
        """Measure the baseline's depth proxy, and take in the proxies that an earlier process measured."""
        self.is_open = True
        plan, say = self.baseline.plan, self.context.observer.message
        self.proposer.predictor.learn(trials)
        largest = _largest_stage(plan)
        say(f"plans are first measured as depth proxies: {self.layers} of {largest} layers per stage")
        first_drift = 1.0 if self.is_begun else drift
        if not self._measure(plan, number=BASELINE, num_left=num_left, drift=first_drift):
            self.is_on = False
            say("the baseline's depth proxy could not be measured; plans are measured with all layers")
        for trial in trials:
            plan, number = trial.plan, trial.number
            if self.is_on and number != BASELINE and self._is_recorded(plan, number=number):
                self._measure(plan, number=number, num_left=num_left, drift=trial.record.drift)

    def comes_first(self, proposal: Proposal) -> bool:
        """Whether a proposal's model with fewer layers may be measured before its whole one."""
        return self.is_on and proposal.predicted_spread is not None and proposal.predicted_spread >= SURE

    def judge(self, proposal: Proposal, *, num_left: int, drift: float) -> TrialRecord | None:
        """The record of a proposal that its depth proxy shows to be behind; None for one worth its model."""
        if not self.comes_first(proposal):
            return None
        plan = proposal.plan
        result = self._measure(plan, number=proposal.number, num_left=num_left, drift=drift)
        if result is None:
            return None
        prediction = self.proposer.predictor.predict([plan])[0]
        iteration_s, spread = prediction.iteration_s, prediction.spread
        log_speedup = self.proposer.log_speedup(plan, prediction)
        self.context.events.add("cropped", trial=proposal.number, predicted_s=iteration_s, lead=log_speedup)
        if log_speedup + BEHIND * spread >= 0.0:
            return None
        record = TrialRecord(
            verdict="measured",
            outcome=DEPTH_PROXY,
            reason=f"skipped: its depth proxy predicts {iteration_s:.3g} s per iteration "
            f"(±{spread:.0%}), too slow",
            attempt_id=result.attempt_id,
            wall_s=result.wall_s,
            num_iterations=0,
            spread=spread,
            drift=drift,
        )
        scored = score_of_median(plan, iteration_s=iteration_s / drift)
        return record.scored(scored, objective=self.baseline.objective)

    def _measure(self, plan: Plan, *, number: int, num_left: int, drift: float) -> TrialResult | None:
        """The result of the plan's depth proxy, which the predictor learns; None without a time.

        `drift` is the machine's when the proxy was launched, see `TrialLaunch`.
        """
        proxy = self._proxy(plan)
        if proxy is None or not self.proposer.predictor.knows(proxy):
            return None
        launch = TrialLaunch(
            number=number,
            label=f"{number} depth proxy",
            plan=proxy,
            folder=self.context.run.folder.depth_proxy(number),
            phase="cropped",
        )
        result = self.launcher.launch(launch, num_left=num_left)
        if not result.is_measured:
            return None
        self.proposer.predictor.learn_depth_proxy(
            DepthProxyTime(
                number=number,
                plan=plan,
                small=proxy,
                iteration_s=statistics.median(result.iteration_s) * drift,
                spread=spread_of(result.iteration_s),
            )
        )
        return result

    def _proxy(self, plan: Plan) -> Plan | None:
        fraction = self.layers / _largest_stage(self.baseline.plan)
        return reduced_depth(plan, layers=max(1, round(fraction * _largest_stage(plan))))

    def _is_recorded(self, plan: Plan, *, number: int) -> bool:
        proxy, folder = self._proxy(plan), self.context.run.folder.depth_proxy(number)
        return proxy is not None and self.context.backend.recorded(folder, plan_key=proxy.key) is not None


def _largest_stage(plan: Plan) -> int:
    return max(plan.split.transformer_layers_per_stage)
