"""The verdict on an attempt, from the files that its ranks wrote.

The launcher's exit code says nothing (torchrun's is always 1). Its log is searched for the two facts that no
rank can report: the signal that killed a rank, and a port that could not be bound.
"""

import math
import re
import signal
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from quartet_plugin.model.plan import Plan
from quartet_plugin.protocol.attempt_files import TrialSpec
from quartet_plugin.protocol.rank_files import RankFailure, RankReport, Snapshot
from quartet_plugin.protocol.terminal import reason_line
from quartet_plugin.trial.as_planned import difference_from
from quartet_plugin.trial.log import has_address_in_use, root_cause
from quartet_plugin.trial.request import PHASES, AttemptOutcome, Outcome, Phase
from quartet_plugin.trial.watchdog import Expiry

StoppedBy = Literal["complete", "error", "exit", "hang", "cancel"]


class Cause(StrEnum):
    """Why an attempt ended; the cause decides whether another attempt is made."""

    MEASURED = "measured"
    SPREAD = "spread"
    NOT_FINITE = "not finite"
    NOT_AS_PLANNED = "not as planned"
    MEMORY = "memory"
    REFUSED = "refused"
    PLAN = "plan"
    SEAM = "seam"
    FORMAT = "format"
    DEADLINE = "deadline"
    HANG = "hang"
    ERROR = "error"
    KILLED = "killed"
    SIGNAL = "signal"
    EXIT = "exit"
    PORT = "port"
    NETWORK = "network"
    DEVICE = "device"
    LAUNCHER = "launcher"
    NOTHING = "nothing"
    CANCELLED = "cancelled"


_OUTCOMES: dict[Cause, Outcome] = {
    Cause.MEASURED: Outcome.OK,
    Cause.SPREAD: Outcome.UNSTABLE,
    Cause.NOT_FINITE: Outcome.WRONG,
    Cause.NOT_AS_PLANNED: Outcome.NOT_AS_PLANNED,
    Cause.MEMORY: Outcome.INFEASIBLE,
    Cause.REFUSED: Outcome.INFEASIBLE,
    Cause.DEADLINE: Outcome.INFEASIBLE,
    Cause.PLAN: Outcome.HARNESS,
    Cause.SEAM: Outcome.HARNESS,
    Cause.FORMAT: Outcome.HARNESS,
    Cause.CANCELLED: Outcome.CANCELLED,
}
# The end of the reason of a trial whose command ended by itself before all iterations were done.
TOO_SHORT = "the command must train for at least as many"
_MAX_REASON = 400
# Messages of CUDA, NCCL and the driver about a device that is broken or lost, whatever ran on it.
_DEVICE_FAULT = re.compile(
    r"uncorrectable (ECC|NVLink) error|GPU is lost|fallen off the bus|\bXid\b|no CUDA-capable device"
    r"|CUDA-capable device\(s\) is/are busy or unavailable|hardware stack error",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptObservations:
    """The observations at the end of an attempt.

    `exit_code` is the launcher's, None where the tuner ended it; `is_single`: the launcher itself is the only
    rank. `num_oom_kills` counts processes that the kernel killed for memory during the attempt. `is_cut`: the
    ranks were asked to end early because the plan was clearly slow. `plan` is None for the baseline.
    """

    spec: TrialSpec
    plan: Plan | None = None
    snapshot: Snapshot
    num_processes: int | None
    stopped_by: StoppedBy
    exit_code: int | None
    is_single: bool
    expiry: Expiry | None = None
    log: str = ""
    num_oom_kills: int = 0
    max_spread: float = 0.25
    is_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(AttemptOutcome):
    """The outcome of an attempt with its cause."""

    cause: Cause


def is_complete(snapshot: Snapshot, *, num_processes: int | None) -> bool:
    """Whether every rank has left its report; where their number is unknown, every rank with a heartbeat."""
    if num_processes is not None:
        return len(snapshot.reports) >= num_processes
    ranks = set(snapshot.beats)
    return (
        bool(ranks)
        and ranks == set(range(len(ranks)))
        and ranks <= set(snapshot.reports)
        and all(beat.phase == "done" for beat in snapshot.beats.values())
    )


def classify(observations: AttemptObservations) -> Verdict:
    """The outcome of an attempt, its reason in one line and its measured numbers.

    Of several ranks' failures the earliest is the root cause; a rank that only lost its peer is never blamed.
    """
    snapshot = observations.snapshot
    peaks = [report.peak_memory_bytes for report in snapshot.reports.values()]
    peaks += [err.peak_memory_bytes for err in snapshot.errs.values()]
    untracked = [report.memory.untracked_bytes for report in snapshot.reports.values() if report.memory]
    return replace(
        _classify(observations),
        peak_memory_bytes=max(peaks, default=0),
        untracked_memory_bytes=max(untracked, default=None),
    )


def _classify(observations: AttemptObservations) -> Verdict:
    snapshot = observations.snapshot
    if snapshot.faults:
        return _verdict(observations, Cause.FORMAT, snapshot.faults[0])
    if is_complete(snapshot, num_processes=observations.num_processes):
        return _measured(observations)
    if observations.stopped_by == "cancel":
        return _verdict(observations, Cause.CANCELLED, "stopped before it was measured")
    if observations.stopped_by == "hang":
        assert observations.expiry is not None
        cause = Cause.DEADLINE if observations.expiry.is_wall else Cause.HANG
        return replace(
            _verdict(observations, cause, str(observations.expiry)), phase=observations.expiry.phase
        )
    # The root cause: the earliest report, before those that only saw a peer go away.
    first = min(snapshot.errs.values(), key=lambda err: (err.kind == "network", err.time), default=None)
    if first is not None and first.kind != "network":
        return _reported(observations, first)
    if has_address_in_use(observations.log) or (first and has_address_in_use(first.message)):
        return _verdict(observations, Cause.PORT, "a network port is already in use")
    death = _death(observations)
    if death is not None:
        return death
    if first is not None:
        return _reported(observations, first)
    return _silent(observations)


def _verdict(observations: AttemptObservations, cause: Cause, reason: str) -> Verdict:
    return Verdict(
        cause=cause,
        outcome=_OUTCOMES.get(cause, Outcome.INFRA),
        reason=reason_line(reason, limit=_MAX_REASON),
        phase=slowest_phase(observations.snapshot),
    )


def device_fault(verdict: Verdict, fault: str) -> Verdict:
    """The verdict if a device failed during the attempt: the attempt gives no information about the plan."""
    reason = reason_line(f"{fault}; the attempt's own end: {verdict.reason}", limit=_MAX_REASON)
    return Verdict(
        cause=Cause.DEVICE,
        outcome=Outcome.INFRA,
        reason=reason,
        phase=verdict.phase,
        peak_memory_bytes=verdict.peak_memory_bytes,
    )


def slowest_phase(snapshot: Snapshot) -> Phase:
    """The phase of the rank that is furthest behind."""
    return min((beat.phase for beat in snapshot.beats.values()), key=PHASES.index, default="launch")


def _reported(observations: AttemptObservations, err: RankFailure) -> Verdict:
    cause = Cause.MEMORY if err.kind == "out-of-memory" else Cause(err.kind)
    if cause in (Cause.ERROR, Cause.NETWORK) and _DEVICE_FAULT.search(err.message):
        cause = Cause.DEVICE
    if cause is Cause.MEMORY:
        excess = max(1, *(e.wanted_bytes for e in observations.snapshot.errs.values() if e.kind == err.kind))
        # A single byte stands for a message without the allocation's size.
        size = f" of {excess / 2**20:,.0f} MiB" if excess > 1 else ""
        reason = (
            f"out of memory on rank {err.launch_rank} in phase {err.phase}: an allocation{size} failed "
            f"(peak so far {err.peak_memory_bytes / 2**20:,.0f} MiB)"
        )
    else:
        excess = 0
        reason = f"rank {err.launch_rank} in phase {err.phase}: {err.type}: {err.message}"
    return replace(_verdict(observations, cause, reason), phase=err.phase, memory_excess_bytes=excess)


def _death(observations: AttemptObservations) -> Verdict | None:
    """The verdict on a rank that ended without a report, as its parent observed it."""
    ranks = {beat.pid: rank for rank, beat in observations.snapshot.beats.items()}
    failed_first = root_cause(observations.log)
    who = "a rank"
    if failed_first and failed_first[0] > 0 and ranks.get(failed_first[1]) in observations.snapshot.errs:
        return None  # the rank has left a report
    if observations.is_single:
        code = observations.exit_code
        who = "the process"
    elif failed_first is not None and (failed_first[1] in ranks or not ranks):
        code = failed_first[0]
        who = f"rank {ranks[failed_first[1]]}" if ranks else who
    elif observations.exit_code is not None and observations.exit_code < 0:
        name = _signal_name(observations.exit_code)
        return _verdict(observations, Cause.LAUNCHER, f"the launcher was ended by {name}")
    else:
        return None
    if code is None or code == 0 or (code > 0 and not ranks):
        return None
    if code > 0:
        return _verdict(observations, Cause.EXIT, f"{who} ended with exit code {code} and no report")
    if code == -signal.SIGKILL:
        why = (
            ": the host ran out of memory"
            if observations.num_oom_kills
            else "; the host may have run out of memory; check its kernel log"
        )
        return _verdict(observations, Cause.KILLED, f"{who} was killed (SIGKILL){why}")
    if code == -signal.SIGTERM:
        return _verdict(observations, Cause.LAUNCHER, f"{who} was ended by SIGTERM from outside")
    return _verdict(observations, Cause.SIGNAL, f"{who} was ended by {_signal_name(code)}")


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _silent(observations: AttemptObservations) -> Verdict:
    """The verdict on a command that ended without a report of any rank's failure."""
    snapshot = observations.snapshot
    if not snapshot.beats and not snapshot.reports:
        code = "" if observations.exit_code is None else f" (exit code {observations.exit_code})"
        return _verdict(
            observations, Cause.NOTHING, f"the command ended{code} before any rank started to train"
        )
    missing = sorted(set(snapshot.beats) - set(snapshot.reports))
    if missing and observations.exit_code != 0:
        return _verdict(observations, Cause.EXIT, f"rank {missing[0]} ended without a report")
    who = f"rank {missing[0]}" if missing else "at least one rank"
    code = "" if observations.exit_code is None else f" with exit code {observations.exit_code}"
    return _verdict(
        observations,
        Cause.NOTHING,
        f"the command ended{code}, but {who} reported no measured iteration; make it train for at least "
        "warmup + measure iterations",
    )


def _measured(observations: AttemptObservations) -> Verdict:
    reports = [report for _, report in sorted(observations.snapshot.reports.items())]
    spec = observations.spec
    odd = [report.launch_rank for report in reports if report.plan_key != spec.plan_key]
    if odd:
        return _verdict(observations, Cause.FORMAT, f"rank {odd[0]} did not run the plan that it was given")
    if spec.plan_key is not None:
        difference = (
            "its plan cannot be read"
            if observations.plan is None
            else difference_from(observations.plan, reports, modules=spec.modules)
        )
        if difference is not None:
            return _verdict(observations, Cause.NOT_AS_PLANNED, difference)
    wanted = spec.warmup + spec.least_measured
    for report in reports:
        fault = _not_finite(report)
        if fault is not None:
            return _with_numbers(_verdict(observations, Cause.NOT_FINITE, fault), reports, spec)
    short = min(reports, key=lambda report: len(report.iterations))
    is_short = len(short.iterations) < wanted
    if is_short and not (observations.is_cut and len(short.iterations) > spec.warmup):
        cause = Cause.CANCELLED if observations.stopped_by == "cancel" else Cause.NOTHING
        reason = f"rank {short.launch_rank} made {len(short.iterations)} of {wanted} iterations; " + TOO_SHORT
        return _verdict(observations, cause, reason)
    measured = _with_numbers(_verdict(observations, Cause.MEASURED, "measured"), reports, spec)
    if min(measured.iteration_s) <= 0:
        return _verdict(observations, Cause.FORMAT, "an iteration took 0 s; the ranks' clocks must be wrong")
    if is_short or any(report.ended_early == "slower" for report in reports):
        reason = f"cut short after {len(measured.iteration_s)} iterations: clearly slower than the best"
        return replace(measured, reason=reason, is_cut=True)
    spread = relative_spread(measured.iteration_s)
    if spread > observations.max_spread:
        reason = (
            f"iteration times vary by {spread:.0%} (median deviation), above {observations.max_spread:.0%}"
        )
        return replace(measured, cause=Cause.SPREAD, outcome=Outcome.UNSTABLE, reason=reason)
    return measured


def relative_spread(times: Sequence[float]) -> float:
    """The median absolute deviation, relative to the median; 0 for fewer than 3 values."""
    if len(times) < 3:
        return 0.0
    middle = statistics.median(times)
    return statistics.median(abs(value - middle) for value in times) / middle


def _not_finite(report: RankReport) -> str | None:
    """The first value that is not finite; iterations that mixed precision skips have none by design."""
    for step in report.iterations:
        for name, value in (("loss", step.loss), ("gradient norm", step.grad_norm)):
            if value is not None and not step.skipped and not math.isfinite(float(value)):
                return f"{name} is {float(value)} at iteration {step.iteration}"
    return None


def _with_numbers(verdict: Verdict, reports: Sequence[RankReport], spec: TrialSpec) -> Verdict:
    """Add the measured iterations: the slowest rank's time, the lowest RANK's loss and gradient norm."""
    reports = sorted(reports, key=lambda report: report.rank)
    everything = list(zip(*(report.iterations for report in reports), strict=False))
    slowest = [max(step.iteration_s for step in row) for row in everything]
    measured = spec.measured(slowest)
    rows = [everything[index] for index in measured]
    losses = [next((step.loss for step in row if step.loss is not None), None) for row in rows]
    norms = [next((step.grad_norm for step in row if step.grad_norm is not None), None) for row in rows]
    return replace(
        verdict,
        iteration_s=tuple(slowest[index] for index in measured),
        loss=tuple(float(value) for value in losses if value is not None),
        grad_norm=tuple(float(value) for value in norms if value is not None),
    )
