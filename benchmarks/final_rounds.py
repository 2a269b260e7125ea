"""How often the final rounds hand over a plan, and after how many launches.

    python -m benchmarks.final_rounds

The final rounds run as in `quartet tune`; a launch takes the plan's true time, with noise between launches on
it. Of equal plans none should win, of faster ones all. Beside it stands what rounds of a fixed number, the
rule of earlier releases, do with such launches (`benchmarks/fixed_rounds.py`). Of two plans that beat the
baseline the faster should win, but another model hardly ever without a true gain, and the plugin's runtime
not by chance alone.
"""

import argparse
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benchmarks.fixed_rounds import MAX_EXTENDED, fixed_rounds
from benchmarks.search_cost.grounds import small_baseline
from benchmarks.search_cost.replay import Silent
from quartet_plugin.model.costs import StageCosts
from quartet_plugin.model.plan import Plan, ScheduleChoice
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord, score
from quartet_plugin.schedule.choice import choice_of
from quartet_plugin.schedule.named import named
from quartet_plugin.trial.request import Outcome, TrialResult
from quartet_plugin.tuner import finalists
from quartet_plugin.tuner.config import StudyConfig
from quartet_plugin.tuner.context import TimeBudget, TuningContext
from quartet_plugin.tuner.final_rounds import FinalRounds, winner_of
from quartet_plugin.tuner.run_folder import RunFolder
from quartet_plugin.tuner.sequential_test import BASELINE
from quartet_plugin.tuner.trial_launcher import BaselineScore, TrialLaunch, TrialLauncher

# Gains of the three finalists over the baseline.
CASES: Mapping[str, tuple[float, ...]] = {
    "equal": (1.0, 1.0, 1.0),
    "faster": (1.1, 1.1, 1.1),
    "one faster": (1.1, 1.0, 1.0),
    "one much faster": (1.3, 1.1, 1.0),
}
# Of two plans: the slower's gain over the baseline, and the faster's over it.
SLOWER = 1.4
RIVAL_GAINS = (1.0, 1.03, 1.05, 1.1, 1.2)
RIVAL_NOISES = (0.02, 0.05, 0.1)
MODELS = ("normal", "slow", "tails")
# Of occasional slow launches: the share of the slow ones, and by how many deviations they are slower.
_SLOW_SHARE = 0.1
_SLOW_BY = 2.8


def noise_of(
    model: str, *, deviation: float, size: int | tuple[int, int], generator: np.random.Generator
) -> NDArray[np.float64]:
    """Logarithms of launches' times, all with this standard deviation.

    `normal`; `slow`: one launch in ten is slower by 2.8 deviations; `tails`: Student's t with 3 degrees
    of freedom.
    """
    if model == "slow":
        of_slow = _SLOW_SHARE * (1.0 - _SLOW_SHARE) * _SLOW_BY**2
        usual = generator.normal(0.0, math.sqrt(1.0 - of_slow), size)
        return deviation * (usual + _SLOW_BY * (generator.random(size) < _SLOW_SHARE))
    if model == "tails":
        return deviation * generator.standard_t(3, size) / math.sqrt(3.0)
    return generator.normal(0.0, deviation, size)


class NoisyLauncher:
    """A machine on which the baseline takes a second, other trials less by their `gains`."""

    def __init__(self, *, gains: Mapping[int, float], model: str, deviation: float, seed: int) -> None:
        self._gains = gains
        generator = np.random.default_rng(seed)
        self._noise = iter(noise_of(model, deviation=deviation, size=1000, generator=generator))
        self.num_launches = 0

    def launch(self, launch: TrialLaunch, *, num_left: int) -> TrialResult:
        """One launch of three equal iterations."""
        del num_left
        self.num_launches += 1
        gain = 1.0 if launch.number == BASELINE else self._gains[launch.number]
        return TrialResult(
            attempt_id="",
            plan_key=None,
            outcome=Outcome.OK,
            reason="",
            phase="done",
            iteration_s=(math.exp(next(self._noise)) / gain,) * 3,
            peak_memory_bytes=1,
            folder=launch.folder,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Over many runs: how often a plan won, how often one of the fastest, and the mean number of launches."""

    wins: float
    fastest: float
    launches: float


def main() -> None:
    """Print both rules' wins and launches for every model of noise and case, then the choice of two plans."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--rival-runs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--noise", type=float, default=0.05, help="deviation between launches, relative")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="models of the noise")
    options = parser.parse_args()
    compare_rules(options.models, runs=options.runs, rounds=options.rounds, noise=options.noise)
    if options.rival_runs:
        compare_rivals(options.rival_runs, rounds=options.rounds)


def compare_rules(models: Sequence[str], *, runs: int, rounds: int, noise: float) -> None:
    """Print the wins and launches of the sequential test and of rounds of a fixed number."""
    for model in models:
        pairs = []
        for name, gains in CASES.items():
            now = sequential_rates(gains, model=model, noise=noise, runs=runs, rounds=rounds)
            then = fixed_rates(gains, model=model, noise=noise, runs=runs, rounds=rounds)
            pairs.append((now, then))
            print(
                f"{model} noise of {noise:.0%}, {name}: a plan wins in {now.wins:.1%} (one of the fastest in "
                f"{now.fastest:.1%}) after {now.launches:.1f} launches; fixed rounds {then.wins:.1%} "
                f"({then.fastest:.1%}) after {then.launches:.1f}; "
                f"{now.launches / then.launches:.0%} of the launches",
                flush=True,
            )
        both = [sum(rates.launches for rates in column[:2]) for column in zip(*pairs, strict=True)]
        print(f"{model}, equal and faster together: {both[0] / both[1]:.0%} of the launches", flush=True)


def compare_rivals(runs: int, *, rounds: int) -> None:
    """Print how often the faster of two plans wins; the slower has the user's model and nothing custom."""
    kinds = {
        "of its kind": (False, False),
        "of the plugin's runtime": (False, True),
        "of another model": (True, False),
    }
    for noise in RIVAL_NOISES:
        for kind, (is_other_model, is_custom) in kinds.items():
            cells = []
            for gain in RIVAL_GAINS:
                plan = _rival(is_other_model=is_other_model, is_custom=is_custom)
                outcomes = [
                    winner_of_rivals(gain, plan, noise=noise, seed=seed, rounds=rounds)
                    for seed in range(runs)
                ]
                share = statistics.fmean(winner == 2 for winner, _ in outcomes)
                launches = statistics.fmean(num_launches for _, num_launches in outcomes)
                cells.append(f"{gain:.2f}x: {share:.1%} after {launches:.1f} launches")
            print(
                f"launches {noise:.0%} apart, the faster of two, {kind}, wins: {'; '.join(cells)}", flush=True
            )


def sequential_rates(gains: Sequence[float], *, model: str, noise: float, runs: int, rounds: int) -> Rates:
    """The rates of the final rounds as they are."""
    plans = {number: _baseline() for number in range(1, len(gains) + 1)}
    outcomes = [
        winner_and_launches(
            dict(enumerate(gains, 1)), plans=plans, model=model, noise=noise, seed=seed, rounds=rounds
        )
        for seed in range(runs)
    ]
    return _rates([(None if winner is None else winner - 1, num) for winner, num in outcomes], gains)


def fixed_rates(gains: Sequence[float], *, model: str, noise: float, runs: int, rounds: int) -> Rates:
    """The rates of rounds of a fixed number."""
    outcomes = []
    true_s = 1.0 / np.array((1.0, *gains))
    for seed in range(runs):
        generator = np.random.default_rng(seed)
        size = (len(true_s), MAX_EXTENDED * rounds)
        logs = noise_of(model, deviation=noise, size=size, generator=generator)
        result = fixed_rounds(true_s[:, None] * np.exp(logs), rounds=rounds, seed=seed)
        outcomes.append((result.winner, result.num_launches))
    return _rates(outcomes, gains)


def _rates(outcomes: Sequence[tuple[int | None, int]], gains: Sequence[float]) -> Rates:
    return Rates(
        wins=statistics.fmean(winner is not None for winner, _ in outcomes),
        fastest=statistics.fmean(
            winner is not None and gains[winner] == max(gains) for winner, _ in outcomes
        ),
        launches=statistics.fmean(num_launches for _, num_launches in outcomes),
    )


def winner_of_rivals(
    gain: float, plan: Plan, *, noise: float, seed: int, rounds: int
) -> tuple[int | None, int]:
    """The winner and the number of launches; 2 is `plan`, faster by `gain` than 1, which beats trial 0."""
    gains, plans = {1: SLOWER, 2: SLOWER * gain}, {1: _baseline(), 2: plan}
    return winner_and_launches(gains, plans=plans, model="normal", noise=noise, seed=seed, rounds=rounds)


def _rival(*, is_other_model: bool, is_custom: bool) -> Plan:
    plan = _baseline()
    if is_other_model:
        plan = replace(plan, shape=replace(plan.shape, num_query_groups=1))
    if is_custom:
        stages = plan.layout.num_stages
        order = named("zb-h1", num_devices=stages, num_microbatches=plan.num_microbatches)
        times, nothing = np.ones(stages), np.zeros(stages)
        costs = StageCosts(
            device_of_stage=np.arange(stages),
            forward_s=times,
            input_grad_s=times,
            weight_grad_s=times,
            backward_s=2.0 * times,
            activation_bytes=times,
            held_fraction=0.5,
            forward_transfer_s=nothing,
            backward_transfer_s=nothing,
        )
        plan = replace(plan, schedule=ScheduleChoice(name="custom", custom=choice_of(order, costs)))
    return plan


def winner_and_launches(
    gains: Mapping[int, float],
    *,
    plans: Mapping[int, Plan],
    model: str,
    noise: float,
    seed: int,
    rounds: int,
) -> tuple[int | None, int]:
    """The trial that won of those with these gains over the baseline, and the launches that took."""
    baseline = _baseline()
    baseline_score = BaselineScore(
        plan=baseline, score=score(baseline, iteration_s=(1.0,)), objective="tokens_per_s"
    )
    record = TrialRecord(verdict="measured", outcome="ok", reason="", attempt_id="", value=1.0)
    launcher = NoisyLauncher(gains=gains, model=model, deviation=noise, seed=seed)
    study = StudyConfig(rounds=rounds, top_k=len(gains), seed=seed)
    folder = RunFolder(path=Path("no run"))
    context = SimpleNamespace(
        run=SimpleNamespace(config=SimpleNamespace(study=study), folder=folder),
        budget=TimeBudget(limit_s=None, clock=lambda: 0.0),
        observer=Silent(),
        events=SimpleNamespace(add=lambda *_, **__: None),
    )
    finals = FinalRounds(
        context=cast(TuningContext, context),
        launcher=cast(TrialLauncher, launcher),
        baseline=baseline_score,
    )
    trials = [FinishedTrial(number=number, plan=plan, record=record) for number, plan in plans.items()]
    # Intervals of seconds are only shown.
    few_samples = functools.partial(finalists.bootstrap_median, num_resamples=40)
    with patch.object(finalists, "bootstrap_median", few_samples):
        winner = winner_of(finals.measure(trials))
    return None if winner is None else winner.trial.number, launcher.num_launches


@functools.cache
def _baseline() -> Plan:
    return small_baseline()


if __name__ == "__main__":
    main()
