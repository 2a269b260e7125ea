"""Trials with fewer replicas than the training: the finalists by their times at full size, and the winner's.

Trials measure the plans as they are inside of a replica; the calibrated model says what more replicas cost.
Where a trial has a part of a replica's stages, it says what the other stages cost, too.
The plan that is handed over has all replicas, a predicted time with its interval, and one short comparison
with the user's command at full size where there are nodes for it.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from quartet_plugin.calibration.feasibility import OVER
from quartet_plugin.calibration.full_size import FullSizePrediction, FullSizePredictor, MeasuredPlan
from quartet_plugin.calibration.predictor import PlanPredictor
from quartet_plugin.errors import ConfigError, InfrastructureError, QuartetError
from quartet_plugin.launchers.command import Command
from quartet_plugin.model.full_size import Confirmation, FullSize
from quartet_plugin.model.measurement import FinalChoice, Interval, Objective, Prediction
from quartet_plugin.model.plan import NodeInfo, Plan
from quartet_plugin.model.trial_record import FinishedTrial, score_of_median, speedup
from quartet_plugin.space.full_size import at_full_size, full_nodes
from quartet_plugin.space.plan_space import Space
from quartet_plugin.tuner.context import TuningContext
from quartet_plugin.tuner.proposer import kept_machine, predictor_of
from quartet_plugin.tuner.trial_backend import TrialBackend
from quartet_plugin.tuner.trial_launcher import BaselineScore, TrialLaunch, TrialLauncher, supersede_part
from quartet_plugin.tuner.winner_choice import FinalistResult

# The launches of each side in the comparison at full size.
ROUNDS = 2
RULE = (
    "of the plans that are proven faster than your command in trials with fewer replicas, the one "
    "whose predicted throughput at full size is the highest"
)
_TWO_SIDED_95 = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSizeNodes:
    """Launches on as many nodes as the training has: the user's command there, and what opens a backend."""

    command: Command
    open_backend: Callable[[], AbstractContextManager[TrialBackend]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSizeWinner:
    """The plan with all replicas, and its predicted and measured times."""

    plan: Plan
    result: FullSize


@dataclass(slots=True, kw_only=True)
class FullSizeStudy:
    """Looks at a run's finalists as they are on `factor` times the nodes.

    They have more replicas there, and `stage_factor` times the stages. `nodes` starts launches there, or says
    in words why nothing can. `stand_in` is the baseline of the final rounds where the command does not fit.
    """

    context: TuningContext
    space: Space
    factor: int
    predictor: PlanPredictor
    nodes: FullSizeNodes | str
    stand_in: Plan | None = None

    @property
    def _baseline(self) -> Plan:
        """The plan that finalists are compared with."""
        return self.stand_in or self.space.baseline

    @property
    def _baseline_words(self) -> str:
        return "your command" if self.stand_in is None else "the best stock plan that fits"

    def ranked(
        self, ranked: Sequence[FinishedTrial], *, trials: Sequence[FinishedTrial]
    ) -> list[FinishedTrial]:
        """Those of `trials` that may win, by their predicted throughput at full size; unknown ones last."""
        self.predictor.learn(trials)
        values = {trial.number: self._log_value(trial) for trial in ranked}
        order = {trial.number: index for index, trial in enumerate(ranked)}
        return sorted(ranked, key=lambda trial: (-values[trial.number], order[trial.number]))

    def in_order(self, rankings: Sequence[FinalistResult]) -> list[FinalistResult]:
        """The finalists with those that may win in order of their predicted speedup at full size."""
        wins = [ranking for ranking in rankings if ranking.is_win]
        predicted = {ranking.trial.number: self._speedup(ranking) for ranking in wins}
        wins.sort(key=lambda ranking: -predicted[ranking.trial.number])
        return [*wins, *(ranking for ranking in rankings if not ranking.is_win)]

    def choice(self, rankings: Sequence[FinalistResult]) -> FinalChoice | None:
        """How the winner was chosen, where `in_order` has chosen; None without one."""
        return FinalChoice(rule=RULE) if rankings and rankings[0].is_win else None

    def winner(
        self, ranking: FinalistResult, *, baseline: BaselineScore, launcher: TrialLauncher
    ) -> FullSizeWinner | None:
        """The winner at full size, compared there where it can be; None where the model cannot predict it."""
        say = self.context.observer.message
        try:
            full, of_plan, of_baseline = self._predictions(ranking)
        except QuartetError as error:
            say(f"full size: no prediction is possible: {error}")
            return None
        gain = self._full_predictor().speedup(
            of_plan, baseline=of_baseline, measured=ranking.comparison.speedup
        )
        num_nodes = len(full.made_for.nodes)
        say(
            f"full size: {num_nodes} nodes: {of_plan.iteration_s:.4g} s per iteration predicted, "
            f"{gain.median:.2f}x as fast as {self._baseline_words} ({gain.low:.2f}x to {gain.high:.2f}x)"
        )
        if ranking.trial.plan.layout.data_parallel == 1 < full.layout.data_parallel:
            say("full size: its trial had one replica, so the time of the gradient reduction is assumed")
        if self.stage_factor > 1:
            parts = f"{full.layout.label}, split {full.split.label}"
            say(f"full size: {parts}: {self.stage_factor} times the stages of its trial")
        full = replace(
            full,
            prediction=Prediction(
                iteration_s=of_plan.iteration_s, relative_cost=None, peak_memory_bytes=None
            ),
        )
        confirmed = self._confirm(full, ranking.trial, baseline=baseline, launcher=launcher)
        result = FullSize(
            num_nodes=num_nodes,
            num_trial_nodes=len(ranking.trial.plan.made_for.nodes),
            iteration_s=of_plan.interval,
            baseline_iteration_s=of_baseline.interval,
            speedup=gain,
            confirmation=None if isinstance(confirmed, str) else confirmed[0],
            unconfirmed=confirmed if isinstance(confirmed, str) else "",
        )
        self.context.events.add("full-size", trial=ranking.trial.number, nodes=num_nodes, speedup=gain.median)
        return FullSizeWinner(plan=full if isinstance(confirmed, str) else confirmed[1], result=result)

    # Predictions

    def _full_predictor(self) -> FullSizePredictor:
        return FullSizePredictor(
            self.predictor.machine_model,
            self.predictor.posterior_samples(),
            covariance=self.predictor.coefficient_covariance(),
            factor=self.factor,
        )

    @property
    def stage_factor(self) -> int:
        """The stages of the training over those of a trial."""
        return self.space.job.stage_divisor or 1

    def _full(self, plan: Plan) -> Plan:
        return at_full_size(
            plan,
            factor=self.factor,
            stage_factor=self.stage_factor,
            nodes=full_nodes(plan.made_for.nodes, factor=self.factor),
            rules=self.space.order_rules,
            limits=self.space.search.family_limits,
            written=self.space.written.values(),
        )

    def _fitting(self, plan: Plan) -> Plan:
        """The plan at full size. Raises ConfigError where more stages need more memory than a device has."""
        full = self._full(plan)
        if self.stage_factor > 1:
            share = self.predictor.feasibility.share_of_memory(full)
            if share is not None and share > OVER:
                raise ConfigError(
                    f"{full.layout.label}: predicted to need {share:.0%} of a device's memory at full size"
                )
        return full

    def _predicted(self, plan: Plan, *, iteration_s: float, spread: float) -> FullSizePrediction:
        return self._full_predictor().predict(
            MeasuredPlan(plan=plan, full=self._fitting(plan), iteration_s=iteration_s, spread=spread)
        )

    def _log_value(self, trial: FinishedTrial) -> float:
        """The logarithm of a trial's predicted objective at full size."""
        record = trial.record
        if record.iteration_s is None or record.value is None or not self.predictor.knows(trial.plan):
            return -math.inf
        try:
            predicted = self._predicted(trial.plan, iteration_s=record.iteration_s, spread=0.0)
        except QuartetError:
            return -math.inf
        return math.log(record.value) - math.log(predicted.iteration_s / record.iteration_s)

    def _predictions(self, ranking: FinalistResult) -> tuple[Plan, FullSizePrediction, FullSizePrediction]:
        """The plan with all replicas, and the predictions of it and of the baseline."""
        plan, comparison = ranking.trial.plan, ranking.comparison
        if not self.predictor.knows(plan):
            raise ConfigError("the cost model does not know the plan's order of actions")
        of_plan, of_baseline = (
            self._predicted(of, iteration_s=interval.median, spread=relative_spread(interval))
            for of, interval in (
                (plan, comparison.plan.iteration_s),
                (self._baseline, comparison.baseline.iteration_s),
            )
        )
        return self._full(plan), of_plan, of_baseline

    def _speedup(self, ranking: FinalistResult) -> float:
        try:
            _, of_plan, of_baseline = self._predictions(ranking)
        except QuartetError:
            return 0.0
        predicted = self._full_predictor().speedup(
            of_plan, baseline=of_baseline, measured=ranking.comparison.speedup
        )
        return predicted.median

    # The comparison at full size

    def _confirm(
        self, full: Plan, trial: FinishedTrial, *, baseline: BaselineScore, launcher: TrialLauncher
    ) -> tuple[Confirmation, Plan] | str:
        """The comparison and the plan with the nodes that it ran on, or why there is none."""
        if isinstance(self.nodes, str):
            self.context.observer.message(f"full size is not measured ({self.nodes})")
            return self.nodes
        if not self.context.budget.fits(num_launches=2 * ROUNDS):
            return "no time is left for it"
        self.context.observer.message(
            f"full size: the plan and {self._baseline_words} in turns, {ROUNDS} launches each"
        )
        stand_in = None if self.stand_in is None else self._full(self.stand_in)
        with self.nodes.open_backend() as backend:
            at_full = replace(
                launcher,
                context=replace(self.context, command=self.nodes.command, backend=backend),
                baseline=replace(baseline, plan=self._full(baseline.plan), launched_plan=stand_in),
                judge=lambda _, result: result,
            )
            before = at_full.recorded(self._launches(full, trial, stand_in=stand_in)[0])
            if before is not None:
                full = _on_nodes(full, backend.nodes(before))
            self._supersede_part(full, trial, stand_in=stand_in, launcher=at_full)
            times: dict[int, list[float]] = {0: [], trial.number: []}
            for turn in range(2 * ROUNDS):
                launch = self._launches(full, trial, stand_in=stand_in)[turn]
                try:
                    result = at_full.launch(launch, num_left=2 * ROUNDS - turn)
                except InfrastructureError as error:
                    # The winner is proven without it.
                    return f"{launch.label} was not measured: {error}"[:1_000]
                if not result.is_measured:
                    return f"{launch.label} was not measured: {result.reason}"[:1_000]
                times[launch.number].append(statistics.median(result.iteration_s))
                if turn == 0:
                    full = _on_nodes(full, backend.nodes(result))
        return self._confirmation(full, times[trial.number], times[0], objective=baseline.objective), full

    def _launches(self, full: Plan, trial: FinishedTrial, *, stand_in: Plan | None) -> list[TrialLaunch]:
        """The launches of the comparison in their order; by the first one the nodes of `full` have names."""
        return [
            TrialLaunch(
                number=number,
                label=f"{number} at full size {round_number + 1}",
                plan=full if number else stand_in,
                folder=self.context.run.folder.full_size_launch(number, round_number=round_number),
                phase="final",
            )
            for number, round_number in ((0, 0), (trial.number, 0), (trial.number, 1), (0, 1))
        ]

    def _supersede_part(
        self, full: Plan, trial: FinishedTrial, *, stand_in: Plan | None, launcher: TrialLauncher
    ) -> None:
        """Let the measurements at full size count no more where an earlier session made only a part of them.

        Measurements of the baseline beside another winner are such a part. A launch that fails ends the
        comparison.
        """
        launches = self._launches(full, trial, stand_in=stand_in)
        for turn, launch in enumerate(launches):
            before = launcher.recorded(launch)
            if before is not None and not before.is_measured:
                launches = launches[: turn + 1]
                break
        folders = self.context.run.folder.full_size_launches
        num_superseded = supersede_part(launches, folders=folders, launcher=launcher)
        if num_superseded:
            self.context.events.add("full-size-again", trial=trial.number, superseded=num_superseded)
            self.context.observer.message(
                "full size: an earlier session measured only a part of this comparison: the whole comparison "
                "is launched again, since the machine may differ by now"
            )

    def _confirmation(
        self, full: Plan, times: Sequence[float], of_command: Sequence[float], *, objective: Objective
    ) -> Confirmation:
        command = self._full(self._baseline)
        value, baseline_value = (
            score_of_median(of, iteration_s=statistics.fmean(seconds)).value(objective)
            for of, seconds in ((full, times), (command, of_command))
        )
        ratio = speedup(value, baseline_value=baseline_value)
        self.context.observer.message(f"full size: measured {ratio:.2f}x as fast as {self._baseline_words}")
        return Confirmation(iteration_s=tuple(times), baseline_iteration_s=tuple(of_command), speedup=ratio)


def full_size_study(
    context: TuningContext, space: Space, *, nodes: FullSizeNodes | str, predictor: PlanPredictor | None
) -> FullSizeStudy | None:
    """The look at full size of a run whose trials have fewer replicas; None for any other run.

    `predictor` is the proposer's, if it has one.
    """
    config = context.run.config
    if config.nodes is None or config.nodes == config.trial.nodes:
        return None
    return FullSizeStudy(
        context=context,
        space=space,
        factor=config.nodes // config.trial.nodes,
        predictor=predictor or predictor_of(space, run=context.run, machine=kept_machine(context.run.folder)),
        nodes=nodes,
    )


def relative_spread(interval: Interval) -> float:
    """The relative standard error that a 95 % interval says."""
    return max(0.0, interval.high - interval.low) / (2 * _TWO_SIDED_95 * interval.median)


def _on_nodes(plan: Plan, nodes: tuple[NodeInfo, ...]) -> Plan:
    """The plan with the nodes that it runs on, which a mapping of another order needs."""
    return replace(plan, made_for=replace(plan.made_for, nodes=nodes))
