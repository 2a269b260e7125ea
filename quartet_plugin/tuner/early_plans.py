"""The space and the proposer of a run, made in a thread while the processes of trial 0 end.

The ranks' reports have the job, and so the space; to list its plans takes no measurement. The thread begins
where every rank has reported, after the last measured iteration. What it has made counts only for the job and
the nodes of trial 0's result. Where it has failed, or its attempt does not count, the tuner makes all of it
itself, and fails as it would without a thread.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.plan import NodeInfo
from quartet_plugin.model.training_job import TrainingJob, parse_training_job
from quartet_plugin.protocol.rank_files import reader_of
from quartet_plugin.space.plan_space import Space
from quartet_plugin.trial.attempt import job_of, open_attempt
from quartet_plugin.trial.request import Progress
from quartet_plugin.tuner.proposer import Proposer, objective_in, proposer_of
from quartet_plugin.tuner.run_folder import TuningRun
from quartet_plugin.tuner.run_space import space_around
from quartet_plugin.tuner.trial_backend import nodes_of

THREAD = "quartet-early-plans"
# Seconds for which an ending tuner waits for the threads.
STOP_S = 5.0


class EarlyPlans:
    """The space of `run` and its proposer, as far as a thread has made them.

    Nothing of them is touched before `take` has ended the thread.
    """

    def __init__(self, run: TuningRun) -> None:
        self.run = run
        self._imports: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._is_stopped = threading.Event()
        self._job: tuple[TrainingJob, tuple[NodeInfo, ...]] | None = None
        self._space: Space | None = None
        self._proposer: Proposer | None = None

    def observe(self, attempt: Path, progress: Progress) -> None:
        """Start the thread where every rank of an attempt has reported; end it where another one begins.

        Libraries are imported while the first processes start.
        """
        if self._imports is None and progress.phase == "launch":
            self._imports = _started(self._import)
        if progress.phase != "done":
            if self._thread is not None:
                self._is_stopped.set()
        elif self._thread is None:
            self._thread = _started(partial(self._make, attempt))

    def take(self, job: TrainingJob, *, nodes: Sequence[NodeInfo]) -> tuple[Space | None, Proposer | None]:
        """The space and the proposer that the thread, now ended, has made for this job on these nodes."""
        self._end(limit_s=None)
        is_same = self._job == (job, tuple(nodes))
        return (self._space, self._proposer) if is_same else (None, None)

    def stop(self) -> None:
        """End the threads, waiting at most STOP_S seconds for each, and discard what they made."""
        # A process whose thread runs machine code while it exits may crash.
        self._end(limit_s=STOP_S)

    def _end(self, *, limit_s: float | None) -> None:
        self._is_stopped.set()
        for thread in (self._imports, self._thread):
            if thread is not None:
                thread.join(limit_s)

    def _import(self) -> None:
        with suppress(Exception):
            self.run.storage.import_libraries()

    def _make(self, attempt: Path) -> None:
        # Whatever fails here fails again where the tuner does it.
        with suppress(Exception):
            job, nodes = _job_and_nodes(attempt)
            space = space_around(job, nodes=nodes, run=self.run)
            self._job, self._space = (job, nodes), space
            proposer = proposer_of(space, run=self.run, objective=objective_in(space, run=self.run))
            if proposer is not None:
                proposer.prepare_candidates(is_stopped=self._is_stopped.is_set)
                self._proposer = proposer


def _started(work: Callable[[], None]) -> threading.Thread:
    """A thread that does the work. It is a daemon: the end of the tuner does not wait for it."""
    thread = threading.Thread(target=work, name=THREAD, daemon=True)
    thread.start()
    return thread


def _job_and_nodes(attempt: Path) -> tuple[TrainingJob, tuple[NodeInfo, ...]]:
    """The job that RANK 0 has reported, and the nodes of all ranks. Raises ConfigError without a report."""
    opened = open_attempt(attempt)
    if opened is None:
        raise ConfigError(f"{attempt}: no attempt")
    snapshot = reader_of(attempt, attempt_id=opened.spec.attempt_id).scan()
    job = parse_training_job(job_of(snapshot) or {}, where=str(attempt))
    return job, nodes_of(snapshot.reports.values())
