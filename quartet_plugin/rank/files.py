"""The files of a trial that a rank reads and writes, whose records are in `protocol`."""

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from quartet_plugin.errors import ConfigError, QuartetError
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.schema import as_number, dump, read_record
from quartet_plugin.protocol.attempt_files import STOP_FILE, TrialSpec
from quartet_plugin.protocol.environment import HEARTBEAT_S
from quartet_plugin.protocol.execution import Execution
from quartet_plugin.protocol.measured_window import EarlyEndReason
from quartet_plugin.protocol.rank_files import (
    ActionTimes,
    CoreLimit,
    DeviceMemory,
    FailureReport,
    Heartbeat,
    Iteration,
    RankFailure,
    RankGradients,
    RankPhase,
    RankProfile,
    RankReport,
    StepGradients,
    rank_file,
)
from quartet_plugin.rank.first_step import FirstStepProgress
from quartet_plugin.rank.rendezvous import RankEnv


def read_trial_spec(path: Path) -> TrialSpec:
    """The trial in a trial.json. Raises ConfigError in one line: the field, the value and the rule."""
    spec = read_record(TrialSpec, path)
    if not Path(spec.folder).is_dir():
        raise ConfigError(f"{path}: folder: {spec.folder}: is not a folder")
    return spec


class RankFileWriter:
    """Writes one rank's files: a heartbeat while it runs, and at the end a report or a failure.

    A thread of its own writes the heartbeat, so that no iteration waits for a disk. It writes only when the
    phase or the iteration has moved: `time` is when that happened, and a rank that hangs stands still.
    """

    def __init__(self, spec: TrialSpec, rank_env: RankEnv) -> None:
        self.spec = spec
        self.rank_env = rank_env
        self.process_start = psutil.Process().create_time()
        self.phase: RankPhase = "import"
        self.iteration = 0
        self.plan_key: str | None = None
        self.first_step: FirstStepProgress | None = None
        self._moved_at = time.time()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._write_heartbeats, name="quartet-heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first heartbeat, and continue in the background."""
        self._write_heartbeat(self._progress())
        self._thread.start()

    def move(self, phase: RankPhase, iteration: int) -> None:
        """Note the rank's phase and iteration, without any input or output."""
        changed = phase != self.phase
        self.phase, self.iteration, self._moved_at = phase, iteration, time.time()
        if changed:
            self._wake.set()

    def close(self) -> None:
        """Stop the thread and write the last heartbeat."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)
        self._write_heartbeat(self._progress())

    @property
    def rank(self) -> int:
        """This process's RANK, which a plan's mapping may have changed since the launch."""
        return int(os.environ.get("RANK", self.rank_env.launch_rank))

    @property
    def launch_rank(self) -> int:
        """The RANK that the launcher gave this process."""
        return self.rank_env.launch_rank

    @property
    def is_stop_asked(self) -> bool:
        """Whether the tuner has put a STOP file into the folder."""
        return Path(self.spec.folder, STOP_FILE).exists()

    def write_report(
        self,
        *,
        device: str,
        cores: tuple[int, ...] | None,
        core_limit: CoreLimit | None = None,
        network_namespace: int | None = None,
        phases_s: dict[str, float],
        iterations: Iterable[Iteration],
        peak_memory_bytes: int,
        job: dict[str, Any] | None,
        memory: DeviceMemory | None = None,
        execution: Execution | None = None,
        ended_early: EarlyEndReason | None = None,
        product_s: tuple[float, ...] | None = None,
    ) -> None:
        """Write rank-K.json: what the rank measured, as `RankReport` says."""
        report = RankReport(
            schema_version=1,
            attempt_id=self.spec.attempt_id,
            rank=self.rank,
            launch_rank=self.launch_rank,
            host=self.rank_env.host,
            local_rank=self.rank_env.local_rank or 0,
            pid=os.getpid(),
            plan_key=self.plan_key,
            device=device,
            phases_s=phases_s,
            iterations=tuple(iterations),
            peak_memory_bytes=peak_memory_bytes,
            job=job,
            cores=cores,
            core_limit=core_limit,
            network_namespace=network_namespace,
            memory=memory,
            execution=execution,
            ended_early=ended_early,
            product_s=product_s,
        )
        # A record leaves `cores` out where there are none; the file says null.
        write_json_atomic(self._path_of(RankReport), {**dump(report), "cores": report.cores})

    def write_failure(self, failure: FailureReport) -> None:
        """Write rank-K.err.json: how the rank failed."""
        self.write(
            RankFailure(
                schema_version=1,
                attempt_id=self.spec.attempt_id,
                rank=self.rank,
                launch_rank=self.launch_rank,
                host=self.rank_env.host,
                phase=self.phase,
                iteration=self.iteration,
                time=time.time(),
                **dump(failure),
            )
        )

    def write_gradients(
        self,
        steps: Sequence[Mapping[str, float]],
        *,
        settings: tuple[str, ...] | None = None,
        weights_s: float | None = None,
        unavailable: str | None = None,
        expert_tokens: Sequence[Mapping[str, tuple[int, ...]]] | None = None,
    ) -> None:
        """Write rank-K.parity.json: of each step the squared gradient norm by part of the model.

        `expert_tokens` are those of each expert, step by step. The rest is of a trial whose first steps alone
        are compared, as `RankGradients` says.
        """
        records = (
            StepGradients(
                squares={part: as_number(value) for part, value in squares.items()},
                expert_tokens=dict(expert_tokens[step]) or None if expert_tokens else None,
            )
            for step, squares in enumerate(steps)
        )
        self.write(
            RankGradients(
                schema_version=1,
                attempt_id=self.spec.attempt_id,
                launch_rank=self.launch_rank,
                steps=tuple(records),
                settings=settings,
                weights_s=weights_s,
                unavailable=unavailable,
            )
        )

    def write_actions(
        self,
        *,
        actions: Sequence[Any],
        recorder: Any,
        device: int,
        replica: int,
        peak_activation_bytes: int | None = None,
    ) -> None:
        """Write rank-K.actions.json: start, end and waiting of every action of the last step, in order.

        `recorder` has the times of the last step, `actions` what they belong to. Ranks that do the same work
        as another (tensor and data parallel) say so by `replica`. Writes nothing where the two do not belong
        together: nothing was recorded, or the last call was an evaluation.
        """
        times = recorder.times()
        if not times or len(times) != len(actions):
            return
        self.write(
            ActionTimes(
                schema_version=1,
                attempt_id=self.spec.attempt_id,
                launch_rank=self.launch_rank,
                device=device,
                replica=replica,
                begin_at=recorder.begin_at(),
                actions=tuple(map(str, actions)),
                start_s=tuple(action.start_s for action in times),
                end_s=tuple(action.end_s for action in times),
                waiting_s=tuple(action.waiting_s for action in times),
                peak_activation_bytes=peak_activation_bytes,
            )
        )

    def write(self, record: Heartbeat | RankFailure | RankGradients | ActionTimes | RankProfile) -> None:
        """Write a record where the tuner looks for it, whole or not at all."""
        write_json_atomic(self._path_of(type(record)), dump(record))

    def _path_of(self, kind: type) -> Path:
        return rank_file(kind, folder=self.spec.folder, launch_rank=self.launch_rank)

    def _progress(self) -> tuple[RankPhase, int, int | None, float]:
        is_first = self.phase in ("warmup", "measure") and self.iteration == 0
        count = self.first_step.count() if is_first and self.first_step is not None else None
        return self.phase, self.iteration, count, self._moved_at

    def _write_heartbeats(self) -> None:
        written = self._progress()
        while not self._closed:
            self._wake.wait(HEARTBEAT_S)
            self._wake.clear()
            progress = self._progress()
            if progress[:3] != written[:3] and not self._closed:
                self._write_heartbeat(progress)
                written = progress

    def _write_heartbeat(self, progress: tuple[RankPhase, int, int | None, float]) -> None:
        phase, iteration, count, moved_at = progress
        heartbeat = Heartbeat(
            schema_version=1,
            attempt_id=self.spec.attempt_id,
            rank=self.launch_rank,
            pid=os.getpid(),
            process_start=self.process_start,
            host=self.rank_env.host,
            local_rank=self.rank_env.local_rank or 0,
            phase=phase,
            iteration=iteration,
            time=moved_at,
            progress=count,
        )
        try:
            self.write(heartbeat)
        except QuartetError:
            # A full disk must not end training by way of its heartbeat; the report's own write will fail.
            return
