"""The files of a trial that a rank reads and writes; docs/formats.md is their contract."""

import os
import re
import threading
import time
from pathlib import Path
from typing import Any, Literal

import psutil

from quartet_plugin.errors import ConfigError, QuartetError
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.schema import read_record, record
from quartet_plugin.rank.rendezvous import RankEnv

Phase = Literal["import", "init", "warmup", "measure", "done"]

STOP_FILE = "STOP"
_BEAT_S = 1.0
_MAX_ITERATIONS = 100_000


@record
class TrialSpec:
    """A trial.json: what the ranks were told.

    `weights` names a weights-only checkpoint that every rank starts from, `save_weights` a folder where one
    is written before the first step; with either, dropout and jitter are off and the ranks leave what the
    parity gate compares. Raises ConfigError for what no trial can be.
    """

    schema_version: Literal[1]
    attempt_id: str
    folder: str
    warmup: int
    measure: int
    plan_key: str | None
    weights: str | None = None
    save_weights: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]{32}", self.attempt_id):
            raise ConfigError(f"attempt_id: {self.attempt_id[:80]!r}; must be 32 hex digits")
        if not Path(self.folder).is_absolute():
            raise ConfigError(f"folder: {self.folder[:200]!r}; must be an absolute path")
        for name in ("weights", "save_weights"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_absolute():
                raise ConfigError(f"{name}: {path[:200]!r}; must be an absolute path")
        for name, least in (("warmup", 0), ("measure", 1)):
            if not least <= getattr(self, name) <= _MAX_ITERATIONS:
                raise ConfigError(f"{name}: {getattr(self, name)}; must be from {least} to {_MAX_ITERATIONS}")

    @property
    def num_iterations(self) -> int:
        """Warm-up and measured iterations together."""
        return self.warmup + self.measure

    @property
    def is_compared(self) -> bool:
        """Whether this is a trial of the parity gate."""
        return self.weights is not None or self.save_weights is not None


def read_trial_spec(path: Path) -> TrialSpec:
    """Read a trial.json. Raises ConfigError in one line: the field, the value and the rule."""
    order = read_record(TrialSpec, path)
    if not Path(order.folder).is_dir():
        raise ConfigError(f"{path}: folder: {order.folder}: is not a folder")
    return order


class RankFileWriter:
    """One rank's files: a heartbeat while it runs, and at the end what it measured or how it failed.

    A thread of its own writes the heartbeat, so that no iteration waits for a disk. It writes only when the
    phase or the iteration has moved: `time` is when that happened, and a rank that hangs stands still.
    """

    def __init__(self, order: TrialSpec, place: RankEnv) -> None:
        self.order = order
        self.place = place
        self.process_start = psutil.Process().create_time()
        self.phase: Phase = "import"
        self.iteration = 0
        self.plan_key: str | None = None
        self._moved_at = time.time()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._beat_on, name="quartet-heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first heartbeat and go on in the background."""
        self._write_beat(self._progress())
        self._thread.start()

    def move(self, phase: Phase, iteration: int) -> None:
        """Tell where the rank is: costs no input or output here."""
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
        self._write_beat(self._progress())

    def write_result(self, content: dict[str, Any]) -> None:
        """Write rank-K.json."""
        head = {
            **self._head(),
            "local_rank": self.place.local_rank or 0,
            "pid": os.getpid(),
            "plan_key": self.plan_key,
        }
        write_json_atomic(self._path("json"), {**head, **content})

    def write_error(self, content: dict[str, Any]) -> None:
        """Write rank-K.err.json."""
        head = {**self._head(), "phase": self.phase, "iteration": self.iteration, "time": time.time()}
        write_json_atomic(self._path("err.json"), {**head, **content})

    def _head(self) -> dict[str, Any]:
        place = self.place
        return {
            "schema_version": 1,
            "attempt_id": self.order.attempt_id,
            "rank": int(os.environ.get("RANK", place.launch_rank)),
            "launch_rank": place.launch_rank,
            "host": place.host,
        }

    @property
    def is_stop_asked(self) -> bool:
        """Whether somebody has put a STOP file into the folder."""
        return (Path(self.order.folder) / STOP_FILE).exists()

    def _path(self, ending: str) -> Path:
        return Path(self.order.folder) / f"rank-{self.place.launch_rank}.{ending}"

    def _progress(self) -> tuple[Phase, int, float]:
        return self.phase, self.iteration, self._moved_at

    def _beat_on(self) -> None:
        written = self._progress()
        while not self._closed:
            self._wake.wait(_BEAT_S)
            self._wake.clear()
            progress = self._progress()
            if progress[:2] != written[:2] and not self._closed:
                self._write_beat(progress)
                written = progress

    def _write_beat(self, progress: tuple[Phase, int, float]) -> None:
        phase, iteration, moved_at = progress
        beat = {
            "schema_version": 1,
            "attempt_id": self.order.attempt_id,
            "rank": self.place.launch_rank,
            "pid": os.getpid(),
            "process_start": self.process_start,
            "host": self.place.host,
            "local_rank": self.place.local_rank or 0,
            "phase": phase,
            "iteration": iteration,
            "time": moved_at,
        }
        try:
            write_json_atomic(self._path("beat.json"), beat)
        except QuartetError:
            # A full disk must not end training by way of its heartbeat; the result's own write will tell.
            return
