"""How often the final rounds hand over a plan, by its true gain: `python -m benchmarks.final_rounds`.

The final rounds run as in `quartet tune`; a launch takes the plan's true time, with noise between launches on
it. Of equal plans none should win, of faster ones all. Of two plans that beat the baseline the faster should,
but another model hardly ever without a true gain.
"""

import argparse
import functools
import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from benchmarks.search_cost.grounds import small
from benchmarks.search_cost.replay import Silent
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord, score
from quartet_plugin.trial.request import Outcome, TrialResult
from quartet_plugin.tuner.config import StudyConfig
from quartet_plugin.tuner.context import TimeBudget, TuningContext
from quartet_plugin.tuner.final_rounds import FinalRounds, winner_of
from quartet_plugin.tuner.finalists import BASELINE
from quartet_plugin.tuner.trial_launcher import BaselineScore, TrialLaunch, TrialLauncher

NOISES = (0.02, 0.05, 0.1, 0.14)
GAINS = (1.0, 1.05, 1.2, 1.4)
# Of two plans: the slower's gain over the baseline, and the faster's over it.
SLOWER = 1.4
RIVAL_GAINS = (1.0, 1.03, 1.05, 1.1, 1.2)


class NoisyLauncher:
    """A machine on which the baseline takes a second, other trials less by their `gains`."""

    def __init__(self, *, gains: Mapping[int, float], noise: float, seed: int) -> None:
        self._gains, self._noise = gains, noise
        self._generator = random.Random(seed)
        self.num_rounds = 0

    def launch(self, launch: TrialLaunch, *, num_left: int) -> TrialResult:
        """One launch of three equal iterations."""
        del num_left
        number, folder = launch.number, launch.folder
        self.num_rounds += number == BASELINE
        seconds = math.exp(self._generator.gauss(0.0, self._noise))
        seconds /= 1.0 if number == BASELINE else self._gains[number]
        return TrialResult(
            attempt_id="",
            plan_key=None,
            outcome=Outcome.OK,
            reason="",
            phase="done",
            iteration_s=(seconds,) * 3,
            peak_memory_bytes=1,
            folder=folder,
        )


def main() -> None:
    """Print, for every noise and gain, how often the plan won and after how many rounds it was decided."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for noise in NOISES:
        cells = []
        for gain in GAINS:
            found = [decided(gain, noise=noise, seed=at, rounds=options.rounds) for at in range(options.runs)]
            wins = statistics.fmean(is_win for is_win, _ in found)
            cells.append(f"{gain:.2f}x: {wins:.1%} in {statistics.fmean(num for _, num in found):.1f} rounds")
        print(f"launches {noise:.0%} apart: {'; '.join(cells)}", flush=True)
    for noise in NOISES:
        cells = []
        for gain in RIVAL_GAINS:
            shares = [
                statistics.fmean(
                    faster_wins(gain, is_other_model=is_other, noise=noise, seed=seed, rounds=options.rounds)
                    for seed in range(options.runs)
                )
                for is_other in (False, True)
            ]
            cells.append(f"{gain:.2f}x: {shares[0]:.1%}, {shares[1]:.1%} as another model")
        print(f"launches {noise:.0%} apart, the faster of two wins: {'; '.join(cells)}", flush=True)


def decided(gain: float, *, noise: float, seed: int, rounds: int) -> tuple[bool, int]:
    """Whether a plan that is faster by `gain` won, and the rounds that took."""
    winner, num_rounds = winner_and_rounds(
        {1: gain}, plans={1: _baseline()}, noise=noise, seed=seed, rounds=rounds
    )
    return winner is not None, num_rounds


def faster_wins(gain: float, *, is_other_model: bool, noise: float, seed: int, rounds: int) -> bool:
    """Whether a plan that is faster by `gain` than another, which beats the baseline, is the winner."""
    faster = _baseline()
    if is_other_model:
        faster = replace(faster, shape=replace(faster.shape, num_query_groups=1))
    gains, plans = {1: SLOWER, 2: SLOWER * gain}, {1: _baseline(), 2: faster}
    return winner_and_rounds(gains, plans=plans, noise=noise, seed=seed, rounds=rounds)[0] == 2


def winner_and_rounds(
    gains: Mapping[int, float], *, plans: Mapping[int, Plan], noise: float, seed: int, rounds: int
) -> tuple[int | None, int]:
    """The trial that won of those with these gains over the baseline, and the rounds that took."""
    baseline = _baseline()
    baseline_score = BaselineScore(
        plan=baseline, score=score(baseline, iteration_s=(1.0,)), objective="tokens_per_s"
    )
    record = TrialRecord(verdict="measured", outcome="ok", reason="", attempt_id="", value=1.0)
    launcher = NoisyLauncher(gains=gains, noise=noise, seed=seed)
    study = StudyConfig(rounds=rounds, top_k=len(gains), seed=seed)
    folder = SimpleNamespace(final_launch=lambda *_, **__: Path())
    context = SimpleNamespace(
        run=SimpleNamespace(config=SimpleNamespace(study=study), folder=folder),
        budget=TimeBudget(limit_s=None, clock=lambda: 0.0),
        observer=Silent(),
    )
    finals = FinalRounds(
        context=cast(TuningContext, context),
        launcher=cast(TrialLauncher, launcher),
        baseline=baseline_score,
    )
    trials = [FinishedTrial(number=number, plan=plan, record=record) for number, plan in plans.items()]
    winner = winner_of(finals.measure(trials))
    return None if winner is None else winner.trial.number, launcher.num_rounds


@functools.cache
def _baseline() -> Plan:
    return small().space.baseline


if __name__ == "__main__":
    main()
