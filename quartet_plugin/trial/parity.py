"""The parity gate compares the training of a plan with a reference, from the same weights and the same data.

The reference is the baseline, or stock parallelism for a plan of another shape. It writes its weights once,
before its first step. Reference and plan both start from them, without dropout, and the loss and gradient
norm of every step are compared. One set of weights and one reference serve every plan of a job.

Another layout rounds otherwise, by more the larger the model is. Where such a plan exceeds the tolerance by
no more than rounding may, stock is also run under the plan's layout, once a layout, from the same weights:
stock itself must then differ by no more, and the plan must train as that run does, within the tolerance of
an unchanged layout.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from quartet_plugin.errors import InfeasibleError, InfrastructureError, PlanError, QuartetError, SeamError
from quartet_plugin.launchers.command import Command
from quartet_plugin.launchers.local import Launcher
from quartet_plugin.model.plan import Mapping, Plan, ScheduleChoice, Split
from quartet_plugin.model.receipt import (
    MAX_REASON,
    LayoutReference,
    ParityFailure,
    Precision,
    Receipt,
    StepValues,
    Tolerance,
    Versions,
    compare,
    find_failure,
    is_within,
    rounding_limit,
    tolerance_for,
    worst_of,
)
from quartet_plugin.model.schema import Number
from quartet_plugin.model.training_job import TrainingJob, parse_training_job
from quartet_plugin.protocol.attempt_files import read_shared
from quartet_plugin.protocol.rank_files import RankFileReader, RankGradients, rank_files_of
from quartet_plugin.split.layers import even_split
from quartet_plugin.trial.attempt import PREFIX
from quartet_plugin.trial.devices import DeviceGuard
from quartet_plugin.trial.request import Device, Outcome, Progress, Timeouts, TrialRequest, TrialResult
from quartet_plugin.trial.runner import Stop, run_trial

STEPS = 5
_ANY_SPREAD = 1e9  # times do not matter here


class NotAsPlannedError(InfeasibleError):
    """The plan's run did something else than the plan: there is nothing to compare."""


class ParityUnavailableError(InfrastructureError):
    """The gate cannot run for this command, whatever the plan."""


OnProgress = Callable[[str, Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSeries:
    """The steps of one run, and the job as the framework resolved it (None where no rank reported it).

    `result` is the run's.
    """

    steps: tuple[StepValues, ...]
    job: TrainingJob | None
    result: TrialResult


@dataclass(slots=True, kw_only=True)
class ParityGate:
    """The gate for one command: attempts go to `folder`, weights (large) to `weights`; all ranks read both.

    `weights` must hold nothing of another command; the caller removes it.
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
    on_progress: OnProgress | None = None
    cwd: Path | None = None
    _references: dict[str, LossSeries] = field(default_factory=dict)
    _layout_references: dict[str, LossSeries | None] = field(default_factory=dict)

    def attempt_of(self, plan: Plan) -> Path:
        """The folder of the plan's latest run. Raises KeyError where the plan was never run."""
        attempts = list((self.folder / _plan_name(plan)).glob(f"{PREFIX}*"))
        if not attempts:
            raise KeyError(plan.key)
        return max(attempts, key=lambda path: int(path.name.removeprefix(PREFIX)))

    def check(self, plan: Plan) -> Receipt:
        """Compare the plan with its reference and return the receipt, passed or failed.

        Raises InfeasibleError or PlanError for a plan that does not run here, InfrastructureError where its
        run was broken, and ParityUnavailableError when the reference does not run or reports no loss.
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
        by_layout = None
        rounds_otherwise = reference_plan is None and plan.layout.reductions != job.layout.reductions
        if failure is not None and rounds_otherwise:
            failure, by_layout = self._judge_rounding(
                plan, reference, measured, failure=failure, tolerance=tolerance, precision=precision
            )
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
            layout_reference=by_layout,
        )

    def _judge_rounding(
        self,
        plan: Plan,
        reference: LossSeries,
        measured: LossSeries,
        *,
        failure: ParityFailure,
        tolerance: Tolerance,
        precision: Precision,
    ) -> tuple[ParityFailure | None, LayoutReference | None]:
        """The verdict on a plan of another layout that differs from the command by `failure`.

        The failure stands where the difference is more than rounding, where stock does not run under the
        plan's layout, and where stock itself trains otherwise under it.
        """
        limit = rounding_limit(tolerance, precision=precision)
        if not is_within(compare(reference.steps, measured.steps), limit):
            return failure, None
        stock = stock_of(plan)
        second = self._layout_reference(stock)
        if second is None or len(second.steps) != len(reference.steps):
            return _with_note(failure, f"stock does not run under {plan.layout.label}"), None
        loss_rounding, grad_norm_rounding = worst_of(compare(reference.steps, second.steps))
        if find_failure(stock, reference.steps, second.steps, tolerance=limit) is not None:
            note = f"stock itself differs by {max(loss_rounding, grad_norm_rounding):.2g}"
            return _with_note(failure, f"{note} under {plan.layout.label}"), None
        strict = tolerance_for(precision, tensor_parallel_differs=False)
        by_layout = LayoutReference(
            plan_key=stock.key,
            layout=plan.layout.label,
            loss_rounding=loss_rounding,
            grad_norm_rounding=grad_norm_rounding,
            limit=limit,
            tolerance=strict,
            steps=compare(second.steps, measured.steps),
        )
        remaining = find_failure(plan, second.steps, measured.steps, tolerance=strict)
        if remaining is not None:
            remaining = _with_note(remaining, f"compared with stock under {plan.layout.label}")
        return remaining, by_layout

    def _layout_reference(self, stock: Plan) -> LossSeries | None:
        """The series of stock under a layout, from the command's weights; None where it does not run."""
        name = f"layout-{stock.key[:12]}"
        if name not in self._layout_references:
            try:
                series = self._run(stock, name=name, weights=self._weights(None))
            except ParityUnavailableError:
                series = None
            self._layout_references[name] = series
        return self._layout_references[name]

    def command_result(self, *, is_compared: bool = True) -> TrialResult:
        """A run of the command itself, which says what its job is; raises what `check` does.

        It is the reference of later checks, unless nothing is compared with it.
        """
        series = self._reference(None) if is_compared else self._run(None, name="job")
        return series.result

    def _weights(self, reference_plan: Plan | None) -> Path:
        return self.weights / _name(reference_plan)

    def _reference(self, reference_plan: Plan | None) -> LossSeries:
        """The reference's series, run once: it writes the weights, then starts from them like the plan."""
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
        report = self.on_progress
        result = run_trial(
            request,
            launcher=self.launcher,
            devices=self.devices,
            stop=self.stop,
            on_progress=None if report is None else lambda progress: report(name, progress),
            is_alone=True,
        )
        if result.outcome is Outcome.CANCELLED:
            raise KeyboardInterrupt
        is_compared = plan is not None and name.startswith("plan-")
        if not result.is_measured and not (is_compared and result.outcome is Outcome.WRONG):
            raise _refusal(result, is_plan=is_compared)
        job = None if result.job is None else parse_training_job(result.job)
        steps = _steps(result, num_steps=self.num_steps, is_plan=is_compared)
        return LossSeries(steps=steps, job=job, result=result)


def stock_of(plan: Plan) -> Plan:
    """The plan's shape under stock parallelism, the reference of a plan that changes the shape.

    The degrees of parallelism stay; the split is even, without virtual stages, in the launcher's order.
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


def _with_note(failure: ParityFailure, note: str) -> ParityFailure:
    return replace(failure, reason=f"{failure.reason} ({note})"[:MAX_REASON])


def _name(reference_plan: Plan | None) -> str:
    return "stock" if reference_plan is None else f"stock-{reference_plan.key[:12]}"


def _plan_name(plan: Plan) -> str:
    return f"plan-{plan.key[:12]}"


def _refusal(result: TrialResult, *, is_plan: bool) -> QuartetError:
    """The error for a run without a series; its class says whether reference, plan or machine failed."""
    where = f"{result.reason}; see {result.folder / 'stdout.log'}"
    if not is_plan and _is_broken(result):
        return InfrastructureError(f"parity: stock's own run was broken: {where}")
    if not is_plan:
        return ParityUnavailableError(f"parity: stock itself does not run: {where}")
    if result.outcome is Outcome.HARNESS:
        kind = SeamError if "SeamError" in result.reason else PlanError
        return kind(f"parity: the plan does not run: {where}")
    if result.outcome is Outcome.NOT_AS_PLANNED:
        return NotAsPlannedError(f"parity: not as planned: {where}")
    if result.outcome is Outcome.INFEASIBLE:
        return InfeasibleError(f"parity: the plan does not run: {where}")
    return InfrastructureError(f"parity: the plan's run was broken: {where}")


def _is_broken(result: TrialResult) -> bool:
    """Whether every failure was of the network, which says nothing about the command."""
    errs = RankFileReader(result.folder, attempt_id=result.attempt_id).scan().errs.values()
    return result.outcome is Outcome.INFRA and {err.kind for err in errs} == {"network"}


def _steps(result: TrialResult, *, num_steps: int, is_plan: bool) -> tuple[StepValues, ...]:
    """The series of a run; steps that a plan did not reach are not-a-number."""
    num_reported = min(len(result.loss), len(result.grad_norm))
    if not is_plan and num_reported == 0:
        raise ParityUnavailableError(f"{result.folder}: no rank reported a loss; parity cannot be checked")
    parts = read_parts(result.folder, attempt_id=result.attempt_id)
    length = num_steps if is_plan else num_reported
    return tuple(
        StepValues(
            loss=result.loss[step] if step < num_reported else math.nan,
            grad_norm=result.grad_norm[step] if step < num_reported else math.nan,
            parts=parts[step] if step < len(parts) else {},
        )
        for step in range(length)
    )


def read_parts(folder: Path, *, attempt_id: str) -> list[dict[str, float]]:
    """The gradient norm of every part of the model, step by step, over all ranks; [] without a file.

    It only names the stage of a fault, so a file that breaks its format is no error and disables it.
    """
    sheets: list[RankGradients] = []
    for path in rank_files_of(RankGradients, folder):
        try:
            sheet = read_shared(RankGradients, path)
        except (QuartetError, FileNotFoundError):
            return []
        if sheet.attempt_id == attempt_id:
            sheets.append(sheet)
    length = min((len(sheet.steps) for sheet in sheets), default=0)
    return [_norms([sheet.steps[step].squares for sheet in sheets]) for step in range(length)]


def _norms(squares: Sequence[dict[str, Number]]) -> dict[str, float]:
    names = sorted({name for rank in squares for name in rank})
    return {name: math.sqrt(sum(float(rank.get(name, 0.0)) for rank in squares)) for name in names}
