"""The parity gate of a study: a plan must train as the user's command does before it is timed.

A plan is compared by the first iterations of its own trial, which is not scored where they differ
(`tuner/compared_trials.py`). Where that cannot be, a kind of plans with custom schedules (family, placement
and the features that are on) is checked once in launches of its own, before its first timing, and each plan
by itself before it can win. A failure quarantines the kind: it is not scored and not tried again, and the
study goes on without it.
Receipts lie beside the plans they are for, so a resumed run repeats none.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from quartet_plugin.errors import (
    InfeasibleError,
    InfrastructureError,
    InterruptedByUserError,
    PlanError,
    QuartetError,
)
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import STOCK, Plan, read_plan, write_plan
from quartet_plugin.model.receipt import (
    Receipt,
    needs_receipt,
    read_receipt,
    receipt_path,
    worst_of,
    write_receipt,
)
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.model.trial_record import REFUSED_EXCESS, FinishedTrial, TrialRecord, Verdict
from quartet_plugin.schedule.placement import PlacementKind, kind_of, loop
from quartet_plugin.space.config import SEARCHED
from quartet_plugin.trial.compared_start import ComparedStart
from quartet_plugin.trial.parity import NotAsPlannedError, ParityUnavailableError
from quartet_plugin.trial.request import TrialResult
from quartet_plugin.tuner.compared_trials import ComparedTrials, parity_check_of
from quartet_plugin.tuner.context import TuningContext
from quartet_plugin.tuner.trial_launcher import TrialLaunch

# Runs of the user's command for the first plan that is checked apart (the reference and the plan) and for
# every later one. Stock under a plan's layout, which few jobs need, is not counted.
FIRST_RUNS = 2
LATER_RUNS = 1

_PARTITION_FEATURE = "partition_"
# The outcomes that leave out a kind of plans, each with its verdict.
_QUARANTINES: dict[str, Verdict] = {"WRONG": "wrong", "NOT_AS_PLANNED": "infeasible"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityKind:
    """A kind of plans that is checked once: family of schedule, placement, and features that are on."""

    family: str
    placement: PlacementKind
    features: frozenset[str]

    @property
    def label(self) -> str:
        """Family and placement in words, with the tensor partition where there is one."""
        prefix = _PARTITION_FEATURE
        cuts = [name.removeprefix(prefix) for name in self.features if name.startswith(prefix)]
        return " ".join([f"{self.family} ({self.placement})", *(f"with partition {cut}" for cut in cuts)])


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRefusal:
    """Why a plan is not timed.

    `culprit` is the key of the plan that was tried, where it was another one; empty where none had to be.
    """

    verdict: Verdict
    outcome: str
    reason: str
    culprit: str | None = None

    def record(self, *, repeats: int | None) -> TrialRecord:
        """The record of the refused trial; `repeats` is the trial that was tried in its place."""
        excess = {"wrong": 1.0, "infeasible": REFUSED_EXCESS}.get(self.verdict, 0.0)
        return TrialRecord(
            verdict=self.verdict,
            outcome=self.outcome,
            reason=self.reason,
            attempt_id="parity",
            excess=excess,
            repeats=repeats,
        )


def kind_of_plan(plan: Plan, *, features: Iterable[str]) -> ParityKind:
    """The kind of a plan that the plugin's runtime executes; what its layout turns on counts as a feature."""
    custom, layout = plan.schedule.custom, plan.layout
    devices = layout.pipeline_parallel
    placement = loop(devices, layout.virtual_stages) if custom is None else custom.placement
    by_layout = {
        "tensor_parallel": layout.tensor_parallel > 1,
        "sequence_parallel": layout.sequence_parallel,
        "context_parallel": layout.context_parallel > 1,
        "expert_parallel": layout.expert_parallel > 1,
        "data_parallel": layout.data_parallel > 1,
        "distributed_optimizer": layout.distributed_optimizer,
        **{setting.label: True for setting in layout.settings or ()},
        f"recompute_{layout.recompute}": layout.recompute != "none",
        f"{_PARTITION_FEATURE}{_partition_label(layout)}": layout.tensor_partition is not None,
    }
    return ParityKind(
        family=plan.schedule.name if custom is None else custom.named or SEARCHED,
        placement=kind_of(placement, num_devices=devices),
        features=frozenset(features) | {name for name, is_on in by_layout.items() if is_on},
    )


def _partition_label(layout: Layout) -> str:
    return STOCK if layout.tensor_partition is None else layout.tensor_partition.label


@dataclass(slots=True, kw_only=True)
class ParityKeeper:
    """Knows which plans passed and which kinds are quarantined in a run, and has the rest checked.

    `features` are those that the job has on, `compared` decides which plans are checked in their trials.
    """

    context: TuningContext
    compared: ComparedTrials
    features: tuple[str, ...]
    _passed: set[ParityKind] = field(default_factory=set)
    _receipts: dict[str, Receipt] = field(default_factory=dict)
    _quarantined: dict[ParityKind, ParityRefusal] = field(default_factory=dict)
    _unavailable: ParityRefusal | None = None
    _num_checks: int = 0
    _reason_shown: str | None = None

    @classmethod
    def open(cls, context: TuningContext, *, job: TrainingJob, compared: ComparedTrials) -> "ParityKeeper":
        """The gate with what an earlier process checked, for this job under these versions."""
        keeper = cls(context=context, features=job.features, compared=compared)
        for torn in keeper.folder.glob("plan-*/.*.tmp"):
            torn.unlink(missing_ok=True)
        versions_now = (job.framework_version, job.torch_version)
        for path in sorted(keeper.folder.glob("plan-*/plan.parity.json")):
            # What breaks its format is worth nothing: the plan is checked again.
            with contextlib.suppress(QuartetError):
                plan, receipt = read_plan(path.with_name("plan.json")), read_receipt(path)
                versions = (receipt.versions.framework_version, receipt.versions.torch_version)
                if receipt.plan_key == plan.key and versions == versions_now:
                    keeper._remember(plan, receipt)
        return keeper

    @property
    def folder(self) -> Path:
        """The folder of the checks and of the receipts."""
        return self.context.run.folder.parity

    @property
    def num_runs(self) -> int:
        """Runs of the user's command that the next check takes; trial 0 may have been the reference."""
        return LATER_RUNS if self._num_checks or self.compared.has_weights else FIRST_RUNS

    def num_runs_to_admit(self, plan: Plan) -> int:
        """Runs of the user's command that `admit` takes before this plan can be timed."""
        is_checked = self._kind(plan) in self._passed or self.compared.why_apart(plan) is None
        return 0 if is_checked or not needs_receipt(plan) or self.refusal_of(plan) else self.num_runs

    def num_runs_to_prove(self, plans: Iterable[Plan], *, num_unknown: int = 0) -> int:
        """Runs of the user's command that `prove` takes before these plans can win.

        `num_unknown` more plans are counted, as if each had to be checked, while that is possible and their
        trials do not do it.
        """
        unproven = sum(
            needs_receipt(plan) and plan.key not in self._receipts and self.refusal_of(plan) is None
            for plan in plans
        )
        is_apart = self.compared.reason is not None or not self.compared.has_weights
        unproven += num_unknown if is_apart and self._unavailable is None else 0
        return unproven * LATER_RUNS + self.num_runs - LATER_RUNS if unproven else 0

    def restore(self, trials: Iterable[FinishedTrial]) -> None:
        """Quarantine again what an earlier process found to be wrong in its trials."""
        for trial in trials:
            record = trial.record
            if record.outcome in _QUARANTINES and record.repeats is None and needs_receipt(trial.plan):
                self._quarantine_kind(trial.plan, record.reason, outcome=record.outcome)

    def receipt_of(self, plan: Plan) -> Receipt | None:
        """The receipt of a plan that passed."""
        receipt = self._receipts.get(plan.key)
        return receipt if receipt is not None and receipt.failure is None else None

    def refusal_of(self, plan: Plan) -> ParityRefusal | None:
        """Why a plan is out already, without checking anything."""
        if not needs_receipt(plan):
            return None
        kind, receipt = self._kind(plan), self._receipts.get(plan.key)
        if receipt is not None and receipt.failure is not None:
            return _failed(receipt, kind)
        refusal = self._quarantined.get(kind, self._unavailable)
        return None if refusal is None or refusal.culprit == plan.key else refusal

    def admit(
        self, plan: Plan, *, trial: int, num_left: int, has_depth_proxy: bool = False
    ) -> ParityRefusal | None:
        """Before a plan is timed: None where its trial will be compared, or its kind passed before or now.

        `num_left` launches are still to come after it; `has_depth_proxy`: a model with fewer layers is timed
        first.
        """
        refusal = self.refusal_of(plan)
        if refusal is not None or not needs_receipt(plan):
            return refusal
        why_apart = self.compared.why_apart(plan, has_depth_proxy=has_depth_proxy)
        if self._kind(plan) in self._passed or why_apart is None or self._was_compared(plan, trial=trial):
            return None
        return self._check(plan, trial=trial, num_left=num_left, why_apart=why_apart)

    def start_of(self, plan: Plan) -> ComparedStart | None:
        """How the trial of an admitted plan starts, where its first iterations are compared."""
        return None if plan.key in self._receipts else self.compared.start_of(plan)

    def judged(self, launch: TrialLaunch, result: TrialResult) -> TrialResult:
        """The result of a launch; not measured where its compared iterations are not stock's.

        A trial that was not compared as it was to be is checked apart before `prove` lets its plan win.
        """
        plan = launch.plan
        if plan is None or launch.phase != "search" or not result.num_compared or not result.is_measured:
            return result
        if self.compared.reason is not None or self.receipt_of(plan) is not None:
            return result
        context, trial = self.context, launch.number
        context.fence()
        check = parity_check_of(plan, context=context)
        try:
            compared = context.backend.compare(
                check, result, on_progress=context.show_progress, should_stop=context.should_stop
            )
        except InterruptedByUserError:
            context.events.add("interrupted")
            raise
        except (InfeasibleError, PlanError, InfrastructureError) as error:
            self._not_checked("lost", "INFRA", str(error), trial=trial)
            return result
        if compared.receipt is None:
            if needs_receipt(plan):
                self.compared.reason = compared.steps.unavailable
            self._not_checked("lost", "INFRA", compared.steps.unavailable or "", trial=trial)
            return result
        self.compared.load_s = compared.steps.weights_s
        self._keep(plan, compared.receipt, trial=trial)
        return compared.result

    def prove(self, plan: Plan, *, trial: int, num_left: int) -> ParityRefusal | None:
        """Before a plan can win: None where it has passed by itself, or does so now.

        `num_left` launches are still to come after it.
        """
        refusal = self.refusal_of(plan)
        if refusal is not None or not needs_receipt(plan) or plan.key in self._receipts:
            return refusal
        return self._check(
            plan, trial=trial, num_left=num_left, why_apart=self.compared.why_apart(plan) or ""
        )

    def quarantine(self, plan: Plan, record: TrialRecord, *, trial: int) -> None:
        """Leave out the kind of a plan with a custom schedule, where its trial's outcome asks for it.

        It computed something wrong, or did something else than its plan, as plans of its kind would.
        """
        if record.outcome not in _QUARANTINES or not needs_receipt(plan):
            return
        self._leave_out(plan, record.reason, outcome=record.outcome, trial=trial)

    def _leave_out(self, plan: Plan, reason: str, *, outcome: str, trial: int) -> None:
        kind = self._quarantine_kind(plan, reason, outcome=outcome)
        self.context.events.add("quarantine", trial=trial, schedule=kind.label, reason=reason)
        self.context.observer.message(f"{kind.label} is excluded from the search: {reason}")

    def _kind(self, plan: Plan) -> ParityKind:
        return kind_of_plan(plan, features=self.features)

    def _quarantine_kind(self, plan: Plan, reason: str, *, outcome: str = "WRONG") -> ParityKind:
        kind = self._kind(plan)
        refusal = ParityRefusal(
            verdict=_QUARANTINES[outcome],
            outcome=outcome,
            reason=f"{kind.label} is excluded from the search: {reason}",
            culprit=plan.key,
        )
        self._quarantined.setdefault(kind, refusal)
        return kind

    def _remember(self, plan: Plan, receipt: Receipt) -> None:
        self._receipts[plan.key] = receipt
        if not needs_receipt(plan):
            return  # kinds are of custom schedules
        if receipt.failure is not None:
            self._quarantine_kind(plan, receipt.failure.reason)
        else:
            self._passed.add(self._kind(plan))

    def _was_compared(self, plan: Plan, *, trial: int) -> bool:
        """Whether an earlier process has run the plan's trial, which is then judged by the files it wrote."""
        if self.compared.reason is not None:
            return False
        recorded = self.context.backend.recorded(self.context.run.folder.trial(trial), plan_key=plan.key)
        return recorded is not None and bool(recorded.num_compared)

    def _check(self, plan: Plan, *, trial: int, num_left: int, why_apart: str) -> ParityRefusal | None:
        kind = self._kind(plan)
        if why_apart and why_apart != self._reason_shown:
            self._reason_shown = why_apart
            self.context.observer.message(f"parity checks run as separate launches, because {why_apart}")
        self.context.fence()
        left_s = self.context.budget.remaining_s(num_launches=num_left + self.num_runs)
        self.context.observer.plan_started(
            f"{trial} parity check",
            plan,
            phase="parity",
            time_left_s=left_s,
            measured_share=self.context.budget.measured_share,
        )
        self.context.events.add("parity", trial=trial, schedule=kind.label, time_left_s=left_s)
        try:
            receipt = self._run(plan)
        except InterruptedByUserError:
            self.context.events.add("interrupted")
            raise
        except ParityUnavailableError as error:
            return self._give_up(kind, str(error), trial=trial)
        except NotAsPlannedError as error:
            self._leave_out(plan, str(error), outcome="NOT_AS_PLANNED", trial=trial)
            return self._not_checked("infeasible", "NOT_AS_PLANNED", str(error), trial=trial)
        except (InfeasibleError, PlanError) as error:
            return self._not_checked("infeasible", "INFEASIBLE", str(error), trial=trial)
        except InfrastructureError as error:
            return self._not_checked("lost", "INFRA", str(error), trial=trial)
        self._keep(plan, receipt, trial=trial)
        if receipt.failure is None:
            return None
        self.context.events.add("quarantine", trial=trial, schedule=kind.label, reason=receipt.failure.reason)
        return _failed(receipt, kind)

    def _keep(self, plan: Plan, receipt: Receipt, *, trial: int) -> None:
        """Write a receipt beside its plan, and say what it says."""
        kind = self._kind(plan)
        self.context.fence()
        plan_file = self.folder / f"plan-{plan.key[:12]}" / "plan.json"
        plan_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_plan(plan, path=plan_file)
        write_receipt(receipt, path=receipt_path(plan_file))
        is_first = needs_receipt(plan) and kind not in self._passed
        self._remember(plan, receipt)
        self.context.events.add("parity-verdict", trial=trial, schedule=kind.label, verdict=receipt.verdict)
        if receipt.failure is None and is_first:
            self.context.observer.message(
                f"parity check of {kind.label} passed: {receipt.agreement} ({_worst(receipt)})"
            )

    def _run(self, plan: Plan) -> Receipt:
        context = self.context
        receipt = context.backend.check(
            parity_check_of(plan, context=context),
            on_progress=context.show_progress,
            should_stop=context.should_stop,
        )
        self._num_checks += 1
        return receipt

    def _give_up(self, kind: ParityKind, reason: str, *, trial: int) -> ParityRefusal:
        """Refuse every custom schedule from now on: none can be checked here."""
        text = " ".join(reason.split())
        self._unavailable = ParityRefusal(verdict="infeasible", outcome="INFEASIBLE", reason=text, culprit="")
        self.context.events.add("quarantine", trial=trial, schedule="every custom schedule", reason=text)
        self.context.observer.message(
            f"custom schedules are excluded from the search: they cannot be checked ({kind.label}): {text}"
        )
        return self._unavailable

    def _not_checked(self, verdict: Verdict, outcome: str, reason: str, *, trial: int) -> ParityRefusal:
        text = " ".join(reason.split())
        self.context.events.add("parity-verdict", trial=trial, verdict=verdict, reason=text)
        return ParityRefusal(verdict=verdict, outcome=outcome, reason=text)


def _failed(receipt: Receipt, kind: ParityKind) -> ParityRefusal:
    assert receipt.failure is not None
    reason = f"{kind.label} is excluded from the search: it does not train as stock does: "
    reason += receipt.failure.reason
    return ParityRefusal(verdict="wrong", outcome="WRONG", reason=reason)


def _worst(receipt: Receipt) -> str:
    loss, norm = worst_of(receipt.decisive_steps)
    return f"{len(receipt.steps)} steps, loss within {loss:.1e}, gradient norm within {norm:.1e}"
