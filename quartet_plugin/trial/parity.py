"""The parity gate compares the training of a plan with a reference, from the same weights and the same data.

The reference is the baseline, or stock parallelism for a plan of another shape. Before its first step it
writes its weights and reads them back, and in the same launch it trains. The plan starts from these weights
too, both run without dropout, and the loss and gradient norm of every step are compared. One launch of the
reference serves every plan of a job.

A study's trial 0 can be the reference: it keeps its weights and its first steps. A plan's trial that starts
from them is compared by its own first steps, and needs no run beside it (`compare_trial`).

Another layout rounds otherwise, by more the larger the model is. Where such a plan exceeds the tolerance by
no more than rounding may, stock is also run under the plan's layout, once a layout, from the same weights:
stock itself must then differ by no more, and the plan must train as that run does, within the tolerance of
an unchanged layout.
"""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from quartet_plugin.errors import InfeasibleError, InfrastructureError, PlanError, QuartetError, SeamError
from quartet_plugin.launchers.command import Command
from quartet_plugin.launchers.protocol import Launcher
from quartet_plugin.model.layout import Layout
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
    needs_receipt,
    rounding_limit,
    tolerance_for,
    worst_of,
)
from quartet_plugin.model.tensor_partition import TensorPartition
from quartet_plugin.model.training_job import TrainingJob, parse_training_job
from quartet_plugin.space.knobs.use_megatron_fsdp import saved_weights_refusal
from quartet_plugin.split.layers import even_split
from quartet_plugin.trial.compared_start import expert_loads, kept_by, part_norms, read_gradients
from quartet_plugin.trial.devices import DeviceGuard
from quartet_plugin.trial.request import Device, Outcome, Progress, Timeouts, TrialRequest, TrialResult
from quartet_plugin.trial.runner import Stop, run_trial

STEPS = 5
_ANY_SPREAD = 1e9  # times do not matter here


class NotAsPlannedError(InfeasibleError):
    """The plan's run did something else than the plan: there is nothing to compare."""


class ParityUnavailableError(InfrastructureError):
    """The gate cannot run for this command, whatever the plan."""


class _WeightsGoneError(InfrastructureError):
    """The weights that a trial kept are not there any more."""


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
    fence: Callable[[], None] = lambda: None
    _references: dict[str, LossSeries] = field(default_factory=dict)
    _trial: LossSeries | None = None
    _layout_references: dict[str, LossSeries | None] = field(default_factory=dict)

    def check(self, plan: Plan) -> Receipt:
        """Compare the plan with its reference and return the receipt, passed or failed.

        Raises InfeasibleError or PlanError for a plan that does not run here, InfrastructureError where its
        run was broken, and ParityUnavailableError when the reference does not run or reports no loss.
        """
        if (reason := saved_weights_refusal(plan.layout)) is not None:
            raise PlanError(
                f"parity: {reason}; the plan and the command cannot start from equal weights; train the plan "
                "without a check"
            )
        reference_plan = None if plan.shape == plan.made_for.shape else stock_of(plan)
        reference = self._reference(reference_plan)
        measured = self._run(plan, name=_plan_name(plan), weights=self._weights(reference_plan))
        return self._receipt(plan, reference, measured, reference_plan=reference_plan)

    def adopt_trial(self, result: TrialResult, steps: tuple[StepValues, ...]) -> None:
        """Let a trial of the command, with its first `steps`, be the reference of trials and of checks.

        Checks of other launches take it as long as the weights are there that it has kept.
        """
        job = None if result.job is None else parse_training_job(result.job)
        self._trial = LossSeries(steps=steps, job=job, result=result)

    def compare_trial(self, plan: Plan, result: TrialResult, steps: tuple[StepValues, ...]) -> Receipt:
        """The receipt of a plan by the first `steps` of its own trial, which started from the kept weights.

        Where another layout's rounding has to be told from a fault, stock is run under the layout; or, where
        the weights are gone, the plan is checked as `check` does. Raises what `check` does.
        """
        assert self._trial is not None
        measured = LossSeries(steps=steps, job=None, result=result)
        try:
            return self._receipt(
                plan, self._trial, measured, reference_plan=None, is_stock=not needs_receipt(plan)
            )
        except _WeightsGoneError:
            return self.check(plan)

    def _receipt(
        self,
        plan: Plan,
        reference: LossSeries,
        measured: LossSeries,
        *,
        reference_plan: Plan | None,
        is_stock: bool = False,
    ) -> Receipt:
        """The receipt; with `is_stock` the plan is stock under its layout, and may round as one does."""
        job = reference.job
        if job is None:
            raise ParityUnavailableError("the reference run wrote no job description; see its stdout.log")
        precision: Precision = job.precision
        tolerance = tolerance_for(precision, partition_differs=_cut_of(plan.layout) != _cut_of(job.layout))
        failure = find_failure(plan, reference.steps, measured.steps, tolerance=tolerance)
        by_layout = None
        rounds_otherwise = reference_plan is None and plan.layout.reductions != job.layout.reductions
        if failure is not None and rounds_otherwise and is_stock:
            tolerance = rounding_limit(tolerance, precision=precision)
            failure = find_failure(plan, reference.steps, measured.steps, tolerance=tolerance)
        elif failure is not None and rounds_otherwise:
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
        if reference is self._trial and not self._has_trial_weights:
            raise _WeightsGoneError
        stock = stock_of(plan)
        second = self._layout_reference(stock)
        if second is None or len(second.steps) != len(reference.steps):
            return _with_note(failure, f"stock does not run under {plan.layout.label}"), None
        loss_rounding, grad_norm_rounding = worst_of(compare(reference.steps, second.steps))
        if find_failure(stock, reference.steps, second.steps, tolerance=limit) is not None:
            note = f"stock itself differs by {max(loss_rounding, grad_norm_rounding):.2g}"
            return _with_note(failure, f"{note} under {plan.layout.label}"), None
        strict = tolerance_for(precision, partition_differs=plan.layout.tensor_partition is not None)
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
        """The reference's series, of one launch, which also writes the weights that the plan starts from."""
        name = _name(reference_plan)
        if reference_plan is None and self._trial is not None and self._has_trial_weights:
            return self._trial
        if name not in self._references:
            weights = self._weights(reference_plan)
            if reference_plan is None:
                # They started from the weights that are replaced.
                self._layout_references.clear()
            self.fence()
            shutil.rmtree(weights, ignore_errors=True)
            self._references[name] = self._run(reference_plan, name=name, save_weights=weights)
        return self._references[name]

    @property
    def _has_trial_weights(self) -> bool:
        return self._trial is not None and kept_by(self._weights(None)) == self._trial.result.attempt_id

    def _run(
        self,
        plan: Plan | None,
        *,
        name: str,
        weights: Path | None = None,
        save_weights: Path | None = None,
    ) -> LossSeries:
        timeouts, deadline_s = Timeouts.within(self.deadline_s), self.deadline_s
        if save_weights is not None:
            # Under Megatron this run writes and reads the weights in its first step; the others read them in
            # their start.
            limit_s = timeouts.first_step_s + timeouts.init_s
            timeouts = replace(timeouts, first_step_s=limit_s, init_s=limit_s)
            deadline_s += timeouts.init_s
        request = TrialRequest(
            folder=self.folder / name,
            command=self.command,
            plan=plan,
            warmup=0,
            measure=self.num_steps,
            deadline_s=deadline_s,
            timeouts=timeouts,
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
            is_subreaper=True,
            fence=self.fence,
        )
        if result.outcome is Outcome.CANCELLED:
            raise KeyboardInterrupt
        is_compared = plan is not None and name.startswith("plan-")
        if not result.is_measured and not (is_compared and result.outcome is Outcome.WRONG):
            raise _refusal(result, is_plan=is_compared)
        job = None if result.job is None else parse_training_job(result.job)
        steps = _steps(result, num_steps=self.num_steps, is_plan=is_compared)
        return LossSeries(steps=steps, job=job, result=result)


def _cut_of(layout: Layout) -> tuple[int, TensorPartition | None]:
    """What decides how linear layers are cut."""
    return layout.tensor_parallel, layout.tensor_partition


def stock_of(plan: Plan) -> Plan:
    """The plan's shape under stock parallelism, the reference of a plan that changes the shape.

    The degrees of parallelism stay; the split is even, without virtual stages, in the launcher's order, and
    layers are cut in the framework's own way.
    """
    layout = replace(plan.layout, virtual_stages=1, tensor_partition=None)
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
        return InfrastructureError(f"parity: the stock run failed: {where}")
    if not is_plan:
        return ParityUnavailableError(f"parity: stock does not run: {where}")
    if result.outcome is Outcome.HARNESS:
        kind = SeamError if "SeamError" in result.reason else PlanError
        return kind(f"parity: the plan does not run: {where}")
    if result.outcome is Outcome.NOT_AS_PLANNED:
        return NotAsPlannedError(f"parity: it did not run as planned: {where}")
    if result.outcome is Outcome.INFEASIBLE:
        return InfeasibleError(f"parity: the plan does not run: {where}")
    return InfrastructureError(f"parity: the plan's run failed: {where}")


def _is_broken(result: TrialResult) -> bool:
    """Whether every failure was of the network, which says nothing about the command."""
    errs = result.rank_files().errs.values()
    return result.outcome is Outcome.INFRA and {err.kind for err in errs} == {"network"}


def _steps(result: TrialResult, *, num_steps: int, is_plan: bool) -> tuple[StepValues, ...]:
    """The series of a run; steps that a plan did not reach are not-a-number."""
    num_reported = min(len(result.loss), len(result.grad_norm))
    if not is_plan and num_reported == 0:
        raise ParityUnavailableError(f"{result.folder}: no rank reported a loss; parity cannot be checked")
    gradients = read_gradients(result.folder, attempt_id=result.attempt_id)
    parts, loads = part_norms(gradients), expert_loads(gradients)
    length = num_steps if is_plan else num_reported
    return tuple(
        StepValues(
            loss=result.loss[step] if step < num_reported else math.nan,
            grad_norm=result.grad_norm[step] if step < num_reported else math.nan,
            parts=parts[step] if step < len(parts) else {},
            expert_loads=loads[step] if step < len(loads) else {},
        )
        for step in range(length)
    )
