"""Optuna's samplers for a fixed space, on a space whose parameters depend on each other.

Gaussian processes, quasi-Monte Carlo and genetic algorithms want every trial to have every parameter; where
one does not they draw at random. Here parameters that always occur together are a group, as in Optuna's TPE,
and each group has its study in memory, made of the finished trials that have it. So the sampler sees a fixed
space, writes nothing into the run's study, and its proposals follow from the finished trials alone.
"""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, QMCSampler, RandomSampler
from optuna.samplers.nsgaii import BLXAlphaCrossover
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

type Group = tuple[dict[str, BaseDistribution], list[FrozenTrial]]

# The excess of a plan that does not fit is in bytes, which say nothing about plans that were refused.
_INFEASIBLE = "infeasible"
# Optuna's own probability, one over the number of parameters, would leave nothing of a group of one.
MUTATION = 0.2


class GroupedSampler(BaseSampler):  # type: ignore[misc]  # Optuna is read as untyped here
    """One trial's sampler; `study_seed` is the same for all trials of a study.

    Groups with fewer than `num_startup_trials` finished trials, and parameters that no trial had, are
    drawn at random.
    """

    def __init__(
        self, name: Literal["gp", "qmc", "nsga2"], *, seed: int, study_seed: int, num_startup_trials: int
    ) -> None:
        self._name = name
        self._seed = seed
        self._study_seed = study_seed
        self._num_startup_trials = num_startup_trials
        self._least = 1 if name == "qmc" else num_startup_trials
        self._random = RandomSampler(seed=seed)

    def reseed_rng(self) -> None:
        """Seeds are given: one process a study."""

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All parameters of the groups that have enough trials."""
        del trial
        return {
            name: distribution for space, _ in self._groups(study) for name, distribution in space.items()
        }

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A value for each of them, each group by itself."""
        del trial
        params: dict[str, Any] = {}
        for space, trials in self._groups(study):
            if space.keys() <= search_space.keys():
                params |= self._sample(space, trials, direction=study.direction)
        return params

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A value drawn at random, for a parameter that no group has."""
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def _groups(self, study: Study) -> list[Group]:
        complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return [group for group in groups_of(complete) if len(group[1]) >= self._least]

    def _sample(
        self, space: Mapping[str, BaseDistribution], trials: Sequence[FrozenTrial], *, direction: Any
    ) -> dict[str, Any]:
        """The sampler's proposal from the finished trials, restricted to one group of parameters."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            inner = optuna.create_study(direction=direction, sampler=self._inner(space))
        if self._name == "qmc":
            # The sequence goes on with every finished trial; the first only says which space it is in.
            inner.add_trial(self._part(trials[0], space, constraints=None, index=0))
            for _ in trials[1:]:
                inner.ask(fixed_distributions=dict(space))
        else:
            any_excess = any(_excess(trial) > 0 for trial in trials)
            for index, trial in enumerate(trials):
                constraints = {_INFEASIBLE: 1.0 if _excess(trial) > 0 else -1.0} if any_excess else None
                inner.add_trial(self._part(trial, space, constraints=constraints, index=index))
        return dict(inner.ask(fixed_distributions=dict(space)).params)

    def _part(
        self,
        trial: FrozenTrial,
        space: Mapping[str, BaseDistribution],
        *,
        constraints: dict[str, float] | None,
        index: int,
    ) -> FrozenTrial:
        """One group's part of a trial; generations are counted in the order of the finished trials."""
        attributes = {}
        if self._name == "nsga2":
            attributes[NSGAIISampler._get_generation_key()] = index // self._num_startup_trials
        return create_trial(
            value=trial.value,
            params={name: trial.params[name] for name in space},
            distributions=dict(space),
            system_attrs=attributes,
            constraints=constraints,
        )

    def _inner(self, space: Mapping[str, BaseDistribution]) -> BaseSampler:
        text = f"{self._seed}/{','.join(space)}".encode()
        seed = int.from_bytes(hashlib.sha256(text).digest()[:4], "big")
        if self._name == "gp":
            return GPSampler(
                seed=seed, n_startup_trials=self._num_startup_trials, warn_independent_sampling=False
            )
        if self._name == "nsga2":
            return NSGAIISampler(
                seed=seed,
                population_size=self._num_startup_trials,
                mutation_prob=MUTATION,
                crossover=BLXAlphaCrossover(),
            )
        return QMCSampler(
            seed=self._study_seed,
            scramble=True,
            independent_sampler=RandomSampler(seed=seed),
            warn_independent_sampling=False,
        )


def groups_of(trials: Sequence[FrozenTrial]) -> list[Group]:
    """The parameters that occur in the same of `trials`, with these, in a fixed order.

    A parameter with one name and several distributions is in no group.
    """
    members: dict[str, list[int]] = {}
    distributions: dict[str, BaseDistribution] = {}
    mixed: set[str] = set()
    for index, trial in enumerate(trials):
        for name, distribution in trial.distributions.items():
            members.setdefault(name, []).append(index)
            if distributions.setdefault(name, distribution) != distribution:
                mixed.add(name)
    groups: dict[tuple[int, ...], dict[str, BaseDistribution]] = {}
    for name in sorted(members.keys() - mixed):
        groups.setdefault(tuple(members[name]), {})[name] = distributions[name]
    return [(space, [trials[index] for index in key]) for key, space in groups.items()]


def _excess(trial: FrozenTrial) -> float:
    return max(trial.constraints.values(), default=0.0)
