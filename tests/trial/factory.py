"""Records of a trial for tests."""

from typing import Any

from quartet_plugin.protocol.attempt_files import TrialSpec
from quartet_plugin.protocol.rank_files import Heartbeat, Iteration, RankFailure, RankReport, Snapshot
from quartet_plugin.trial.outcome import AttemptObservations

ID = "a" * 32


def beat(rank: int = 0, **changes: Any) -> Heartbeat:
    """A heartbeat."""
    values: dict[str, Any] = {
        "schema_version": 1,
        "attempt_id": ID,
        "rank": rank,
        "pid": 1000 + rank,
        "process_start": 1.0,
        "host": "node-a",
        "local_rank": rank,
        "phase": "measure",
        "iteration": 5,
        "time": 2.0,
    }
    return Heartbeat(**{**values, **changes})


def iteration(number: int, **changes: Any) -> Iteration:
    """One iteration."""
    values: dict[str, Any] = {"iteration_s": 0.5, "loss": None, "grad_norm": 1.0, "skipped": False}
    return Iteration(iteration=number, **{**values, **changes})


def report(
    launch_rank: int = 0, *, iterations: tuple[Iteration, ...] | None = None, **changes: Any
) -> RankReport:
    """A rank's report of 5 iterations."""
    values: dict[str, Any] = {
        "schema_version": 1,
        "attempt_id": ID,
        "rank": launch_rank,
        "launch_rank": launch_rank,
        "host": "node-a",
        "local_rank": launch_rank,
        "pid": 1000 + launch_rank,
        "plan_key": None,
        "device": "cpu",
        "phases_s": {},
        "iterations": tuple(iteration(n) for n in range(1, 6)) if iterations is None else iterations,
        "peak_memory_bytes": 100 + launch_rank,
        "job": None,
    }
    return RankReport(**{**values, **changes})


def err(rank: int = 0, **changes: Any) -> RankFailure:
    """A failure."""
    values: dict[str, Any] = {
        "schema_version": 1,
        "attempt_id": ID,
        "rank": rank,
        "launch_rank": rank,
        "host": "node-a",
        "phase": "measure",
        "iteration": 5,
        "time": 2.0,
        "kind": "error",
        "type": "RuntimeError",
        "message": "broken",
        "exit_code": 1,
        "peak_memory_bytes": 7,
        "wanted_bytes": 0,
        "traceback": (),
    }
    return RankFailure(**{**values, **changes})


def evidence(
    *,
    beats: tuple[Heartbeat, ...] = (),
    reports: tuple[RankReport, ...] = (),
    errs: tuple[RankFailure, ...] = (),
    faults: tuple[str, ...] = (),
    **changes: Any,
) -> AttemptObservations:
    """What is known at the end of an attempt of 1 + 4 iterations on two ranks."""
    values: dict[str, Any] = {
        "spec": TrialSpec(attempt_id=ID, folder="/x", warmup=1, measure=4, plan_key=None),
        "snapshot": Snapshot(
            beats={one.rank: one for one in beats},
            reports={one.launch_rank: one for one in reports},
            errs={one.launch_rank: one for one in errs},
            faults=faults,
        ),
        "num_processes": 2,
        "stopped_by": "exit",
        "exit_code": 1,
        "is_single": False,
    }
    return AttemptObservations(**{**values, **changes})
