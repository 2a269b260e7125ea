"""The sequential test of the final rounds: the finalists that are faster than the baseline, and when to stop.

The logarithm of a launch is its plan's effect, its round's and noise, fitted by least squares over all
launches, so that plans are compared inside of rounds, also where some have left. After every round:

- A finalist is *proven* where Student's test of its gain over the baseline passes `level`, and with it the
  test of every set of finalists that it belongs to (a closed test, Marcus, Peritz and Gabriel 1976). A set of
  m passes where the finalist by itself passes `level` / 2m, or the mean of the set passes `level` / 2.
- A finalist is *dropped* where the rounds that are left are unlikely to prove it, or where it is unlikely to
  be the best of those left; later where the leader departs further from the user's command (`departures`).
- The rounds are over where the leader is proven and no other finalist is expected to gain more than
  `NEGLIGIBLE`.

A finalist may join later than others: its own rounds count for what it needs, and nothing is over before it
has enough of them.

`level` is chosen so that, of three finalists as fast as the baseline, one is proven in less than 2 % of all
searches (`python -m benchmarks.final_rounds`). It depends on the round alone, so a run that goes on, or is
given more rounds, keeps its decisions.
"""

import itertools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import scipy
from numpy.typing import NDArray

BASELINE = 0
# A proof needs three rounds: of two a single slow launch decides.
MIN_ROUNDS = 3
# A finalist may leave after two.
FIRST_LOOK = 2

# The level of one finalist's test after five rounds; a later test has less, and after three times as many
# rounds so much less that any number of them adds little.
LEVEL = 0.0095
_LEVEL_ROUNDS = 5

# A finalist with a smaller chance of a proof is dropped, and one with a smaller chance to be the best.
LEAST_CHANCE_OF_PROOF = 0.15
LEAST_CHANCE_OF_BEST = 0.25
# The rounds that decide between a leader and a finalist that departs less (see `departures`).
CAREFUL_ROUNDS = 5
# With fewer of them such a finalist leaves only where its chance to be the best is smaller than this: two
# rounds may tell little of the noise.
LEAST_CHANCE_EARLY = 0.01
# The gain, relative, that another finalist may be expected to have over a proven leader that ends the rounds.
NEGLIGIBLE = 0.02
# Launches deviate by this at least, relative.
LEAST_NOISE = 0.003

type FloatArray = NDArray[np.float64]


def level(num_rounds: int) -> float:
    """The level of a finalist's test after `num_rounds` rounds."""
    return LEVEL * math.sqrt(_LEVEL_ROUNDS / num_rounds) * min(1.0, 3 * _LEVEL_ROUNDS / num_rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """Logarithms of the plans' objectives, relative to each other, by least squares.

    `covariance` is that of `effects`, in variances of a launch; `noise` is a launch's deviation, estimated
    with `freedom` degrees of freedom. Plans are in the order of `index`.
    """

    index: Mapping[int, int]
    effects: FloatArray
    covariance: FloatArray
    noise: float
    freedom: int

    def contrast(self, weights: Mapping[int, float]) -> tuple[float, float]:
        """The weighted sum of effects, whose weights add up to 0, and its standard error."""
        vector = np.zeros(len(self.effects))
        for number, weight in weights.items():
            vector[self.index[number]] += weight
        variance = float(vector @ self.covariance @ vector)
        return float(vector @ self.effects), self.noise * math.sqrt(max(variance, 1e-12))

    def difference(self, first: int, second: int) -> tuple[float, float]:
        """The logarithm of the first plan's objective over the second's, and its standard error."""
        return self.contrast({first: 1.0, second: -1.0})

    def chance(self, first: int, second: int) -> float:
        """The probability that the first plan is the faster (Student's t)."""
        gain, error = self.difference(first, second)
        return float(scipy.special.stdtr(self.freedom, gain / error))

    def interval(self, first: int, second: int, *, confidence: float = 0.95) -> tuple[float, float]:
        """The confidence interval of `difference`."""
        gain, error = self.difference(first, second)
        half = float(scipy.special.stdtrit(self.freedom, 0.5 + 0.5 * confidence)) * error
        return gain - half, gain + half


def fit(values: Mapping[int, Mapping[int, float]]) -> Effects | None:
    """The effects of plans; `values[number][round]` are logarithms. None where the noise cannot be estimated.

    A round in which a single plan was measured says nothing.
    """
    numbers = sorted(number for number, by_round in values.items() if by_round)
    rounds = sorted({index for by_round in values.values() for index in by_round})
    measured = np.array([[index in values[number] for index in rounds] for number in numbers], dtype=float)
    table = np.array([[values[number].get(index, 0.0) for index in rounds] for number in numbers])
    if len(numbers) < 2 or not rounds:
        return None
    per_round = measured.sum(axis=0)
    freedom = int(measured.sum()) - len(rounds) - len(numbers) + 1
    if freedom < 1:
        return None
    information = np.diag(measured.sum(axis=1)) - (measured / per_round) @ measured.T
    inside = np.where(measured > 0, table - table.sum(axis=0) / per_round, 0.0)
    covariance = np.linalg.pinv(information, rcond=1e-9, hermitian=True)
    effects = covariance @ inside.sum(axis=1)
    left = np.where(measured > 0, table - effects[:, None], 0.0)
    residuals = np.where(measured > 0, left - left.sum(axis=0) / per_round, 0.0)
    noise = math.sqrt(float((residuals**2).sum()) / freedom)
    return Effects(
        index={number: position for position, number in enumerate(numbers)},
        effects=effects,
        covariance=covariance,
        noise=max(noise, LEAST_NOISE),
        freedom=freedom,
    )


@dataclass(slots=True, kw_only=True)
class SequentialTest:
    """The decisions so far. `live` finalists and the baseline are launched in the next round.

    `num_rounds` are planned, after `max_rounds` the test ends whatever is known.
    `least_gains` are logarithms by which a finalist must lead to be chosen: over the baseline, and over each
    finalist whose own least gain is smaller. `departures` say how far a finalist departs from the user's
    command, 0 where it has none; one that departs less than the leader stays while its chance to be the best
    is at least `careful_chance`. `first_rounds` has the round, from 0, in which a finalist joins; 0 where it
    has none. `proven` and `dropped` are numbers of rounds by finalist.
    """

    finalists: Sequence[int]
    num_rounds: int
    max_rounds: int
    least_gains: Mapping[int, float] = field(default_factory=dict)
    departures: Mapping[int, int] = field(default_factory=dict)
    careful_chance: float = LEAST_CHANCE_OF_BEST
    first_rounds: Mapping[int, int] = field(default_factory=dict)
    live: list[int] = field(init=False)
    proven: dict[int, int] = field(init=False, default_factory=dict)
    dropped: dict[int, int] = field(init=False, default_factory=dict)
    leader: int | None = field(init=False, default=None)
    is_over: bool = field(init=False, default=False)
    effects: Effects | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.live = list(self.finalists)
        self.is_over = not self.live

    def decide(
        self, values: Mapping[int, Mapping[int, float]], *, num_done: int, failed: Set[int] = frozenset()
    ) -> None:
        """Decide after `num_done` rounds; `values[number][round]` are logarithms of the objective.

        Finalists of `failed` are out, proven or not.
        """
        self.live = [number for number in self.live if number not in failed]
        self.proven = {number: rounds for number, rounds in self.proven.items() if number not in failed}
        seen = {
            number: {index: value for index, value in by_round.items() if index < num_done}
            for number, by_round in values.items()
        }
        self.effects = fit(seen) if num_done >= FIRST_LOOK else None
        if self.effects is not None and BASELINE in self.effects.index:
            measured = self._looked_at(self.effects, num_done=num_done)
            paired = [
                number
                for number in measured
                if len(seen[number].keys() & seen[BASELINE].keys()) >= MIN_ROUNDS
            ]
            self._prove(self.effects, paired, num_done=num_done)
            self._drop_unprovable(self.effects, measured, num_done=num_done)
            self._drop_behind(self.effects, num_done=num_done)
            self.is_over = self._is_decided(self.effects, num_done=num_done)
        self.is_over = self.is_over or not self.live or num_done >= self.max_rounds

    def num_rounds_expected(self, *, num_done: int) -> int:
        """The number of rounds in all where those to come say what those before say."""
        if self.is_over:
            return num_done
        if self.effects is None or self.leader is None:
            return max(num_done, self.num_rounds)
        gain, error = self.effects.difference(self.leader, BASELINE)
        num_own = self._num_own(self.leader, num_done)
        least = num_done + 1
        if any(map(self._needs_care, self.live)):
            least = max(least, self.latest_first_round + CAREFUL_ROUNDS)
        for num_rounds in range(least, self.max_rounds):
            score = gain / error * math.sqrt(1.0 + (num_rounds - num_done) / num_own)
            if float(scipy.special.stdtr(self.effects.freedom, -score)) <= self._family_level(num_rounds):
                return num_rounds
        return self.max_rounds

    def participants(self, round_number: int) -> list[int]:
        """The live finalists that take part in a round, counted from 0."""
        return [number for number in self.live if self._num_own(number, round_number) >= 0]

    @property
    def latest_first_round(self) -> int:
        """The latest round, from 0, in which a live finalist joins."""
        return max((self.first_rounds.get(number, 0) for number in self.live), default=0)

    def _num_own(self, number: int, num_done: int) -> int:
        """The rounds, of `num_done`, since the finalist joined; below 0 where it has not yet."""
        return num_done - self.first_rounds.get(number, 0)

    def _looked_at(self, effects: Effects, *, num_done: int) -> list[int]:
        """The live finalists that were measured and have rounds enough to leave or to lead."""
        return [
            number
            for number in self.live
            if number in effects.index and self._num_own(number, num_done) >= FIRST_LOOK
        ]

    # Proof

    def _prove(self, effects: Effects, paired: Sequence[int], *, num_done: int) -> None:
        """Add to the proven; `paired` were measured with the baseline in rounds enough."""
        family = [number for number in self.finalists if number in effects.index]
        slowest_first = sorted(family, key=lambda number: (effects.difference(number, BASELINE)[0], number))
        for number in paired:
            if number not in self.proven and self._is_proven(
                number, effects, slowest_first, level_now=level(num_done)
            ):
                self.proven[number] = num_done

    def _is_proven(
        self, number: int, effects: Effects, slowest_first: Sequence[int], *, level_now: float
    ) -> bool:
        """Whether every set of finalists with `number` is faster: of each size that of the slowest others."""
        chance = _p_value(effects, {number: 1.0, BASELINE: -1.0})
        if chance > level_now:
            return False
        others = [other for other in slowest_first if other != number]
        for size in range(2, len(self.finalists) + 1):
            if chance <= level_now / (2 * size):
                continue
            members = [number, *others[: size - 1]]
            weights: dict[int, float] = {BASELINE: -1.0, **dict.fromkeys(members, 1.0 / len(members))}
            if _p_value(effects, weights) > level_now / 2:
                return False
        return True

    def _family_level(self, num_rounds: int) -> float:
        """The level that a finalist passes without the others' help."""
        size = len(self.finalists)
        return level(num_rounds) / (2 * size if size > 1 else 1)

    # Who leaves

    def _drop_unprovable(self, effects: Effects, measured: Sequence[int], *, num_done: int) -> None:
        """Drop finalists that the rounds left are unlikely to prove, or to show the gain that they need."""
        for number in measured:
            gain, error = effects.difference(number, BASELINE)
            if number not in self.proven:
                chance = self._chance_of_proof(number, gain / error, effects.freedom, num_done=num_done)
                is_enough = self._num_own(number, num_done) >= MIN_ROUNDS
                if is_enough and chance < LEAST_CHANCE_OF_PROOF:
                    self._drop(number, num_done)
                    continue
            least = self._least_gain(number)
            short = (least - gain) / error
            if least and float(scipy.special.stdtr(effects.freedom, -short)) < LEAST_CHANCE_OF_PROOF:
                self._drop(number, num_done)

    def _chance_of_proof(self, number: int, statistic: float, freedom: int, *, num_done: int) -> float:
        """The chance that the last round proves it, by what is known of its gain (predictive power)."""
        if num_done >= self.max_rounds:
            return 0.0
        score = -float(scipy.special.ndtri(max(float(scipy.special.stdtr(freedom, -statistic)), 1e-300)))
        share = self._num_own(number, num_done) / self._num_own(number, self.max_rounds)
        needed = -float(scipy.special.ndtri(level(self.max_rounds) / len(self.finalists)))
        return float(scipy.special.ndtr((score - needed * math.sqrt(share)) / math.sqrt(1.0 - share)))

    def _drop_behind(self, effects: Effects, *, num_done: int) -> None:
        """Drop finalists that are unlikely to be the best of those left; the leader is set."""
        ranked = self._looked_at(effects, num_done=num_done)
        self.leader = max(ranked, key=lambda number: (self._gain_over_least(number), -number), default=None)
        if self.leader is None:
            return
        for number in ranked:
            if number == self.leader:
                continue
            behind, error = self._behind_leader(number, effects)
            chance = float(scipy.special.stdtr(effects.freedom, -behind / error))
            if chance < self._least_chance(number, num_done):
                self._drop(number, num_done)

    def _least_chance(self, number: int, num_done: int) -> float:
        """The chance to be the best below which a finalist is dropped."""
        assert self.leader is not None
        if not self._needs_care(number):
            return LEAST_CHANCE_OF_BEST
        if self._is_careful_enough(number, num_done):
            return self.careful_chance
        return 0.0 if self._takes_gain(number) else LEAST_CHANCE_EARLY

    def _needs_care(self, number: int) -> bool:
        """Whether the leader departs further than this finalist."""
        return self.leader is not None and self._departure(number) < self._departure(self.leader)

    def _takes_gain(self, number: int) -> bool:
        """Whether the leader needs a gain over this finalist, not only a chance to be faster."""
        return self.leader is not None and self._least_gain(number) < self._least_gain(self.leader)

    def _is_careful_enough(self, number: int, num_done: int) -> bool:
        """Whether the finalist and the leader have the rounds that a clear gain needs."""
        assert self.leader is not None
        return min(self._num_own(each, num_done) for each in (number, self.leader)) >= CAREFUL_ROUNDS

    def _is_decided(self, effects: Effects, *, num_done: int) -> bool:
        """Whether the leader is proven, has the gain that it needs, and no other is expected to gain more."""
        leader = self.leader
        if leader is None or leader not in self.proven:
            return False
        if effects.difference(leader, BASELINE)[0] < self._least_gain(leader):
            return False
        if any(self._num_own(number, num_done) < MIN_ROUNDS for number in self.live):
            return False
        compared = {*self.live, *filter(self._takes_gain, self.proven)}
        if any(self._needs_care(each) and not self._is_careful_enough(each, num_done) for each in compared):
            return False
        others = [number for number in self.live if number != leader and number in effects.index]
        return all(self._costs_little(other, effects) for other in others)

    def _costs_little(self, number: int, effects: Effects) -> bool:
        """Whether little is expected to be lost by the choice between the leader and this finalist.

        What departs less than the leader is chosen where the leader is not clearly faster.
        """
        behind, error = self._behind_leader(number, effects)
        if self._needs_care(number) and not self._takes_gain(number):
            return _expected_excess(-behind, error) <= NEGLIGIBLE
        return _expected_excess(behind, error) <= NEGLIGIBLE

    def _behind_leader(self, number: int, effects: Effects) -> tuple[float, float]:
        assert self.leader is not None
        lead, error = effects.difference(self.leader, number)
        return lead - self._least_gain(self.leader) + self._least_gain(number), error

    def _gain_over_least(self, number: int) -> float:
        assert self.effects is not None
        return self.effects.difference(number, BASELINE)[0] - self._least_gain(number)

    def _least_gain(self, number: int) -> float:
        return self.least_gains.get(number, 0.0)

    def _departure(self, number: int) -> int:
        return self.departures.get(number, 0)

    def _drop(self, number: int, num_done: int) -> None:
        self.live.remove(number)
        self.dropped[number] = num_done


def replayed(
    test: SequentialTest, values: Mapping[int, Mapping[int, float]], *, failed: Mapping[int, int]
) -> SequentialTest:
    """The test after all rounds of `values`, one look after the other; `failed` has the round of each."""
    num_rounds = 1 + max(itertools.chain(failed.values(), *values.values()), default=-1)
    for num_done in range(1, num_rounds + 1):
        if test.is_over:
            break
        out = {number for number, failed_in in failed.items() if failed_in < num_done}
        test.decide(values, num_done=num_done, failed=out)
    return test


def _p_value(effects: Effects, weights: Mapping[int, float]) -> float:
    """The p-value, one-sided, of a contrast above 0."""
    gain, error = effects.contrast(weights)
    return float(scipy.special.stdtr(effects.freedom, -gain / error))


def _expected_excess(behind: float, error: float) -> float:
    """The mean of the lead, at least 0, of a plan that is `behind` the leader with this standard error."""
    score = behind / error
    density = math.exp(-0.5 * score * score) / math.sqrt(2.0 * math.pi)
    return error * (density - score * float(scipy.special.ndtr(-score)))
