"""Judging an attempt from its files, and whether another one is made."""

from typing import Any

import pytest

from quartet_plugin.protocol.rank_files import DeviceMemory
from quartet_plugin.trial.outcome import Cause, Verdict, classify, is_complete, relative_spread
from quartet_plugin.trial.request import Outcome
from quartet_plugin.trial.runner import MAX_PORTS, apply_retry_policy
from quartet_plugin.trial.watchdog import Expiry
from tests.trial.factory import beat, err, evidence, iteration, report

ROOT_CAUSE = "Root Cause (first observed failure):\n[0]:\n  exitcode  : {code} (pid: {pid})\n"


def test_the_slowest_rank_counts_and_warm_up_does_not() -> None:
    first = report(0, iterations=tuple(iteration(n, iteration_s=0.1 * n, loss=None) for n in range(1, 6)))
    last = report(1, iterations=tuple(iteration(n, iteration_s=0.35, loss=9.0 - n) for n in range(1, 6)))
    verdict = classify(evidence(reports=(first, last), max_spread=9.0))
    assert verdict.iteration_s == pytest.approx((0.35, 0.35, 0.4, 0.5))
    assert verdict.loss == (7.0, 6.0, 5.0, 4.0)
    assert verdict.grad_norm == (1.0,) * 4
    assert verdict.peak_memory_bytes == 101


def test_measured_counts_whatever_happens_at_exit() -> None:
    done = evidence(reports=(report(0), report(1)), errs=(err(1),), exit_code=-6, stopped_by="complete")
    assert classify(done).outcome is Outcome.OK


def test_a_permuted_mapping_reports_by_megatrons_rank() -> None:
    one = report(0, rank=1, iterations=tuple(iteration(n, grad_norm=2.0) for n in range(1, 6)))
    two = report(1, rank=0, iterations=tuple(iteration(n, grad_norm=3.0) for n in range(1, 6)))
    assert classify(evidence(reports=(one, two))).grad_norm == (3.0,) * 4


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_what_is_not_finite_is_wrong_unless_skipped(name: str, value: str) -> None:
    def judged(is_skipped: bool) -> Outcome:
        rows = [iteration(n) for n in range(1, 6)]
        rows[0] = iteration(1, **{name: value}, skipped=is_skipped)
        return classify(evidence(reports=(report(0), report(1, iterations=tuple(rows))))).outcome

    assert judged(False) is Outcome.WRONG
    assert judged(True) is Outcome.OK


def test_the_earliest_error_is_the_root_cause_and_lost_peers_never_are() -> None:
    errs = (
        err(0, time=1.0, kind="network", type="DistBackendError", message="peer gone"),
        err(1, time=2.0, message="first"),
        err(2, time=3.0, kind="out-of-memory", wanted_bytes=5),
    )
    verdict = classify(evidence(errs=errs, num_processes=3, stopped_by="error"))
    assert verdict.outcome is Outcome.INFRA
    assert verdict.reason == "rank 1 in phase measure: RuntimeError: first"
    assert classify(evidence(errs=errs[:1])).cause is Cause.NETWORK


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("out-of-memory", Outcome.INFEASIBLE),
        ("refused", Outcome.INFEASIBLE),
        ("plan", Outcome.HARNESS),
        ("seam", Outcome.HARNESS),
        ("network", Outcome.INFRA),
        ("error", Outcome.INFRA),
    ],
)
def test_kinds_of_failure(kind: str, outcome: Outcome) -> None:
    verdict = classify(evidence(errs=(err(1, kind=kind, message="a\nb\x1b[31m"),), stopped_by="error"))
    assert verdict.outcome is outcome
    assert verdict.reason.isprintable()
    assert (verdict.memory_excess_bytes > 0) == (kind == "out-of-memory")


@pytest.mark.parametrize(
    ("code", "cause"),
    [(-9, Cause.KILLED), (-11, Cause.SIGNAL), (-15, Cause.LAUNCHER), (17, Cause.EXIT)],
)
def test_a_rank_without_a_report_as_its_parent_saw_it(code: int, cause: Cause) -> None:
    known = evidence(beats=(beat(0), beat(1)), log=ROOT_CAUSE.format(code=code, pid=1001))
    assert classify(known).cause is cause
    assert "rank 1" in classify(known).reason
    foreign = evidence(beats=(beat(0), beat(1)), log=ROOT_CAUSE.format(code=code, pid=99))
    assert classify(foreign).cause is Cause.EXIT
    assert "without a report" in classify(foreign).reason


def test_a_killed_rank_behind_a_lost_peer_is_found() -> None:
    lost = err(0, kind="network", message="Connection closed by peer")
    verdict = classify(
        evidence(beats=(beat(0), beat(1)), errs=(lost,), log=ROOT_CAUSE.format(code=-9, pid=1001))
    )
    assert verdict.cause is Cause.KILLED
    assert (
        "host ran out of memory"
        in classify(
            evidence(beats=(beat(0),), log=ROOT_CAUSE.format(code=-9, pid=1000), num_oom_kills=1)
        ).reason
    )


@pytest.mark.parametrize(("code", "cause"), [(-9, Cause.KILLED), (-11, Cause.SIGNAL), (3, Cause.EXIT)])
def test_a_single_process_is_its_own_launcher(code: int, cause: Cause) -> None:
    assert (
        classify(evidence(beats=(beat(0),), num_processes=1, is_single=True, exit_code=code)).cause is cause
    )


def test_the_users_text_does_not_decide() -> None:
    """Neither the exit code nor words in the log make an outcome."""
    log = "torch.OutOfMemoryError: CUDA out of memory\nKilled\n"
    verdict = classify(evidence(beats=(beat(0), beat(1)), log=log))
    assert (verdict.outcome, verdict.memory_excess_bytes) == (Outcome.INFRA, 0)


def test_memory_beside_the_pool_is_the_fullest_devices() -> None:
    memory = [
        DeviceMemory(peak_allocated_bytes=1, peak_reserved_bytes=2, untracked_bytes=size)
        for size in (3, 5, 4)
    ]
    reports = tuple(report(rank, memory=held) for rank, held in enumerate(memory))
    assert classify(evidence(reports=reports)).untracked_memory_bytes == 5
    assert classify(evidence(reports=(report(0),))).untracked_memory_bytes is None


def test_complete_needs_every_rank() -> None:
    one = evidence(beats=(beat(0), beat(1, phase="done")), reports=(report(1),)).snapshot
    assert not is_complete(one, num_processes=2)
    assert not is_complete(one, num_processes=None)
    both = evidence(
        beats=(beat(0, phase="done"), beat(1, phase="done")), reports=(report(0), report(1))
    ).snapshot
    assert is_complete(both, num_processes=2)
    assert is_complete(both, num_processes=None)
    assert not is_complete(both, num_processes=3)


def test_an_early_stop_is_no_measurement() -> None:
    few = tuple(iteration(n) for n in range(1, 4))
    reports = (report(0, iterations=few), report(1, iterations=few))
    assert classify(evidence(reports=reports, stopped_by="cancel")).outcome is Outcome.CANCELLED
    assert classify(evidence(reports=reports)).outcome is Outcome.INFRA
    assert classify(evidence(reports=(report(0, iterations=()), report(1)))).outcome is Outcome.INFRA


def test_spread() -> None:
    assert relative_spread((1.0, 9.0)) == 0.0
    assert relative_spread((1.0, 1.0, 9.0)) == 0.0
    assert relative_spread((1.0, 2.0, 3.0)) == 0.5


def failed(cause: Cause, reason: str = "x 1") -> Verdict:
    """An INFRA verdict."""
    return Verdict(cause=cause, outcome=Outcome.INFRA, reason=reason, phase="measure")


def settled(verdict: Verdict, *earlier: Verdict, **changes: Any) -> tuple[Outcome, bool]:
    """The outcome and whether it is tried again."""
    options: dict[str, Any] = {"max_attempts": 3, "is_baseline": False, "can_move_port": True}
    last, is_again = apply_retry_policy(verdict, earlier=earlier, **{**options, **changes})
    return last.outcome, is_again


@pytest.mark.parametrize(
    "outcome", [Outcome.OK, Outcome.INFEASIBLE, Outcome.WRONG, Outcome.HARNESS, Outcome.CANCELLED]
)
def test_these_are_never_tried_again(outcome: Outcome) -> None:
    verdict = Verdict(cause=Cause.MEASURED, outcome=outcome, reason="", phase="done")
    assert settled(verdict) == (outcome, False)


@pytest.mark.parametrize("cause", [Cause.HANG, Cause.KILLED, Cause.ERROR, Cause.SIGNAL, Cause.EXIT])
def test_one_repetition_proves(cause: Cause) -> None:
    one = failed(cause)
    assert settled(one) == (Outcome.INFRA, True)
    assert settled(one, failed(cause, "x 2")) == (Outcome.INFEASIBLE, False)
    assert settled(one, failed(cause), is_baseline=True) == (Outcome.INFRA, False)


def test_different_errors_prove_nothing() -> None:
    assert settled(failed(Cause.ERROR, "a"), failed(Cause.ERROR, "b")) == (Outcome.INFRA, True)
    earlier = (failed(Cause.ERROR, "a"), failed(Cause.NETWORK))
    assert settled(failed(Cause.ERROR, "b"), *earlier) == (Outcome.INFRA, False)


def test_a_script_of_the_users_that_fails_is_not_tried_again() -> None:
    assert settled(failed(Cause.ERROR), is_baseline=True) == (Outcome.INFRA, False)


def test_ports_do_not_count() -> None:
    port = failed(Cause.PORT)
    assert settled(port) == (Outcome.INFRA, True)
    assert settled(port, can_move_port=False) == (Outcome.INFRA, False)
    assert settled(port, *[port] * MAX_PORTS) == (Outcome.INFRA, False)
    assert settled(failed(Cause.NETWORK), port, port, port, max_attempts=2) == (Outcome.INFRA, True)


def test_noise_is_measured_once_more() -> None:
    noisy = Verdict(cause=Cause.SPREAD, outcome=Outcome.UNSTABLE, reason="", phase="done")
    assert settled(noisy) == (Outcome.UNSTABLE, True)
    assert settled(noisy, noisy) == (Outcome.UNSTABLE, False)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "NVML: GPU is lost",
        "NCCL WARN ... fallen off the bus",
        "CUDA error: no CUDA-capable device is detected",
    ],
)
@pytest.mark.parametrize("kind", ["error", "network"])
def test_row_35_a_faulty_device_is_never_the_plans_fault(kind: str, message: str) -> None:
    verdict = classify(evidence(errs=(err(1, kind=kind, message=message),), stopped_by="error"))
    assert (verdict.cause, verdict.outcome) == (Cause.DEVICE, Outcome.INFRA)
    assert message in verdict.reason
    assert settled(verdict) == (Outcome.INFRA, True)
    assert settled(verdict, verdict) == (Outcome.INFRA, True)
    assert settled(verdict, verdict, verdict) == (Outcome.INFRA, False)


def test_row_35_words_of_a_device_in_a_plans_own_fault_change_nothing() -> None:
    message = "CUDA error: an illegal memory access was encountered"
    own = classify(evidence(errs=(err(1, message=message),), stopped_by="error"))
    assert own.cause is Cause.ERROR
    memory = err(1, kind="out-of-memory", message="GPU is lost", wanted_bytes=5)
    assert classify(evidence(errs=(memory,), stopped_by="error")).cause is Cause.MEMORY


def test_a_hang_keeps_its_phase() -> None:
    expiry = Expiry(phase="warmup", rank=1, limit_s=2.0)
    verdict = classify(evidence(beats=(beat(0), beat(1)), stopped_by="hang", expiry=expiry, errs=(err(0),)))
    assert (verdict.cause, verdict.phase) == (Cause.HANG, "warmup")
