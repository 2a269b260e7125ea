"""The process that holds an experiment of NeMo-Run for one attempt, until its nodes have ended.

    python -m quartet_plugin.launchers.nemo_run_driver    # the request is on its standard input

Whether nodes have begun and how they ended is in their own files: executors know less, and some only late.
"""

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from quartet_plugin.launchers.shared_run import SharedFolder, highest
from quartet_plugin.model.files import write_json_atomic

# Beside the attempt's output: why NeMo-Run and no plan is to blame.
FAULT_FILE = "nemo-run-fault.json"
_FAULT_EXIT, _STOPPED_EXIT = 255, 143
_POLL_S, _LOOK_S, _FILES_S = 0.2, 5.0, 10.0
_OVER = ("SUCCEEDED", "FAILED", "CANCELLED")


class ExperimentLostError(Exception):
    """NeMo-Run or its executor, and no plan, is the reason that the command did not run to its end."""


class HeldExperiment:
    """The experiment of one attempt."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._request = request
        self._shared = SharedFolder(Path(request["stdout"]))
        self._num_nodes = int(request["num_nodes"])
        self._is_ending = False
        self._next_look_s = 0.0
        self._latest_state: str | None = None

    def run(self) -> int:
        """The exit code of the command. Raises ExperimentLostError where NeMo-Run fails."""
        path, has_factory, _ = self._request["executor"].rpartition(":")
        if has_factory and not Path(path).exists():
            raise ExperimentLostError(f"nemo_run.executor: {path}: not found")
        # It takes seconds: a signal meanwhile ends this process, which has started nothing.
        import nemo_run

        signal.signal(signal.SIGTERM, self._end)
        script = nemo_run.Script(inline=f"exec {shlex.join(self._request['words'])}\n")
        try:
            executor = executor_of(self._request)
            experiment = nemo_run.Experiment(
                f"quartet-{self._request['attempt_id']}", executor=executor, skip_status_at_exit=True
            )
            # Never left: that would wait for what the nodes' files have said, and this process ends then.
            experiment.__enter__()
            job = experiment.add(script, executor=executor, name="trial", tail_logs=False)
            experiment.run(detach=True, tail_logs=False)
            # It has set handlers of its own.
            signal.signal(signal.SIGTERM, self._end)
            try:
                return self._watch(experiment, job)
            finally:
                if len(self._shared.exit_codes(self._num_nodes)) < self._num_nodes:
                    experiment.cancel(job)
        except ExperimentLostError:
            raise
        except Exception as error:
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise ExperimentLostError(f"NeMo-Run: {line[:300]}") from error

    def _end(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._is_ending = True

    def _watch(self, experiment: Any, job: str) -> int:
        """Follow the nodes to their end; an experiment that ends before them has lost some."""
        is_passed_on = False
        killed_s: float | None = None
        over_s: float | None = None
        while len(codes := self._shared.exit_codes(self._num_nodes)) < self._num_nodes:
            now = time.monotonic()
            if self._is_ending and not is_passed_on:
                is_passed_on = True
                self._shared.ask_to_end()
            if self._shared.is_to_kill:
                killed_s = now if killed_s is None else killed_s
                if now > killed_s + _FILES_S:
                    break
            if self._is_ending and self._shared.num_begun() <= len(codes):
                break
            state = self._state(experiment, job)
            over_s = (now if over_s is None else over_s) if state in _OVER else None
            if over_s is not None and now > over_s + _FILES_S:
                if self._is_ending:
                    break
                raise ExperimentLostError(f"NeMo-Run has ended the trial's job: {state}")
            time.sleep(_POLL_S)
        code = highest(codes)
        return _STOPPED_EXIT if code is None or (not code and len(codes) < self._num_nodes) else code

    def _state(self, experiment: Any, job: str) -> str | None:
        """The job's state by its executor, asked for every few seconds; None where it does not say."""
        if time.monotonic() >= self._next_look_s:
            self._next_look_s = time.monotonic() + _LOOK_S
            self._latest_state = None
            with contextlib.suppress(Exception):
                status = experiment.status(return_dict=True)[job]["status"]
                self._latest_state = str(getattr(status, "name", status))
        return self._latest_state


def executor_of(request: Mapping[str, Any]) -> Any:
    """The executor that the site names, for the nodes of the attempt."""
    import nemo_run

    kind, num_nodes = request["executor"], int(request["num_nodes"])
    if kind == "local":
        return nemo_run.LocalExecutor(packager=nemo_run.Packager())
    if kind == "slurm":
        return _slurm_executor(request["slurm"], num_nodes)
    path, _, name = kind.rpartition(":")
    module_spec = importlib.util.spec_from_file_location("quartet_nemo_run_executor", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    executor = getattr(module, name)()
    for attribute in ("nodes", "num_nodes"):
        if hasattr(executor, attribute):
            setattr(executor, attribute, num_nodes)
            return executor
    if num_nodes > 1:
        raise ExperimentLostError(f"nemo_run.executor: {kind}: {type(executor).__name__} has one node")
    return executor


def _slurm_executor(asked: Mapping[str, Any], num_nodes: int) -> Any:
    """A Slurm executor of this host with the site's options of Slurm."""
    import nemo_run

    minutes = asked.get("minutes")
    options = [option[2:].partition("=")[::2] for option in asked.get("job_options", ())]
    mounts = asked.get("container_mounts")
    return nemo_run.SlurmExecutor(
        account=asked.get("account", ""),
        partition=asked.get("partition"),
        qos=asked.get("qos"),
        constraint=asked.get("constraint"),
        gpus_per_node=asked.get("gpus_per_node"),
        time="UNLIMITED" if minutes is None else f"{minutes // 60:02}:{minutes % 60:02}:00",
        nodes=num_nodes,
        ntasks_per_node=1,
        container_image=asked.get("container_image"),
        container_mounts=[] if mounts is None else mounts.split(","),
        additional_parameters={name: value or True for name, value in options} or None,
        srun_args=["--cpu-bind=none", "--mpi=none", *asked.get("step_options", ())],
        tunnel=nemo_run.LocalTunnel(job_dir=""),
        packager=nemo_run.Packager(),
        poll_estimated_start_time=False,
    )


def main() -> int:
    """Run the request on the standard input."""
    request = json.loads(sys.stdin.buffer.read())
    # What NeMo-Run prints is not the command's, and its progress bars are no lines.
    os.environ.setdefault("TERM", "dumb")
    try:
        return HeldExperiment(request).run()
    except ExperimentLostError as error:
        write_json_atomic(Path(request["stdout"]).parent / FAULT_FILE, {"reason": str(error)})
        return _FAULT_EXIT


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Threads of NeMo-Run may wait for jobs that are over.
    os._exit(code)
