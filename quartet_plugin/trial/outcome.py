"""What came of an attempt, judged from the files its ranks wrote.

The launcher's exit code says nothing (torchrun's is always 1). Its log is asked for two things only that
no rank can report: the signal that killed a rank, and a port that could not be bound.
"""

import math
import re
import signal
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from quartet_plugin.protocol.attempt_files import ErrReport, RankReport, Snapshot, TrialSheet
from quartet_plugin.trial.log import has_address_in_use, root_cause
from quartet_plugin.trial.request import PHASES, Outcome, Phase
from quartet_plugin.trial.watchdog import Expiry

StoppedBy = Literal["complete", "error", "exit", "hang", "cancel"]


class Cause(StrEnum):
    """Why an attempt ended as it did; it decides whether another one is made."""

    MEASURED = "measured"
    SPREAD = "spread"
    NOT_FINITE = "not finite"
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
    Cause.MEMORY: Outcome.INFEASIBLE,
    Cause.REFUSED: Outcome.INFEASIBLE,
    Cause.DEADLINE: Outcome.INFEASIBLE,
    Cause.PLAN: Outcome.HARNESS,
    Cause.SEAM: Outcome.HARNESS,
    Cause.FORMAT: Outcome.HARNESS,
    Cause.CANCELLED: Outcome.CANCELLED,
}
# What CUDA, NCCL and the driver say of a device that is broken or lost, whatever ran on it.
_DEVICE_FAULT = re.compile(
    r"uncorrectable (ECC|NVLink) error|GPU is lost|fallen off the bus|\bXid\b|no CUDA-capable device"
    r"|CUDA-capable device\(s\) is/are busy or unavailable|hardware stack error",
    re.IGNORECASE,
)
_KINDS: dict[str, Cause] = {
    "out-of-memory": Cause.MEMORY,
    "refused": Cause.REFUSED,
    "plan": Cause.PLAN,
    "seam": Cause.SEAM,
    "network": Cause.NETWORK,
    "error": Cause.ERROR,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known at the end of an attempt.

    `exit_code` is the launcher's, None where we ended it; `is_single` says that the launcher is the one
    rank itself. `num_oom_kills` counts processes that the kernel killed for memory meanwhile. `is_cut`: the
    ranks were told to end early because the plan was clearly slow.
    """

    sheet: TrialSheet
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
class Verdict:
    """The judgement; the numbers are filled where something was measured."""

    cause: Cause
    outcome: Outcome
    reason: str
    phase: Phase
    memory_excess_bytes: int = 0
    iteration_s: tuple[float, ...] = ()
    loss: tuple[float, ...] = ()
    grad_norm: tuple[float, ...] = ()
    peak_memory_bytes: int = 0


def is_complete(snapshot: Snapshot, *, num_processes: int | None) -> bool:
    """Whether every rank has left its report; where their number is unknown, every rank that was seen."""
    if num_processes is not None:
        return len(snapshot.reports) >= num_processes
    ranks = set(snapshot.beats)
    return (
        bool(ranks)
        and ranks == set(range(len(ranks)))
        and ranks <= set(snapshot.reports)
        and all(beat.phase == "done" for beat in snapshot.beats.values())
    )


def classify(evidence: Evidence) -> Verdict:
    """The outcome of an attempt, its reason in one line and its measured numbers."""
    snapshot = evidence.snapshot
    peaks = [report.peak_memory_bytes for report in snapshot.reports.values()]
    peaks += [err.peak_memory_bytes for err in snapshot.errs.values()]
    return replace(_classify(evidence), peak_memory_bytes=max(peaks, default=0))


def _classify(evidence: Evidence) -> Verdict:
    snapshot = evidence.snapshot
    if snapshot.faults:
        return _verdict(evidence, Cause.FORMAT, snapshot.faults[0])
    if is_complete(snapshot, num_processes=evidence.num_processes):
        return _measured(evidence)
    if evidence.stopped_by == "cancel":
        return _verdict(evidence, Cause.CANCELLED, "stopped before it was measured")
    if evidence.stopped_by == "hang":
        assert evidence.expiry is not None
        cause = Cause.DEADLINE if evidence.expiry.is_wall else Cause.HANG
        return replace(_verdict(evidence, cause, str(evidence.expiry)), phase=evidence.expiry.phase)
    first = _first_error(snapshot)
    if first is not None and first.kind != "network":
        return _reported(evidence, first)
    if has_address_in_use(evidence.log) or (first and has_address_in_use(first.message)):
        return _verdict(evidence, Cause.PORT, "a network port is in use already")
    died = _signal_or_exit(evidence)
    if died is not None:
        return died
    if first is not None:
        return _reported(evidence, first)
    return _silent(evidence)


def _verdict(evidence: Evidence, cause: Cause, reason: str) -> Verdict:
    return Verdict(
        cause=cause,
        outcome=_OUTCOMES.get(cause, Outcome.INFRA),
        reason=one_line(reason),
        phase=slowest_phase(evidence.snapshot),
    )


def device_fault(verdict: Verdict, fault: str) -> Verdict:
    """The verdict where a device was faulty meanwhile: whatever came of it is not the plan's."""
    reason = one_line(f"{fault}; the attempt's own end: {verdict.reason}")
    return Verdict(
        cause=Cause.DEVICE,
        outcome=Outcome.INFRA,
        reason=reason,
        phase=verdict.phase,
        peak_memory_bytes=verdict.peak_memory_bytes,
    )


def slowest_phase(snapshot: Snapshot) -> Phase:
    """How far the attempt came: the phase of the rank that is furthest behind."""
    return min((beat.phase for beat in snapshot.beats.values()), key=PHASES.index, default="launch")


def one_line(text: str, *, limit: int = 400) -> str:
    """`text` on one line, without control characters, cut to `limit`."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def _first_error(snapshot: Snapshot) -> ErrReport | None:
    """The root cause: the earliest report, before those that only saw a peer go away."""
    return min(snapshot.errs.values(), key=lambda err: (err.kind == "network", err.time), default=None)


def _reported(evidence: Evidence, err: ErrReport) -> Verdict:
    cause = _KINDS[err.kind]
    if cause in (Cause.ERROR, Cause.NETWORK) and _DEVICE_FAULT.search(err.message):
        cause = Cause.DEVICE
    if cause is Cause.MEMORY:
        excess = max(1, *(e.wanted_bytes for e in evidence.snapshot.errs.values() if e.kind == err.kind))
        reason = (
            f"out of memory on rank {err.launch_rank} in phase {err.phase}: "
            f"{excess / 2**20:,.0f} MiB more than there were, after {err.peak_memory_bytes / 2**20:,.0f} MiB"
        )
    else:
        excess = 0
        reason = f"rank {err.launch_rank} in phase {err.phase}: {err.type}: {err.message}"
    return replace(_verdict(evidence, cause, reason), phase=err.phase, memory_excess_bytes=excess)


def _signal_or_exit(evidence: Evidence) -> Verdict | None:
    """A rank that left without a report, as its parent saw it."""
    ranks = {beat.pid: rank for rank, beat in evidence.snapshot.beats.items()}
    found = root_cause(evidence.log)
    who = "a rank"
    if found is not None and found[0] > 0 and ranks.get(found[1]) in evidence.snapshot.errs:
        return None  # it has left a report, and only ended by it
    if evidence.is_single:
        code = evidence.exit_code
        who = "the process"
    elif found is not None and (found[1] in ranks or not ranks):
        code = found[0]
        who = f"rank {ranks[found[1]]}" if ranks else who
    elif evidence.exit_code is not None and evidence.exit_code < 0:
        name = _signal_name(evidence.exit_code)
        return _verdict(evidence, Cause.LAUNCHER, f"the launcher was ended by {name}")
    else:
        return None
    if code is None or code == 0 or (code > 0 and not ranks):
        return None
    if code > 0:
        return _verdict(evidence, Cause.EXIT, f"{who} ended with exit code {code} and no report")
    if code == -signal.SIGKILL:
        why = "the kernel ran out of memory" if evidence.num_oom_kills else "was the host's memory full?"
        return _verdict(evidence, Cause.KILLED, f"{who} was killed (SIGKILL): {why}")
    if code == -signal.SIGTERM:
        return _verdict(evidence, Cause.LAUNCHER, f"{who} was ended by SIGTERM from outside")
    return _verdict(evidence, Cause.SIGNAL, f"{who} was ended by {_signal_name(code)}")


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _silent(evidence: Evidence) -> Verdict:
    """The command ended and no rank says why."""
    snapshot = evidence.snapshot
    if not snapshot.beats and not snapshot.reports:
        code = "" if evidence.exit_code is None else f" (exit code {evidence.exit_code})"
        return _verdict(
            evidence, Cause.NOTHING, f"the command ended{code} before any rank of a training began"
        )
    missing = sorted(set(snapshot.beats) - set(snapshot.reports))
    if missing and evidence.exit_code != 0:
        return _verdict(evidence, Cause.EXIT, f"rank {missing[0]} ended without a report")
    rank = missing[0] if missing else "a rank"
    return _verdict(
        evidence, Cause.NOTHING, f"the command ended normally and rank {rank} had measured nothing"
    )


def _measured(evidence: Evidence) -> Verdict:
    reports = [report for _, report in sorted(evidence.snapshot.reports.items())]
    sheet = evidence.sheet
    odd = [report.launch_rank for report in reports if report.plan_key != sheet.plan_key]
    if odd:
        return _verdict(evidence, Cause.FORMAT, f"rank {odd[0]} ran another plan than it was given")
    wanted = sheet.warmup + sheet.measure
    for report in reports:
        fault = _not_finite(report)
        if fault is not None:
            return _with_numbers(_verdict(evidence, Cause.NOT_FINITE, fault), reports, sheet)
    short = min(reports, key=lambda report: len(report.iterations))
    is_short = len(short.iterations) < wanted
    if is_short and not (evidence.is_cut and len(short.iterations) > sheet.warmup):
        cause = Cause.CANCELLED if evidence.stopped_by == "cancel" else Cause.NOTHING
        reason = (
            f"rank {short.launch_rank} made {len(short.iterations)} of {wanted} iterations; "
            "the command must train for at least as many"
        )
        return _verdict(evidence, cause, reason)
    measured = _with_numbers(_verdict(evidence, Cause.MEASURED, "measured"), reports, sheet)
    if min(measured.iteration_s) <= 0:
        return _verdict(evidence, Cause.FORMAT, "an iteration took 0 s; the ranks' clocks cannot be right")
    if is_short:
        done = len(measured.iteration_s)
        return replace(measured, reason=f"cut short after {done} iterations: clearly slower than the best")
    spread = relative_spread(measured.iteration_s)
    if spread > evidence.max_spread:
        reason = f"iteration times vary by {spread:.0%} (median deviation), above {evidence.max_spread:.0%}"
        return replace(measured, cause=Cause.SPREAD, outcome=Outcome.UNSTABLE, reason=reason)
    return measured


def relative_spread(times: Sequence[float]) -> float:
    """The median absolute deviation, relative to the median; 0 for fewer than 3 values."""
    if len(times) < 3:
        return 0.0
    middle = statistics.median(times)
    return statistics.median(abs(value - middle) for value in times) / middle


def _not_finite(report: RankReport) -> str | None:
    """Iterations that mixed precision skips have no finite gradient by design."""
    for one in report.iterations:
        for name, value in (("loss", one.loss), ("gradient norm", one.grad_norm)):
            if value is not None and not one.skipped and not math.isfinite(float(value)):
                return f"{name} is {float(value)} at iteration {one.iteration}"
    return None


def _with_numbers(verdict: Verdict, reports: Sequence[RankReport], sheet: TrialSheet) -> Verdict:
    """Add the measured iterations: the slowest rank's time, the first loss there is, RANK 0's norm."""
    reports = sorted(reports, key=lambda report: report.rank)
    end = min(sheet.warmup + sheet.measure, *(len(report.iterations) for report in reports))
    rows = [[report.iterations[index] for report in reports] for index in range(min(sheet.warmup, end), end)]
    losses = [next((one.loss for one in row if one.loss is not None), None) for row in rows]
    norms = [next((one.grad_norm for one in row if one.grad_norm is not None), None) for row in rows]
    return replace(
        verdict,
        iteration_s=tuple(max(one.iteration_s for one in row) for row in rows),
        loss=tuple(float(value) for value in losses if value is not None),
        grad_norm=tuple(float(value) for value in norms if value is not None),
    )
