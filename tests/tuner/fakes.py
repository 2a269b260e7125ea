"""A machine made of arithmetic: plans take the time a formula says, with noise, and no process runs."""

import hashlib
import json
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quartet_plugin.errors import InterruptedByUserError
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.plan import NodeInfo, Plan
from quartet_plugin.model.receipt import ParityFailure, Receipt, StepComparison, Versions, tolerance_for
from quartet_plugin.model.schema import dump
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.protocol.attempt_files import KEPT_FILE, KeptWeights
from quartet_plugin.report.live import PlainLines
from quartet_plugin.space.plan_space import baseline_plan
from quartet_plugin.trial.compared_start import ComparedSteps
from quartet_plugin.trial.node_speed import NodeSpeed
from quartet_plugin.trial.request import Outcome, Progress, TrialRequest, TrialResult
from quartet_plugin.tuner.config import parse_config
from quartet_plugin.tuner.context import TuningContext
from quartet_plugin.tuner.coordinator import Coordinator
from quartet_plugin.tuner.run_folder import TuningRun, create_run, resume_run
from quartet_plugin.tuner.trial_backend import SETTLED, ComparedTrial, ParityCheck, ShouldStop
from quartet_plugin.tuner.tune_result import TuneResult
from tests.space.jobs import make_job, make_nodes
from tests.tuner.flop_formula import iteration_flops

_OF_COORDINATOR = ("earlier_run", "slices", "make_room", "full_size")
COMMAND = ("torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", "--num-layers", "8")


class Killed(BaseException):
    """Stands for kill -9: nothing is cleaned up."""


def by_formula(plan: Plan) -> float:
    """Seconds an iteration: FLOPs on the critical device, at 1e11 a second."""
    return iteration_flops(plan) / 1e11


@dataclass
class FakeMachine:
    """What survives a tuner: the results on the disk, and how plans behave.

    `dies_at` is the number of the launch, counted from 0, that is killed; `dies_before_result` says whether
    its result was written.
    """

    job: TrainingJob = field(default_factory=make_job)
    cluster: tuple[NodeInfo, ...] = field(default_factory=lambda: make_nodes(2))
    seconds: Callable[[Plan], float] = by_formula
    outcome: Callable[[Plan], Outcome] = lambda plan: Outcome.OK
    noise: float = 0.01
    wall_s: float = 10.0
    dies_at: int | None = None
    dies_before_result: bool = True
    disk: dict[Path, TrialResult] = field(default_factory=dict)
    launched: list[tuple[str, str | None]] = field(default_factory=list)
    on_launch: Callable[[TrialRequest], None] = lambda request: None
    gate: Callable[[Plan], bool] = lambda plan: True
    checked: list[Plan] = field(default_factory=list)
    dies_in_check: int | None = None
    requests: dict[Path, TrialRequest] = field(default_factory=dict)
    keeps_weights: bool = False
    settings: tuple[str, ...] = ()
    weights_s: float = 0.1
    compared: list[Plan] = field(default_factory=list)
    # The slowdown of each node, by its host, in a launch that is the n-th of the run.
    slow_nodes: Callable[[int], Mapping[str, float]] = lambda launch: {}
    speeds: dict[str, tuple[NodeSpeed, ...]] = field(default_factory=dict)

    def recover(self, folder: Path, *, should_stop: ShouldStop, skip: Collection[Path] = ()) -> None:
        """Nothing runs."""

    def recorded(self, folder: Path, *, plan_key: str | None) -> TrialResult | None:
        """The settled result of this plan in a trial's folder."""
        result = self.disk.get(folder)
        return result if result and result.plan_key == plan_key and result.outcome in SETTLED else None

    def supersede(self, folder: Path) -> bool:
        """What was measured in the folder counts no more."""
        result = self.disk.get(folder)
        if result is None or not result.is_measured:
            return False
        del self.disk[folder]
        return True

    def nodes(self, result: TrialResult) -> tuple[NodeInfo, ...]:
        """The nodes."""
        return self.cluster

    def node_speeds(self, result: TrialResult) -> tuple[NodeSpeed, ...]:
        """The speeds of the nodes in the launch, by arithmetic."""
        return self.speeds.get(result.attempt_id, ())

    def modules(self, result: TrialResult) -> tuple[str, ...] | None:
        """Nothing is known of them."""
        return None

    def check(
        self, request: ParityCheck, *, on_progress: Callable[[Progress], None], should_stop: ShouldStop
    ) -> Receipt:
        """One parity check: `gate` says whether the plan passes, or raises."""
        request.weights.mkdir(parents=True, exist_ok=True)
        (request.weights / "model.bin").write_bytes(b"weights")
        self.checked.append(request.plan)
        if self.dies_in_check == len(self.checked) - 1:
            raise Killed
        on_progress(Progress(attempt=1, phase="measure", iteration=1, num_iterations=5, elapsed_s=1.0))
        if should_stop():
            raise InterruptedByUserError("stopped in a parity check")
        return make_receipt(request.plan, job=self.job, passes=self.gate(request.plan))

    def adopt(self, request: ParityCheck, result: TrialResult, *, should_stop: ShouldStop) -> ComparedSteps:
        """What trial 0 kept."""
        return ComparedSteps(settings=self.settings, weights_s=self.weights_s)

    def compare(
        self,
        request: ParityCheck,
        result: TrialResult,
        *,
        on_progress: Callable[[Progress], None],
        should_stop: ShouldStop,
    ) -> ComparedTrial:
        """The first iterations of a plan's trial: `gate` says whether it passes."""
        self.compared.append(request.plan)
        passes = self.gate(request.plan)
        receipt = make_receipt(request.plan, job=self.job, passes=passes)
        if receipt.failure is not None:
            result = replace(result, outcome=Outcome.WRONG, reason=receipt.failure.reason, iteration_s=())
            self.disk[result.folder] = result
        return ComparedTrial(receipt=receipt, result=result, steps=ComparedSteps(weights_s=self.weights_s))

    def run(
        self, request: TrialRequest, *, on_progress: Callable[[Progress], None], should_stop: ShouldStop
    ) -> TrialResult:
        """One launch."""
        self.launched.append((request.folder.name, request.plan_key))
        self.on_launch(request)
        is_last = self.dies_at == len(self.launched) - 1
        if is_last and self.dies_before_result:
            raise Killed
        on_progress(Progress(attempt=1, phase="measure", iteration=3, num_iterations=13, elapsed_s=2.0))
        result = self._result(request)
        slow = self.slow_nodes(len(self.launched) - 1)
        self.speeds[result.attempt_id] = tuple(
            NodeSpeed(
                host=node.host,
                kind=(node.node_class, node.num_slots, 0),
                product_s=1e-3 * slow.get(node.host, 1.0),
                spread=0.01,
            )
            for node in self.cluster
        )
        if self.keeps_weights:
            result = replace(result, num_compared=request.num_compared or 0)
            if request.save_weights is not None:
                request.save_weights.mkdir(parents=True)
                kept = KeptWeights(attempt_id=result.attempt_id)
                (request.save_weights / KEPT_FILE).write_text(json.dumps(dump(kept)))
        self.disk[request.folder] = result
        if is_last:
            raise Killed
        if should_stop():
            result = self.disk[request.folder] = replace(result, outcome=Outcome.CANCELLED)
        return result

    def _result(self, request: TrialRequest) -> TrialResult:
        plan = request.plan or baseline_plan(self.job, nodes=self.cluster, run="r", seed=0)
        digest = hashlib.sha256(f"{request.folder.name}/{plan.key}".encode()).digest()
        generator = random.Random(digest)
        outcome = self.outcome(plan)
        times: tuple[float, ...] = ()
        if outcome in (Outcome.OK, Outcome.UNSTABLE):
            run_noise = generator.gauss(1.0, self.noise)
            times = tuple(
                self.seconds(plan) * run_noise * generator.gauss(1.0, self.noise / 4)
                for _ in range(request.measure)
            )
        return TrialResult(
            attempt_id=digest.hex()[:32],
            plan_key=request.plan_key,
            outcome=outcome,
            reason=outcome.value.lower(),
            phase="done",
            memory_excess_bytes=1 << 20 if outcome is Outcome.INFEASIBLE else 0,
            iteration_s=times,
            peak_memory_bytes=1 << 30,
            wall_s=self.wall_s,
            job=_as_json(dump(self.job)) if request.plan is None else None,
            folder=request.folder,
            last_lines=("Traceback (most recent call last):", "ValueError: bad flag"),
        )


def make_receipt(plan: Plan, *, job: TrainingJob, passes: bool) -> Receipt:
    """What the gate would write."""
    step = StepComparison(
        step=1,
        loss=2.0 if passes else 2.1,
        reference_loss=2.0,
        loss_deviation=0.0 if passes else 0.05,
        grad_norm=1.0,
        reference_grad_norm=1.0,
        grad_norm_deviation=0.0,
    )
    failure = ParityFailure(
        step=1, quantity="loss", grows=False, stage=1, reason="step 1: loss 2.1, stock has 2"
    )
    return Receipt(
        plan_digest=plan.digest,
        plan_key=plan.key,
        reference="command",
        versions=Versions(
            framework=job.framework,
            framework_version=job.framework_version,
            torch_version=job.torch_version,
            quartet_version="0",
        ),
        precision="fp32",
        tolerance=tolerance_for("fp32", partition_differs=False),
        steps=(step,),
        verdict="passed" if passes else "failed",
        failure=None if passes else failure,
    )


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, list | tuple) else value


class Watching(PlainLines):
    """Keeps what a user would have read."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        super().__init__(self.messages.append)


def begin(folder: Path, **config: Any) -> TuningRun:
    """A new run in `folder`."""
    return create_run(folder, config=parse_config({"run": "r", **config}, where="test"), command=COMMAND)


def begin_with_journal(folder: Path, **config: Any) -> TuningRun:
    """A new run with the cheapest storage: every one holds the same study, as `tests/study` tests."""
    return begin(folder, **{**config, "study": {"storage": "journal", **config.get("study", {})}})


def resume(folder: Path) -> TuningRun:
    """The run in `folder`, as after a crash."""
    return resume_run(folder, config=None, command=COMMAND)


def tune(run: TuningRun, machine: Any, **options: Any) -> TuneResult:
    """Tune on a machine."""
    return coordinator(run, machine, **options).tune()


def coordinator(run: TuningRun, machine: Any, **options: Any) -> Coordinator:
    """A coordinator on a machine; `options` are the context's and its own."""
    options.setdefault("observer", Watching())
    of_coordinator = {name: options.pop(name) for name in _OF_COORDINATOR if name in options}
    command = parse_command(run.command, environment={})
    context = TuningContext.create(run, command=command, backend=machine, **options)
    return Coordinator(context, **of_coordinator)


def outcome(result: TuneResult) -> Any:
    """What a run comes to."""
    trials = [
        (trial.number, trial.plan.key, trial.record.verdict, trial.record.value, trial.record.repeats)
        for trial in result.trials
    ]
    return trials, [ranking.comparison for ranking in result.rankings], result.receipt
