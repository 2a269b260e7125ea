"""Searches on a machine that answers from an oracle: how many trials until a plan near the best was measured.

`searched` runs the coordinator and its study as `quartet tune` does, `plain` Optuna's TPE with its own
defaults over the same parameters, with the same knowledge of the baseline, noise and answers for plans that
were measured before, and without the cost model. Both count the plans that were launched.
"""

import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna

from benchmarks.search_cost.oracles import Oracle
from benchmarks.search_cost.walk import key_of
from quartet_plugin.errors import InterruptedByUserError, QuartetError
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.launch import LaunchPosition, LaunchRecord, Phase
from quartet_plugin.model.plan import NodeInfo, Plan
from quartet_plugin.model.receipt import Receipt, StepComparison, Versions, tolerance_for
from quartet_plugin.model.schema import dump
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.model.trial_record import score
from quartet_plugin.space.plan_space import Space, baseline_plan, build_space
from quartet_plugin.trial.compared_start import ComparedSteps
from quartet_plugin.trial.node_speed import NodeSpeed
from quartet_plugin.trial.request import Outcome, Progress, TrialRequest, TrialResult
from quartet_plugin.tuner.config import parse_config
from quartet_plugin.tuner.context import TuningContext
from quartet_plugin.tuner.coordinator import Coordinator
from quartet_plugin.tuner.run_folder import create_run
from quartet_plugin.tuner.trial_backend import ComparedTrial, ParityCheck, ShouldStop
from quartet_plugin.tuner.tune_result import TuneResult

# How near to the best plan a search is to come.
NEAR = 1.02
MEASURE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """A space whose best plan is known: `best_s` seconds per iteration among `num_plans` plans."""

    name: str
    job: TrainingJob
    nodes: tuple[NodeInfo, ...]
    search: dict[str, Any]
    oracle: Oracle
    best_s: float
    num_plans: int

    @property
    def space(self) -> Space:
        """The space as a run opens it."""
        search = parse_config({"search": self.search}, where="search").search
        return build_space(self.job, nodes=self.nodes, search=search, run="r", seed=0)

    def is_near(self, plan: Plan) -> bool:
        """Whether the plan is within NEAR of the best."""
        truth = self.oracle.truth_s(plan)
        return truth is not None and truth <= NEAR * self.best_s


@dataclass
class ReplayingLaunches:
    """Answers launches from an oracle; `launched` are the plans of the search in their order."""

    ground: Ground
    seed: int
    launched: list[Plan] = field(default_factory=list)
    _disk: dict[Path, TrialResult] = field(default_factory=dict)

    @property
    def num_until_near(self) -> int | None:
        """Trials until a plan near the best was measured, its own included; None where none was."""
        return next((count for count, plan in enumerate(self.launched, 1) if self.ground.is_near(plan)), None)

    def recover(self, folder: Path, *, should_stop: ShouldStop, skip: Collection[Path] = ()) -> None:
        """Nothing runs."""

    def recorded(self, folder: Path, *, plan_key: str | None) -> TrialResult | None:
        """What was measured in this folder."""
        result = self._disk.get(folder)
        return result if result is not None and result.plan_key == plan_key else None

    def supersede(self, folder: Path) -> bool:
        """No search is interrupted here, so this is never asked."""
        raise NotImplementedError

    def nodes(self, result: TrialResult) -> tuple[NodeInfo, ...]:
        """The ground's nodes."""
        del result
        return self.ground.nodes

    def node_speeds(self, result: TrialResult) -> tuple[NodeSpeed, ...]:
        """No rank was timed."""
        del result
        return ()

    def adopt(self, request: ParityCheck, result: TrialResult, *, should_stop: ShouldStop) -> ComparedSteps:
        """Trial 0 keeps no weights here, so this is never asked."""
        raise NotImplementedError

    def compare(
        self,
        request: ParityCheck,
        result: TrialResult,
        *,
        on_progress: Callable[[Progress], None],
        should_stop: ShouldStop,
    ) -> ComparedTrial:
        """No trial starts from kept weights here, so this is never asked."""
        raise NotImplementedError

    def modules(self, result: TrialResult) -> None:
        """Nothing is known of them."""

    def run(
        self,
        request: TrialRequest,
        *,
        on_progress: Callable[[Progress], None],
        should_stop: ShouldStop,
    ) -> TrialResult:
        """One launch, from the oracle."""
        del on_progress, should_stop
        plan = request.plan or baseline_plan(self.ground.job, nodes=self.ground.nodes, run="r", seed=0)
        if request.plan is not None and request.folder.parent.name == "trials":
            self.launched.append(plan)
        text = f"{self.seed}/{request.folder.parent.name}/{request.folder.name}/{key_of(plan)}".encode()
        digest = hashlib.sha256(text).digest()
        times = self.ground.oracle.measured_s(plan, random.Random(digest), count=request.measure)
        result = TrialResult(
            attempt_id=digest.hex()[:32],
            plan_key=request.plan_key,
            outcome=Outcome.OK if times else Outcome.INFEASIBLE,
            reason="" if times else "it was refused when it was recorded",
            phase="done",
            iteration_s=times or (),
            peak_memory_bytes=1 << 30,
            wall_s=1.0,
            job=json.loads(json.dumps(dump(self.ground.job))) if request.plan is None else None,
            folder=request.folder,
        )
        self._disk[request.folder] = result
        return result

    def check(
        self, request: ParityCheck, *, on_progress: Callable[[Progress], None], should_stop: ShouldStop
    ) -> Receipt:
        """Every plan passes."""
        del on_progress, should_stop
        job = self.ground.job
        same = StepComparison(
            step=1,
            loss=1.0,
            reference_loss=1.0,
            loss_deviation=0.0,
            grad_norm=1.0,
            reference_grad_norm=1.0,
            grad_norm_deviation=0.0,
        )
        return Receipt(
            plan_digest=request.plan.digest,
            plan_key=request.plan.key,
            reference="command",
            versions=Versions(
                framework=job.framework,
                framework_version=job.framework_version,
                torch_version=job.torch_version,
                quartet_version="0",
            ),
            precision=job.precision,
            tolerance=tolerance_for(job.precision, partition_differs=False),
            steps=(same,),
            verdict="passed",
            failure=None,
        )


class Silent:
    """An observer that shows nothing."""

    def message(self, text: str) -> None:
        """See `Observer`."""

    def plan_started(
        self,
        label: str,
        plan: Plan | None,
        *,
        phase: Phase,
        time_left_s: float | None,
        position: LaunchPosition | None = None,
        measured_share: float | None = None,
    ) -> None:
        """See `Observer`."""

    def progressed(self, phase: str, *, iteration: int, num_iterations: int) -> None:
        """See `Observer`."""

    def plan_finished(self, launch: LaunchRecord) -> None:
        """See `Observer`."""


def searched(ground: Ground, *, seed: int, limit: int, **study: Any) -> int | None:
    """Trials that the coordinator's study needs; None beyond `limit`."""
    launches = ReplayingLaunches(ground=ground, seed=seed)
    with suppress(InterruptedByUserError):
        tuned(
            launches,
            study={"trials": limit, "rounds": 3, "top_k": 1, "control": 0, **study},
            should_stop=lambda: bool(launches.launched) and ground.is_near(launches.launched[-1]),
        )
    return launches.num_until_near


def tuned(
    launches: ReplayingLaunches, *, study: dict[str, Any], should_stop: ShouldStop = lambda: False
) -> TuneResult:
    """A whole run of the coordinator in a folder that is removed again."""
    ground = launches.ground
    with _folder() as folder:
        config = parse_config(
            {
                "run": "r",
                "search": ground.search,
                "study": {"seed": launches.seed, **study},
                "trial": {"warmup": 1, "measure": MEASURE},
            },
            where="study",
        )
        words = ("torchrun", "--nproc-per-node", str(ground.job.layout.world_size), "pretrain_gpt.py")
        run = create_run(folder / "r", config=config, command=words)
        context = TuningContext.create(
            run,
            command=parse_command(words, environment={}),
            backend=launches,
            observer=Silent(),
            should_stop=should_stop,
        )
        return Coordinator(context).tune()


@contextmanager
def _folder() -> Iterator[Path]:
    """In memory where the system has such a place: a study flushes every write."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="quartet-replay-", dir=memory if memory.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainCount:
    """What plain TPE needed: plans that were launched, and proposals with those that repeat a plan."""

    launched: int | None
    proposed: int | None


def plain(ground: Ground, *, seed: int, limit: int) -> PlainCount:
    """Trials that Optuna's TPE needs by itself; None beyond `limit` launches or ten times the proposals."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = ground.space
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    generator = random.Random(seed)
    seen = _with_baseline(study, ground, space, generator)
    num_launched = 0
    for proposed in range(1, 10 * limit + 1):
        trial = study.ask()
        plan = space.decode(_Choosing(trial), trial=trial.number)
        if plan.key not in seen:
            num_launched += 1
            seen[plan.key] = _value(ground, plan, generator)
            if ground.is_near(plan):
                return PlainCount(launched=num_launched, proposed=proposed)
            if num_launched == limit:
                break
        _tell(study, trial, seen[plan.key], worst=min(value for value in seen.values() if value is not None))
    return PlainCount(launched=None, proposed=None)


def _with_baseline(
    study: optuna.Study, ground: Ground, space: Space, generator: random.Random
) -> dict[str, float | None]:
    """Tell the baseline, which the other side knows as well."""
    baseline = _value(ground, space.baseline, generator)
    params = space.params_of(space.baseline)
    if params is not None:
        study.enqueue_trial(dict(params))
    trial = study.ask()
    if params is not None:
        space.decode(_Choosing(trial), trial=0)
    _tell(study, trial, baseline, worst=baseline or 0.0)
    return {space.baseline.key: baseline}


def _value(ground: Ground, plan: Plan, generator: random.Random) -> float | None:
    times = ground.oracle.measured_s(plan, generator, count=MEASURE)
    return None if times is None else score(plan, iteration_s=times).tokens_per_s


def _tell(study: optuna.Study, trial: optuna.Trial, value: float | None, *, worst: float) -> None:
    trial.set_constraint("refused", 1.0 if value is None else 0.0)
    study.tell(trial, worst if value is None else value)


class _Choosing:
    """Lets a trial choose."""

    def __init__(self, trial: optuna.Trial) -> None:
        self._trial = trial

    def category(self, name: str, choices: Sequence[str]) -> str:
        return str(self._trial.suggest_categorical(name, list(choices)))

    def integer(self, name: str, low: int, high: int) -> int:
        return int(self._trial.suggest_int(name, low, high))

    def unit_float(self, name: str) -> float:
        return float(self._trial.suggest_float(name, -1.0, 1.0))

    def attribute(self, name: str) -> None:
        del name


@dataclass(frozen=True, slots=True, kw_only=True)
class RegretCheck:
    """A search's regret as it was estimated (None where it said nothing) and as it is."""

    low: float | None
    median: float | None
    high: float | None
    true: float

    @property
    def is_covered(self) -> bool:
        """Whether the interval holds the true regret, but for rounding."""
        return self.low is not None and self.high is not None and self.low - 1e-9 <= self.true <= self.high


def regret_of(ground: Ground, *, seed: int, trials: int) -> RegretCheck:
    """Run a whole search and compare its estimate with what it really missed."""
    launches = ReplayingLaunches(ground=ground, seed=seed)
    result = tuned(launches, study={"trials": trials, "rounds": 5, "top_k": 3})
    best = result.baseline if result.winner is None else result.winner.trial.plan
    truth = ground.oracle.truth_s(best)
    if truth is None:
        raise QuartetError("a plan that was refused won")
    found = result.regret
    return RegretCheck(
        low=found.gain.low if found else None,
        median=found.gain.median if found else None,
        high=found.gain.high if found else None,
        true=max(0.0, truth / ground.best_s - 1.0),
    )
