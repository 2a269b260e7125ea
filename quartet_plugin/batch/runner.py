"""Runs the jobs of a batch: each a `quartet tune` in a folder of its own, until none is left.

Whatever is done next depends on files alone: job.json is written before a tuner is started and after it has
ended, so a batch that is killed at any moment goes on with the tuners that still run, starts again those
that do not, and starts nothing twice.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from quartet_plugin.batch.config import Batch, Job
from quartet_plugin.batch.job_file import (
    BatchFile,
    BatchJob,
    JobFile,
    state_of,
    write_batch_file,
    write_job_file,
)
from quartet_plugin.batch.job_process import (
    OUTPUT_NAME,
    JobProcess,
    end_left_behind,
    find_tuner,
    is_held_elsewhere,
    last_line,
    start,
    stop,
)
from quartet_plugin.batch.job_words import LEAST_MINUTES, minutes_of, tune_words
from quartet_plugin.batch.observer import BatchObserver
from quartet_plugin.batch.queue import in_order, next_job
from quartet_plugin.batch.related import keys_of, started_from
from quartet_plugin.batch.results import history_of, is_out_of_time, result_of, results_of
from quartet_plugin.errors import ExitCode, QuartetError, StorageError, first_line
from quartet_plugin.model.batch import BatchPaths, BatchResults, BatchState, JobResult, JobState
from quartet_plugin.report.batch_table import ended_words
from quartet_plugin.report.formatting import clean
from quartet_plugin.trial.lease import LeaseLostError
from quartet_plugin.tuner.config import TuneConfig
from quartet_plugin.tuner.context import EventLog

# A tuner that a signal ends is started again this number of times.
MAX_LOST = 3
# The shortest wait goes before the longest, since a batch must not disturb what is measured.
_SHORTEST_WAIT_S, _LONGEST_WAIT_S, _LONGER = 0.02, 1.0, 1.3
# A live table is renewed so often, and reading the runs for it takes at most this part of the time.
_REFRESH_S, _REFRESH_SHARE = 2.0, 50


class BatchRunner:
    """Runs a batch in the folder `paths`; `program` are the words that start `quartet`.

    `configs` has the q.yaml of every job by name. `fence` raises LeaseLostError once another process has
    the batch. `write` gets the results whenever a job has begun or ended.
    """

    def __init__(
        self,
        batch: Batch,
        *,
        paths: BatchPaths,
        cwd: Path,
        configs: Mapping[str, TuneConfig],
        program: Sequence[str],
        observer: BatchObserver,
        should_stop: Callable[[], bool],
        fence: Callable[[], None],
        write: Callable[[BatchResults], None],
        is_plan_only: bool = False,
        retries_failed: bool = False,
        takes_over: bool = False,
    ) -> None:
        self._batch = batch
        self._paths = paths
        self._cwd = cwd
        self._configs = configs
        self._program = tuple(program)
        self._observer = observer
        self._should_stop = should_stop
        self._fence = fence
        self._takes_over = takes_over
        self._write = write
        self._content = BatchFile.of(batch, cwd=cwd, is_plan_only=is_plan_only)
        self._events = EventLog(paths.events_file)
        self._jobs = {job.name: job for job in batch.jobs}
        self._keys = {} if is_plan_only else keys_of(batch.jobs, configs, cwd=cwd)
        self._files = {job.name: self._file_of(job, retries_failed=retries_failed) for job in batch.jobs}
        self._running: dict[str, JobProcess] = {}
        self._stopped: set[str] = set()
        self._began_s = time.monotonic()
        self._next_shown_s = 0.0

    def run(self) -> BatchResults:
        """The results once no job can be started any more, or when asked to stop.

        Raises StorageError where the folder fails, or another process has the batch, whose tuners then go on.
        """
        write_batch_file(self._content, paths=self._paths)
        self._events.add("begin", batch=self._batch.name)
        try:
            self._adopt()
            self._publish()
            self._plan()
            self._tune()
        finally:
            self._end_running()
        self._events.add("interrupted" if self._should_stop() else "end")
        return self._publish(is_running=False)

    def _tune(self) -> None:
        """Start tuners and note their ends until none is left."""
        wait_s = _SHORTEST_WAIT_S
        while not self._should_stop():
            self._check_fence()
            is_changed = self._look()
            is_changed |= self._start_next()
            if not is_changed and not self._running:
                return
            if self._observer.is_live and time.monotonic() > self._next_shown_s:
                self._show()
            wait_s = _SHORTEST_WAIT_S if is_changed else min(_LONGEST_WAIT_S, _LONGER * wait_s)
            time.sleep(wait_s)

    def _check_fence(self) -> None:
        """Raise LeaseLostError where another process has the batch, and leave the tuners to that.

        Raises StorageError where the folder fails: the tuners are ended as at any other end.
        """
        try:
            self._fence()
        except LeaseLostError:
            self._running.clear()
            raise

    def results(self, *, is_running: bool = True) -> BatchResults:
        """The state of every job now."""
        results = [self._result_of(name) for name in self._jobs]
        is_over = all(result.is_over for result in results)
        state: BatchState = "running" if is_running else "finished" if is_over else "stopped"
        elapsed_s = sum(result.elapsed_s for result in results)
        return results_of(self._content, results, state=state, elapsed_s=elapsed_s)

    # Jobs that an earlier session has begun

    def _file_of(self, job: Job, *, retries_failed: bool) -> JobFile:
        kind = "plan" if self._content.is_plan_only else job.kind
        file = state_of(job, kind=kind, paths=self._paths)
        is_again = retries_failed and file.state == "failed"
        return replace(file, state="waiting", num_lost=0, result=None, reason="") if is_again else file

    def _adopt(self) -> None:
        """Wait for the tuners that an earlier session has left and that still run; note those that ended."""
        for name, file in self._files.items():
            if file.state != "running":
                continue
            process = find_tuner(file, paths=self._paths)
            if process is None:
                self._note_end(name, None)
                continue
            self._running[name] = process
            self._save(replace(file, process=process.identity))
            self._say(f"{name}: still running, process {process.identity.pid}", kind="adopted", job=name)

    # Planning

    def _plan(self) -> None:
        """Plan the jobs that have no command to launch."""
        from quartet_plugin.batch.planning import planned

        for job in in_order(self._batch.jobs):
            file = self._files[job.name]
            if file.kind != "plan" or file.state in ("done", "failed"):
                continue
            if self._should_stop():
                return
            self._check_fence()
            began_at = time.time()
            try:
                result = planned(job, config=self._configs[job.name], cwd=self._cwd, paths=self._paths)
            except StorageError:
                raise
            except QuartetError as error:
                result = replace(
                    self._result_of(job.name),
                    state="failed",
                    exit_code=int(error.exit_code),
                    reason=clean(first_line(error)),
                )
            result = replace(result, elapsed_s=round(time.time() - began_at, 3))
            self._save(_ended(file, result, began_at=began_at))
            self._say(ended_words(result), kind="ended", job=job.name, state=result.state)
            self._publish()

    # Tuning

    def _look(self) -> bool:
        """Note the tuners that have ended; whether one has."""
        ended = {name: process for name, process in self._running.items() if process.is_over}
        for name, process in ended.items():
            del self._running[name]
            self._note_end(name, process.exit_code)
        return bool(ended)

    def _start_next(self) -> bool:
        """Start what may run; whether a job was started."""
        is_started = False
        while len(self._running) < self._batch.num_at_once and self._has_time:
            job = self._next_job()
            if job is None:
                break
            self._start(job)
            is_started = True
        return is_started

    @property
    def _has_time(self) -> bool:
        left = self._minutes_left
        return left is None or left >= LEAST_MINUTES

    @property
    def _minutes_left(self) -> float | None:
        """The minutes of this session that are left, None without a limit."""
        minutes = self._batch.max_minutes
        return None if minutes is None else minutes - (time.monotonic() - self._began_s) / 60.0

    def _next_job(self) -> Job | None:
        over = {name for name, file in self._files.items() if file.state in ("done", "failed")}
        waiting = [
            job
            for name, job in self._jobs.items()
            if name not in over and name not in self._running and name not in self._stopped
        ]
        running = [self._jobs[name] for name in self._running]
        return next_job(
            [job for job in waiting if self._files[job.name].kind == "tune"],
            running=running,
            over=over,
            keys=self._keys,
            shares=self._batch.shares,
        )

    def _start(self, job: Job) -> None:
        file = self._files[job.name]
        is_begun = self._is_begun(job)
        if file.began_at is not None:
            end_left_behind(file.mark)
        if not is_begun and (earlier := self._earlier_job_of(job)) is not None:
            file = replace(file, started_from=earlier.name)
        spent = self._minutes_spent(job)
        file = replace(
            file,
            state="running",
            process=None,
            is_shortened=self._is_shortened(job, spent=spent) or None,
            began_at=file.began_at or time.time(),
            exit_code=None,
            reason="",
        )
        self._save(file)
        output = self._paths.job(job.name) / OUTPUT_NAME
        try:
            process = start(self._words(job, file, spent=spent), cwd=self._cwd, output=output, mark=file.mark)
        except StorageError:
            raise
        except QuartetError as error:
            self._finish(job.name, "failed", exit_code=int(error.exit_code), reason=first_line(error))
            return
        self._running[job.name] = process
        self._save(replace(file, process=process.identity))
        earlier_words = "" if file.started_from is None else f", from what {file.started_from} has measured"
        again = " again" if is_begun else ""
        self._say(f"{job.name}: started{again}{earlier_words}", kind="started", job=job.name)
        self._publish()

    def _earlier_job_of(self, job: Job) -> Job | None:
        """The finished job whose measurements this one begins with."""
        done = [
            (file.ended_at or 0.0, self._jobs[name].position, self._jobs[name])
            for name, file in self._files.items()
            if file.state == "done" and file.kind == "tune"
        ]
        ended = [other for *_, other in sorted(done, key=lambda entry: entry[:2])]
        return started_from(job, ended, keys=self._keys, shares=self._batch.shares)

    def _is_begun(self, job: Job) -> bool:
        """Whether a tuner has begun the job's run."""
        return (self._paths.runs / job.name / "config.json").is_file()

    def _minutes_spent(self, job: Job) -> float:
        """The minutes that the job's run has searched; 0 where nothing limits them."""
        history = history_of(self._paths.runs / job.name) if job.max_minutes and self._is_begun(job) else None
        return 0.0 if history is None else history.search_s / 60.0

    def _is_shortened(self, job: Job, *, spent: float) -> bool:
        """Whether the session has fewer minutes left than the job's own limit, of which `spent` are over."""
        left = self._minutes_left
        return left is not None and (job.max_minutes is None or left < job.max_minutes - spent)

    def _was_cut_short(self, name: str) -> bool:
        """Whether the job's run ended because the session gave its tuner too little time."""
        return bool(self._files[name].is_shortened) and is_out_of_time(self._paths.runs / name)

    def _words(self, job: Job, file: JobFile, *, spent: float) -> list[str]:
        words = tune_words(
            job,
            config=self._configs[job.name],
            runs=self._paths.runs,
            max_trials=self._batch.max_trials,
            minutes=minutes_of(job, spent=spent, left=self._minutes_left),
            started_from=file.started_from,
            is_begun=self._is_begun(job),
            takes_over=self._takes_over,
        )
        return [*self._program, *words]

    # Ends

    def _note_end(self, name: str, code: int | None) -> None:
        """Note the end of a tuner by its exit code, None where it was an earlier session's."""
        file = self._files[name]
        if code is None:
            if not self._is_finished(name) or self._was_cut_short(name):
                # It is started again. Where it had come to its end for another reason, it ends at once.
                self._save(replace(file, state="stopped", process=None))
                return
            code = 0
        if code < 0 and file.num_lost < MAX_LOST:
            self._say(
                f"{name}: its tuner was killed by signal {-code}; it is started again", kind="lost", job=name
            )
            self._save(replace(file, state="stopped", process=None, num_lost=file.num_lost + 1))
            return
        if code == ExitCode.DONE and self._was_cut_short(name):
            self._finish(name, "stopped", exit_code=code, reason="the session's minutes were over")
            return
        reason = "" if code == ExitCode.DONE else last_line(self._paths.job(name) / OUTPUT_NAME)
        if code < 0:
            reason = f"its tuner was killed by signal {-code}, {file.num_lost + 1} times"
        # A tuner of a lost host may hold its run some seconds longer than that host held the batch.
        is_held = code == ExitCode.STORAGE and is_held_elsewhere(self._paths.runs / name)
        is_stopped = is_held or code == ExitCode.INTERRUPTED
        state: JobState = "done" if code == 0 else "stopped" if is_stopped else "failed"
        self._finish(name, state, exit_code=code, reason=reason)

    def _is_finished(self, name: str) -> bool:
        """Whether a job's run has come to its end."""
        history = history_of(self._paths.runs / name)
        return history is not None and history.state == "finished"

    def _finish(self, name: str, state: JobState, *, exit_code: int, reason: str) -> None:
        file = self._files[name]
        end_left_behind(file.mark)
        if state == "stopped":
            self._stopped.add(name)
        file = replace(file, state=state, process=None, exit_code=exit_code, reason=clean(reason))
        self._files[name] = file
        result = self._result_of(name)
        self._save(_ended(file, result) if result.is_over else file)
        self._say(ended_words(result), kind="ended", job=name, state=state, reason=reason)
        self._publish()

    def _end_running(self) -> None:
        """End every running tuner and the processes that it would leave behind."""
        if not self._running:
            return
        running = dict(self._running)
        self._running.clear()
        try:
            stop(running.values())
        finally:
            for name in running:
                end_left_behind(self._files[name].mark)
        for name, process in running.items():
            is_finished = process.exit_code == 0 or self._is_finished(name)
            if is_finished and not self._was_cut_short(name):
                self._finish(name, "done", exit_code=0, reason="")
            else:
                self._save(replace(self._files[name], state="stopped", process=None))

    # Files and the observer

    def _save(self, file: JobFile) -> None:
        self._files[file.name] = file
        write_job_file(file, paths=self._paths)

    def _result_of(self, name: str) -> JobResult:
        file, job = self._files[name], self._jobs[name]
        listed = BatchJob(name=name, kind=file.kind, priority=job.priority)
        return result_of(listed, file, paths=self._paths)

    def _say(self, text: str, *, kind: str, **fields: str) -> None:
        self._events.add(kind, trial=None, **fields)
        self._observer.message(text)

    def _show(self, *, is_running: bool = True) -> BatchResults:
        """Show the results to the observer; what takes long to read is shown less often."""
        began_s = time.monotonic()
        results = self.results(is_running=is_running)
        now_s = time.monotonic()
        self._next_shown_s = now_s + max(_REFRESH_S, _REFRESH_SHARE * (now_s - began_s))
        self._observer.changed(results)
        return results

    def _publish(self, *, is_running: bool = True) -> BatchResults:
        """Show the results and write them."""
        results = self._show(is_running=is_running)
        self._write(results)
        return results


def _ended(file: JobFile, result: JobResult, *, began_at: float | None = None) -> JobFile:
    """The file of a job that is over."""
    return replace(
        file,
        state=result.state,
        process=None,
        began_at=began_at or file.began_at,
        ended_at=time.time(),
        exit_code=result.exit_code,
        reason=result.reason,
        result=result,
    )
