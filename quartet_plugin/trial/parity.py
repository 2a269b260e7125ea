"""The parity gate: does a plan train as stock does, from the same weights and on the same data?

The baseline writes its weights once, before its first step. Stock and plan both start from them, without
dropout, and the loss and gradient norm of every step are compared. The same weights and the same reference
serve every plan of one job.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from quartet_plugin.errors import (
    InfeasibleError,
    InfrastructureError,
    PlanError,
    QuartetError,
    SeamError,
)
from quartet_plugin.launchers.command import Command
from quartet_plugin.launchers.launcher import Launcher
from quartet_plugin.model.plan import Mapping, Plan, ScheduleChoice, Split
from quartet_plugin.model.receipt import (
    Precision,
    Receipt,
    StepValues,
    Versions,
    compare,
    find_failure,
    tolerance_for,
)
from quartet_plugin.model.schema import Number
from quartet_plugin.model.training_job import TrainingJob, parse_training_job
from quartet_plugin.protocol.attempt_files import (
    ParitySheet,
    RankFileReader,
    read_sheet,
)
from quartet_plugin.split.layers import even_split
from quartet_plugin.trial.attempt import PREFIX
from quartet_plugin.trial.devices import DeviceGuard
from quartet_plugin.trial.request import Device, Outcome, Progress, Timeouts, TrialRequest, TrialResult
from quartet_plugin.trial.runner import Stop, run_trial

STEPS = 5
_ANY_SPREAD = 1e9  # times do not matter here


class ParityUnavailableError(InfrastructureError):
    """The gate cannot be run for this command, whatever the plan."""


OnStage = Callable[[str, Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSeries:
    """The steps of one run, and what the framework made of the command (None where no rank told)."""

    steps: tuple[StepValues, ...]
    job: TrainingJob | None


@dataclass(slots=True, kw_only=True)
class ParityGate:
    """The gate for one command: attempts go to `folder`, weights (large) to `weights`; all ranks read both.

    `weights` must hold nothing of another command; whoever made it removes it.
    """

    command: Command
    folder: Path
    weights: Path
    num_steps: int = STEPS
    device: Device = "auto"
    deadline_s: float = 600.0
    launcher: Launcher | None = None
    devices: DeviceGuard | None = None
    stop: Stop | None = None
    on_progress: OnStage | None = None
    cwd: Path | None = None
    min_free_bytes: int | None = None
    _references: dict[str, LossSeries] = field(default_factory=dict)

    def attempt_of(self, plan: Plan) -> Path:
        """The folder of the plan's latest run; a KeyError where it was never run."""
        found = list((self.folder / _plan_name(plan)).glob(f"{PREFIX}*"))
        if not found:
            raise KeyError(plan.key)
        return max(found, key=lambda path: int(path.name.removeprefix(PREFIX)))

    def check(self, plan: Plan) -> Receipt:
        """Compare the plan with stock and return the receipt, passed or failed.

        Raises InfeasibleError or PlanError for a plan that does not run here, InfrastructureError where its
        run was broken, and ParityUnavailableError when the user's own command does not run or tell its loss.
        """
        reference_plan = None if plan.shape == plan.made_for.shape else stock_of(plan)
        reference = self._reference(reference_plan)
        measured = self._run(plan, name=_plan_name(plan), weights=self._weights(reference_plan))
        job = reference.job
        if job is None:
            raise ParityUnavailableError("the reference run left no job description; look at its stdout.log")
        precision: Precision = job.precision
        tolerance = tolerance_for(
            precision, tensor_parallel_differs=job.layout.tensor_parallel != plan.layout.tensor_parallel
        )
        failure = find_failure(plan, reference.steps, measured.steps, tolerance=tolerance)
        return Receipt(
            plan_digest=plan.digest,
            plan_key=plan.key,
            reference="command" if reference_plan is None else "stock",
            versions=Versions(
                framework=job.framework,
                framework_version=job.framework_version,
                torch_version=job.torch_version,
                quartet_version=version("quartet-plugin"),
            ),
            precision=precision,
            tolerance=tolerance,
            steps=compare(reference.steps, measured.steps),
            verdict="passed" if failure is None else "failed",
            failure=failure,
        )

    def _weights(self, reference_plan: Plan | None) -> Path:
        return self.weights / _name(reference_plan)

    def _reference(self, reference_plan: Plan | None) -> LossSeries:
        """Stock's series, run once: first the weights are written, then it starts from them like the plan."""
        name = _name(reference_plan)
        if name not in self._references:
            weights = self._weights(reference_plan)
            if not (weights / "latest_checkpointed_iteration.txt").exists():
                self._run(reference_plan, name=f"weights-of-{name}", save_weights=weights)
            self._references[name] = self._run(reference_plan, name=name, weights=weights)
        return self._references[name]

    def _run(
        self,
        plan: Plan | None,
        *,
        name: str,
        weights: Path | None = None,
        save_weights: Path | None = None,
    ) -> LossSeries:
        request = TrialRequest(
            folder=self.folder / name,
            command=self.command,
            plan=plan,
            warmup=0,
            measure=self.num_steps if save_weights is None else 1,
            deadline_s=self.deadline_s,
            timeouts=Timeouts.within(self.deadline_s),
            device=self.device,
            max_spread=_ANY_SPREAD,
            cwd=self.cwd,
            weights=weights,
            save_weights=save_weights,
        )
        if self.min_free_bytes is not None:
            request = replace(request, min_free_bytes=self.min_free_bytes)
        tell = self.on_progress
        result = run_trial(
            request,
            launcher=self.launcher,
            devices=self.devices,
            stop=self.stop,
            on_progress=None if tell is None else lambda progress: tell(name, progress),
        )
        if result.outcome is Outcome.CANCELLED:
            raise KeyboardInterrupt
        is_compared = plan is not None and name.startswith("plan-")
        if not result.is_measured and not (is_compared and result.outcome is Outcome.WRONG):
            raise _refusal(result, is_plan=is_compared)
        job = None if result.job is None else parse_training_job(result.job)
        return LossSeries(steps=_steps(result, num_steps=self.num_steps, is_plan=is_compared), job=job)


def stock_of(plan: Plan) -> Plan:
    """Stock parallelism of the plan's own shape, where it is another model than the user's.

    The same degrees, an even split, no virtual stages, the launcher's order: what differs is ours alone.
    """
    layout = replace(plan.layout, virtual_stages=1)
    stages = layout.num_stages
    counts = even_split(plan.shape.num_layers, num_stages=stages)
    return replace(
        plan,
        layout=layout,
        split=Split(transformer_layers_per_stage=counts),
        schedule=ScheduleChoice(name="no-pipelining" if stages == 1 else "1f1b"),
        mapping=Mapping(slots=tuple(sorted(plan.mapping.slots))),
        prediction=None,
        measurement=None,
    )


def _name(reference_plan: Plan | None) -> str:
    return "stock" if reference_plan is None else f"stock-{reference_plan.key[:12]}"


def _plan_name(plan: Plan) -> str:
    return f"plan-{plan.key[:12]}"


def _refusal(result: TrialResult, *, is_plan: bool) -> QuartetError:
    """Why no series came of a run, with the exit code that says whose fault it is."""
    where = f"{result.reason}; see {result.folder / 'stdout.log'}"
    if not is_plan and _is_broken(result):
        return InfrastructureError(f"parity: stock's own run was broken: {where}")
    if not is_plan:
        return ParityUnavailableError(f"parity: stock itself does not run: {where}")
    if result.outcome is Outcome.HARNESS:
        kind = SeamError if "SeamError" in result.reason else PlanError
        return kind(f"parity: the plan does not run: {where}")
    if result.outcome is Outcome.INFEASIBLE:
        return InfeasibleError(f"parity: the plan does not run: {where}")
    return InfrastructureError(f"parity: the plan's run was broken: {where}")


def _is_broken(result: TrialResult) -> bool:
    """Whether a peer or an address was lost, again and again: that says nothing about the command."""
    errs = RankFileReader(result.folder, attempt_id=result.attempt_id).scan().errs.values()
    return result.outcome is Outcome.INFRA and {err.kind for err in errs} == {"network"}


def _steps(result: TrialResult, *, num_steps: int, is_plan: bool) -> tuple[StepValues, ...]:
    """The series of a run; a plan that gave up early has not-a-number for the steps it did not make."""
    found = min(len(result.loss), len(result.grad_norm))
    if not is_plan and found == 0:
        raise ParityUnavailableError(f"{result.folder}: no rank reported a loss; parity cannot be checked")
    parts = read_parts(result.folder, attempt_id=result.attempt_id)
    length = num_steps if is_plan else found
    return tuple(
        StepValues(
            loss=result.loss[step] if step < found else math.nan,
            grad_norm=result.grad_norm[step] if step < found else math.nan,
            parts=parts[step] if step < len(parts) else {},
        )
        for step in range(length)
    )


def read_parts(folder: Path, *, attempt_id: str) -> list[dict[str, float]]:
    """The gradient norm of every part of the model, step by step, over all ranks; [] where one left none.

    It only names the stage of a fault, so files that break their format are not used and not an error.
    """
    sheets: list[ParitySheet] = []
    for path in sorted(folder.glob("rank-*.parity.json")):
        try:
            sheet = read_sheet(ParitySheet, path)
        except (QuartetError, FileNotFoundError):
            return []
        if sheet.attempt_id == attempt_id:
            sheets.append(sheet)
    length = min((len(sheet.steps) for sheet in sheets), default=0)
    return [_norms([sheet.steps[step].squares for sheet in sheets]) for step in range(length)]


def _norms(squares: Sequence[dict[str, Number]]) -> dict[str, float]:
    names = sorted({name for one in squares for name in one})
    return {name: math.sqrt(sum(float(one.get(name, 0.0)) for one in squares)) for name in names}
