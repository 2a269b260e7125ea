"""Which plans the parity gate compares inside of their own trials, and which in launches of their own.

Trial 0 keeps the weights of its first step, in a form that loads under any layout, and its first losses and
gradient norms. The trial of a plan of the same shape starts from those weights, runs its first iterations
under the gate's settings and goes on to be measured: the check costs no launch. Plans of stock schedules are
checked there as well, and nowhere else: another split, mapping or layout may only round otherwise.
"""

import contextlib
import shutil
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from quartet_plugin.errors import StorageError
from quartet_plugin.launchers.command import BRIDGE_MODULE, DEEPSPEED_MODULE, Command
from quartet_plugin.launchers.megatron_words import arguments_in
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.receipt import needs_receipt
from quartet_plugin.space.knobs.use_megatron_fsdp import saved_weights_refusal
from quartet_plugin.space.runtime_refusals import refusal_to_compare
from quartet_plugin.trial.compared_start import ComparedStart, ComparedSteps, kept_by
from quartet_plugin.trial.outcome import TOO_SHORT
from quartet_plugin.trial.parity import STEPS
from quartet_plugin.trial.request import TrialResult
from quartet_plugin.tuner.context import TuningContext
from quartet_plugin.tuner.trial_backend import ParityCheck, trial_weights
from quartet_plugin.tuner.trial_launcher import TrialLaunch, TrialLauncher

_NOT_KEPT = "the baseline trial stored no weights"
_WITH_WORKERS = "trials run in parallel"


def parity_check_of(plan: Plan, *, context: TuningContext) -> ParityCheck:
    """The inputs of the backend for a parity check of a plan in this run."""
    run = context.run
    return ParityCheck(
        plan=plan,
        command=context.command,
        folder=run.folder.parity,
        weights=run.folder.parity_weights,
        device=run.config.device,
        deadline_s=run.config.trial.deadline_s,
        cwd=run.cwd,
    )


def why_nothing_is_kept(command: Command) -> str | None:
    """Why trial 0 keeps no weights, as far as the command tells; None where it keeps them."""
    if command.starter == "deepspeed" or command.entry == DEEPSPEED_MODULE:
        return "only Megatron's trials are compared by their first iterations; this command uses DeepSpeed"
    if command.entry == BRIDGE_MODULE:
        return (
            "only trials of Megatron's own training are compared by their first iterations; this command "
            "uses Megatron-Bridge"
        )
    if command.starter == "other":
        return None
    refusal = refusal_to_compare(arguments_in(command.arguments))
    return None if refusal is None else f"the command has {refusal}"


def baseline_start(context: TuningContext) -> ComparedStart | None:
    """The start of trial 0, which keeps its weights where plans can be compared."""
    if why_nothing_is_kept(context.command) is not None or _why_too_short(context) is not None:
        return None
    return ComparedStart(
        num_steps=STEPS,
        save_weights=trial_weights(context.run.folder.parity_weights),
        restores_settings=True,
    )


def _why_too_short(context: TuningContext) -> str | None:
    """Why the command's own number of iterations leaves none to compare; None where it leaves enough."""
    trial, command = context.run.config.trial, context.command
    train_iters = None if command.starter == "other" else arguments_in(command.arguments).train_iters
    start = ComparedStart(num_steps=STEPS, restores_settings=True)
    least = start.num_warmup(trial.least_warmup) + trial.least_measured
    if not isinstance(train_iters, int) or train_iters >= least:
        return None
    return f"the command trains for {train_iters} iterations, and a compared trial takes {least}"


def launch_baseline(launcher: TrialLauncher, launch: TrialLaunch, *, num_left: int) -> TrialResult:
    """The result of trial 0; of a second launch that compares nothing where the first failed for that.

    It failed while it kept its weights, or the command trains for too few iterations to compare some of them.
    """
    context, weights = launcher.context, launcher.context.run.folder.parity_weights
    recorded = context.backend.recorded(launch.folder, plan_key=None)
    if recorded is None or not recorded.is_measured:
        context.fence()
        shutil.rmtree(weights, ignore_errors=True)
    result = launcher.launch(launch, num_left=num_left)
    if result.is_measured or launch.start is None:
        return result
    is_torn = trial_weights(weights).exists() and kept_by(trial_weights(weights)) is None
    if not is_torn and TOO_SHORT not in result.reason:
        return result
    context.observer.message(f"trial 0 is launched again and stores no weights: {result.reason}")
    return launcher.launch(replace(launch, start=None), num_left=num_left)


def discard_weights(context: TuningContext) -> None:
    """Remove the weights, which are large; not those of a tuner that has taken the run."""
    with contextlib.suppress(StorageError):
        context.fence()
        shutil.rmtree(context.run.folder.parity_weights, ignore_errors=True)


@dataclass(slots=True, kw_only=True)
class ComparedTrials:
    """Decides where a plan is checked, and how its trial starts.

    `weights` are trial 0's, of its attempt `attempt_id`; `steps` are those that it is compared by. `reason`
    says why no plan is compared in its trial; None where plans are. `start_s` are the seconds of trial 0's
    start, `iterations_s` those of a trial's iterations, `load_s` those of the latest load of the weights (0:
    none has been yet). `layout` is the command's.
    """

    weights: Path
    attempt_id: str
    start_s: float
    iterations_s: float
    reason: str | None = None
    settings: tuple[str, ...] = ()
    load_s: float = 0.0
    layout: Layout | None = None

    @classmethod
    def open(
        cls, context: TuningContext, *, baseline: Plan, result: TrialResult, is_sequential: bool
    ) -> "ComparedTrials":
        """What trial 0, of this `result`, has kept; weights of anything else are removed.

        `is_sequential`: trials run one after the other.
        """
        folder, trial = context.run.folder, context.run.config.trial
        weights = trial_weights(folder.parity_weights)
        if kept_by(weights) != result.attempt_id:
            context.fence()
            shutil.rmtree(folder.parity_weights, ignore_errors=True)
        compared = ComparedSteps(unavailable=_NOT_KEPT)
        if result.num_compared:
            check = parity_check_of(baseline, context=context)
            compared = context.backend.adopt(check, result, should_stop=context.should_stop)
        start = ComparedStart(num_steps=STEPS, restores_settings=bool(compared.settings))
        num_iterations = start.num_warmup(trial.least_warmup) + trial.least_measured
        reason = why_nothing_is_kept(context.command) or _why_too_short(context)
        reason = reason or compared.unavailable or (None if is_sequential else _WITH_WORKERS)
        return cls(
            weights=weights,
            attempt_id=result.attempt_id,
            start_s=max(0.0, result.start_s - compared.weights_s),
            iterations_s=num_iterations * statistics.median(result.iteration_s),
            reason=reason,
            settings=compared.settings,
            layout=baseline.layout,
        )

    @property
    def has_weights(self) -> bool:
        """Whether trial 0's weights exist completely; checked at every call."""
        return kept_by(self.weights) == self.attempt_id

    def why_apart(self, plan: Plan, *, has_depth_proxy: bool = False) -> str | None:
        """Why a plan is not compared in its trial; None where it is.

        With a custom schedule it is then compared in launches of its own.

        `has_depth_proxy`: a model with fewer layers is timed before the plan itself.
        """
        if self.reason is not None:
            return self.reason
        if plan.shape != plan.made_for.shape:
            return "the plan's model has another shape than the stored weights"
        if (reason := saved_weights_refusal(plan.layout)) is not None:
            return reason
        if has_depth_proxy:
            return "a depth proxy is measured first"
        if not self.has_weights:
            return "the weights that trial 0 stored are missing"
        if self.load_s > max(self.start_s, self.iterations_s):
            return (
                f"reading the weights takes {self.load_s:.3g} s, more than a trial's start "
                f"({self.start_s:.3g} s) and than its iterations ({self.iterations_s:.3g} s)"
            )
        return None

    def start_of(self, plan: Plan) -> ComparedStart | None:
        """The start of a plan's trial that is compared; None of a trial that is only measured."""
        if self.why_apart(plan) is not None or (not needs_receipt(plan) and self._may_differ(plan)):
            return None
        return ComparedStart(num_steps=STEPS, weights=self.weights, restores_settings=bool(self.settings))

    def _may_differ(self, plan: Plan) -> bool:
        """Whether a plan's microbatches have other samples in a job whose loss depends on that (class C)."""
        if not plan.made_for.batching_features or self.layout is None:
            return False
        names = ("data_parallel", "micro_batch_size")
        return any(getattr(plan.layout, name) != getattr(self.layout, name) for name in names)
