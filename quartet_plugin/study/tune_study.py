"""The Optuna study of a run: asked for plans, given their records, resumable exactly.

The sampler is seeded anew for every trial from the study's seed and the trial's number, so proposals depend
on the finished trials alone, not on how often the tuner was restarted. Only the coordinator writes here.
"""

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quartet_plugin.errors import StorageError
from quartet_plugin.model.canonical import derived_seed
from quartet_plugin.model.measurement import Objective
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.plan_axes import plan_axes
from quartet_plugin.model.trial_record import REFUSED_EXCESS, FinishedTrial, TrialRecord
from quartet_plugin.space.param_sources import FixedParams, Params, RandomParams
from quartet_plugin.space.plan_space import Space
from quartet_plugin.study.samplers import DEFAULT, SamplerName, make
from quartet_plugin.study.storage import StudyStorage, close
from quartet_plugin.study.study_log import StudyLog
from quartet_plugin.study.trial_params import TrialParams, parted, recorded_params

MAX_FRESH_TRIES = 400

# What a restored study has in the place of a trial that its log does not name: it repeats nothing new.
_UNKNOWN = TrialRecord(
    verdict="lost",
    outcome="INFRA",
    reason="its record was lost with the study",
    attempt_id="",
    repeats=0,
)

# The user attributes of a trial, and the mark of a study that was made to its end.
TOLD = "told"
PLAN = "plan"
COMPLETE = "complete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A trial that was asked for and is not finished; see `TrialRecord` for its prediction.

    `params` are the choices that led to its plan.
    """

    number: int
    plan: Plan
    trial: Any
    params: Params = field(default_factory=dict)
    predicted_s: float | None = None
    predicted_spread: float | None = None


class TuneStudy:
    """One run's study; every Optuna tool can open it. Close it when done."""

    def __init__(
        self,
        study: Any,
        storage: Any,
        *,
        where: StudyStorage,
        space: Space,
        seed: int,
        sampler: SamplerName,
    ) -> None:
        self._study = study
        self._storage = storage
        self._where = where
        self._space = space
        self._seed = seed
        self._sampler = sampler
        self._finished: dict[int, FinishedTrial] = {}
        self._open: set[int] = set()  # given out and not finished

    @classmethod
    def create(
        cls,
        where: StudyStorage,
        *,
        space: Space,
        seed: int,
        objective: Objective,
        baseline: TrialRecord,
        starts: Sequence[Params],
        earlier_trials: Sequence[tuple[Params, TrialRecord]] = (),
        sampler: SamplerName = DEFAULT,
        log: StudyLog | None = None,
    ) -> "TuneStudy":
        """Make the study: the baseline measured as trial 0, `earlier_trials` finished, `starts` waiting.

        The trials of a `log` keep their numbers. A study that was not made to its end lacks the mark, and
        `open` does not take it.
        """
        with where.errors():
            where.begin()
            made = cls._connect(where, space=space, seed=seed, sampler=sampler, is_new=True)
            made._study.set_user_attr("objective", objective)
            params = space.params_of(space.baseline)
            if params is not None:
                made._enqueue(params, space.baseline)
            trial = made._study.ask()
            if params is not None:
                space.decode(TrialParams(trial), trial=0)
            made.tell(Proposal(number=trial.number, plan=space.baseline, trial=trial), baseline)
            for point, record in earlier_trials:
                made._enqueue(point, made._plan_of(point))
                made.tell(made.ask(), record)
            for point in starts:
                made._enqueue(point, made._plan_of(point))
            made._restore(StudyLog() if log is None else log)
            made._study.set_user_attr(COMPLETE, True)
        return made

    def _restore(self, log: StudyLog) -> None:
        """Ask for the trials of a log by number, then tell their records in the log's order.

        A number that the log lacks and no start has becomes a trial that was lost.
        """
        known = self._optuna_trials()
        proposals: dict[int, Proposal] = {}
        for number in range(len(self._finished), max(log.trials, default=-1) + 1):
            if number >= len(known):
                logged = log.trials.get(number) or next(iter(log.trials.values()))
                self._enqueue(logged.params, self._plan_of(logged.params))
            proposals[number] = self.ask()
        for number, logged in log.trials.items():
            if logged.record is not None and number in proposals:
                self.tell(proposals[number], logged.record)
        for number, proposal in proposals.items():
            if number not in log.trials and number >= len(known):
                self.tell(proposal, _UNKNOWN)
            self._open.discard(number)

    @property
    def num_unknown(self) -> int:
        """Trials of a restored study that its log did not name."""
        return sum(trial.record.reason == _UNKNOWN.reason for trial in self._finished.values())

    def lacks(self, log: StudyLog) -> bool:
        """Whether a trial that the log has finished is not finished here."""
        return not log.finished <= self._finished.keys()

    @classmethod
    def open(
        cls,
        where: StudyStorage,
        *,
        space: Space,
        seed: int,
        sampler: SamplerName = DEFAULT,
    ) -> "TuneStudy | None":
        """Go on with the study in `where`; None where it was not made to its end.

        Raises StorageError when it cannot be read.
        """
        if not where.exists:
            return None
        where.mend()
        with where.errors():
            try:
                opened = cls._connect(where, space=space, seed=seed, sampler=sampler)
            except KeyError:
                return None  # the schema is there, the study is not yet
            if not opened._study.user_attrs.get(COMPLETE):
                opened.close()
                return None
            opened._read_finished()
            return opened

    @classmethod
    def _connect(
        cls, where: StudyStorage, *, space: Space, seed: int, sampler: SamplerName, is_new: bool = False
    ) -> "TuneStudy":
        import optuna

        storage, name = where.connect(), where.study_name
        if is_new:
            with contextlib.suppress(KeyError):
                optuna.delete_study(storage=storage, study_name=name)  # one that was not made to its end
            study = optuna.create_study(storage=storage, study_name=name, direction="maximize")
        else:
            study = optuna.load_study(storage=storage, study_name=name)
        return cls(study, storage, where=where, space=space, seed=seed, sampler=sampler)

    def close(self) -> None:
        """Let go of the file."""
        close(self._storage)

    def trials(self) -> list[FinishedTrial]:
        """Every finished trial, in order."""
        return [self._finished[number] for number in sorted(self._finished)]

    def _read_finished(self) -> None:
        """Read the finished trials once; afterwards this object tracks them, as it is the only writer."""
        for frozen in self._optuna_trials():
            if frozen.state.is_finished():
                self._finished[frozen.number] = self._finished_trial(frozen)

    def unfinished(self) -> Proposal | None:
        """A trial that an earlier process asked for and did not live to tell; each is given once."""
        import optuna

        for frozen in self._optuna_trials():
            if frozen.state == optuna.trial.TrialState.RUNNING and frozen.number not in self._open:
                return self._proposal(optuna.trial.Trial(self._study, frozen._trial_id))
        return None

    def ask(self) -> Proposal:
        """A new trial: a waiting point first, then the sampler's. A lost server is waited for."""
        return self._where.patiently(self._ask)

    def _ask(self, is_again: bool) -> Proposal:
        begun = self.unfinished() if is_again else None
        if begun is not None:
            return begun
        trials = self._optuna_trials()
        number = next((frozen.number for frozen in trials if frozen.state.name == "WAITING"), len(trials))
        self._reseed(number, "trial")
        with self._where.errors():
            return self._proposal(self._study.ask())

    @property
    def has_waiting(self) -> bool:
        """Whether a point waits: the next trial takes it. A lost server is waited for."""
        return any(frozen.state.name == "WAITING" for frozen in self._trials_patiently())

    def enqueue(self, point: Params, plan: Plan) -> None:
        """Let the next trial be `point`, which is `plan`'s.

        Asked for where none waits, a resumed study asks for it just so. A lost server is waited for.
        """
        self._where.patiently(lambda is_again: self._enqueue_once(point, plan, is_again=is_again))

    def _enqueue_once(self, point: Params, plan: Plan, *, is_again: bool) -> None:
        if is_again and any(frozen.state.name == "WAITING" for frozen in self._optuna_trials()):
            return  # the server did it before it was lost
        with self._where.errors():
            self._enqueue(point, plan)

    def _enqueue(self, point: Params, plan: Plan | None) -> None:
        """Let a point wait, in one transaction with its texts and, where known, the axes of its plan."""
        params, texts = parted(point)
        axes = {} if plan is None else dict(plan_axes(plan))
        self._study.enqueue_trial(params, user_attrs={**axes, **texts} or None)

    def _plan_of(self, point: Params) -> Plan | None:
        """The plan of a point; None where the sampler has parameters to add."""
        with contextlib.suppress(KeyError):
            return self._space.decode(FixedParams(point), trial=0)
        return None

    def enqueue_fresh(self, *, is_known: Callable[[Plan], bool]) -> bool:
        """Let the next trial be a random plan that is not known; False where none is found."""
        num_trials = len(self._trials_patiently())
        generator = random.Random(derived_seed(self._seed, num_trials, "fresh"))  # noqa: S311
        for _ in range(MAX_FRESH_TRIES):
            params = RandomParams(generator)
            plan = self._space.decode(params, trial=0)
            if not is_known(plan):
                self.enqueue(params.params, plan)
                return True
        return False

    def tell(self, proposal: Proposal, record: TrialRecord) -> TrialRecord:
        """Record the result of a proposal; returns the stored record, with the proposal's prediction.

        Telling a finished trial again changes nothing.

        A lost server is waited for; what was measured is in the trial's folder meanwhile.
        """
        if proposal.predicted_s is not None:
            record = replace(
                record, predicted_s=proposal.predicted_s, predicted_spread=proposal.predicted_spread
            )
        self._where.patiently(lambda is_again: self._tell(proposal, record, is_again=is_again))
        return record

    def _tell(self, proposal: Proposal, record: TrialRecord, *, is_again: bool) -> None:
        from optuna.trial import TrialState

        with self._where.errors():
            trial = proposal.trial
            if proposal.number in self._finished:
                return
            self._open.discard(proposal.number)
            finished = FinishedTrial(number=proposal.number, plan=proposal.plan, record=record)
            if is_again and self._optuna_trials()[proposal.number].state.is_finished():
                self._finished[proposal.number] = finished  # the server did it before it was lost
                return
            # Each attribute is a transaction with its own flush to the disk; a trial that was put before the
            # study has most of them already.
            named = trial.user_attrs
            for name, axis_value in plan_axes(proposal.plan).items():
                if name not in named:
                    trial.set_user_attr(name, axis_value)
            trial.set_user_attr(TOLD, asdict(record))
            trial.set_user_attr(PLAN, {"plan_key": proposal.plan.key, **labels_of(proposal.plan)})
            state = {"measured": TrialState.COMPLETE, "infeasible": TrialState.COMPLETE}.get(
                record.verdict, TrialState.PRUNED if record.verdict == "wrong" else TrialState.FAIL
            )
            if record.verdict != "lost" and not trial.constraints:
                trial.set_constraint(_constraint_name(record), record.excess)
            value = record.value
            if record.verdict == "infeasible":
                value = self._worst()
            self._study.tell(trial, value if state == TrialState.COMPLETE else None, state=state)
            self._finished[proposal.number] = finished

    def _worst(self) -> float:
        """The worst objective measured so far, which stands for that of a plan that does not fit."""
        values = [r.record.value for r in self.trials() if r.record.value is not None]
        return min(values, default=0.0)

    def _optuna_trials(self) -> list[Any]:
        with self._where.errors():
            trials: list[Any] = self._study.get_trials(deepcopy=False)
            return trials

    def _trials_patiently(self) -> list[Any]:
        """Every trial of the study; a lost server is waited for."""
        return self._where.patiently(lambda _: self._optuna_trials())

    def _proposal(self, trial: Any) -> Proposal:
        number = trial.number
        with self._where.errors():
            self._reseed(number, "relative")
            _ = trial.relative_params  # drawn here, with its own seed, whichever parameter comes first
            params = TrialParams(trial, reseed=lambda name: self._reseed(number, name))
            plan = self._space.decode(params, trial=number)
        self._open.add(number)
        return Proposal(number=number, plan=plan, trial=trial, params=params.params)

    def _reseed(self, number: int, purpose: str) -> None:
        seed = derived_seed(self._seed, number, purpose)
        is_parallel = bool(self._open - {number})
        self._study.sampler = make(self._sampler, seed=seed, study_seed=self._seed, is_parallel=is_parallel)

    def _finished_trial(self, frozen: Any) -> FinishedTrial:
        try:
            record = TrialRecord(**frozen.user_attrs[TOLD])
            plan = self._space.baseline
            if frozen.number > 0:
                plan = self._space.decode(_SameChoices(frozen), trial=frozen.number)
        except (KeyError, TypeError) as error:
            raise StorageError(
                f"study: trial {frozen.number} lacks {error}; it was written by something else: "
                "start a new run"
            ) from error
        return FinishedTrial(number=frozen.number, plan=plan, record=record)


class _SameChoices(FixedParams):
    """A trial's parameters, where the space has the choices of the study: Optuna refuses others."""

    def __init__(self, frozen: Any) -> None:
        super().__init__(recorded_params(frozen))
        self._frozen = frozen

    def category(self, name: str, choices: Sequence[str]) -> str:
        """The recorded choice. Raises StorageError where the study has other choices."""
        known = self._frozen.distributions.get(name)
        if known is not None and tuple(known.choices) != tuple(choices):
            kind = name.partition("[")[0]
            raise StorageError(
                f"study: trial {self._frozen.number}: {kind} had other choices; resume with the release that "
                "began the run, or begin another with --from"
            )
        return super().category(name, choices)


def labels_of(plan: Plan) -> dict[str, str]:
    """The labels of a plan's parts, which Optuna's tools show with a trial."""
    return {
        "shape": plan.shape_label,
        "layout": plan.layout.label,
        "split": plan.split.label,
        "schedule": plan.schedule.label,
        "mapping": plan.mapping.label,
    }


def _constraint_name(record: TrialRecord) -> str:
    if record.verdict == "wrong":
        return "wrong"
    return "refused" if record.excess == REFUSED_EXCESS else "memory_excess"
