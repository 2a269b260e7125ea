"""The job of an attempt on Kubernetes as a handle: followed by its nodes' files, deleted by its uid."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from quartet_plugin.launchers.kubernetes_api import JobReference, KubernetesApi
from quartet_plugin.launchers.kubernetes_faults import (
    ENDED,
    is_suspended,
    pod_fault,
    terminal_condition,
    unseen_fault,
)
from quartet_plugin.launchers.patience import PATIENCE_S, Patience
from quartet_plugin.launchers.shared_run import SharedFolder, highest

_LOOK_S, _POLL_S = 2.0, 0.5
# Files of a node may be seen later than its end; an object's end takes the grace of its pods.
_FILES_S, _END_S = 10.0, 90.0
_UNKNOWN_EXIT = 1


@cache
def api_of(context: str | None) -> KubernetesApi:
    """The API server of a context of the kubeconfig."""
    return KubernetesApi(context)


class KubernetesJob:
    """The job of an attempt. `reference` is None where nothing was started."""

    def __init__(
        self, attempt_id: str, folder: SharedFolder, reference: JobReference | None, num_nodes: int
    ) -> None:
        self._attempt_id, self._folder = attempt_id, folder
        self._reference, self._num_nodes = reference, num_nodes
        self._fault: str | None = None
        self._is_over = reference is None
        self._over_s: float | None = None
        self._next_look_s = 0.0
        self._patience = Patience()
        self._is_ending = False
        self._has_collected = False

    @property
    def pid(self) -> int:
        """None of its processes runs on this machine."""
        return 0

    @property
    def is_pending(self) -> bool:
        """Whether pods wait: for Kueue, for nodes, for images, or one for another."""
        return self.poll() is None and not self._folder.has_begun(self._num_nodes)

    @property
    def fault(self) -> str | None:
        """Why Kubernetes has ended the job, for the user."""
        self._look(is_forced=True)
        return self._fault

    def poll(self) -> int | None:
        """The command's exit code by the nodes' own files, else that the job has ended."""
        codes = self._folder.exit_codes(self._num_nodes)
        if len(codes) < self._num_nodes:
            self._look()
            if not self._is_over:
                return None
            self._over_s = time.monotonic() if self._over_s is None else self._over_s
            is_owed = self._fault is None and self._folder.num_begun() > len(codes)
            if is_owed and time.monotonic() < self._over_s + _FILES_S:
                return None
        self._collect()
        code = highest(codes)
        # A node whose code is unknown has not ended well.
        return code if code is not None and (code or len(codes) == self._num_nodes) else _UNKNOWN_EXIT

    def terminate(self) -> None:
        """Have the nodes ask the command to end; a job that still waits is deleted."""
        self._end_by(self._folder.ask_to_end)

    def kill(self) -> None:
        """Have the nodes kill the command; a job that still waits is deleted."""
        self._end_by(self._folder.kill)

    def _end_by(self, tell_nodes: Callable[[], None]) -> None:
        self._is_ending = True
        tell_nodes()
        if not self._folder.has_begun(self._num_nodes):
            self._delete()

    def end_on_nodes(self) -> tuple[str, ...]:
        """Delete the job, and wait until it and its pods are gone; the pods that are not."""
        try:
            self._look(is_forced=True)
        finally:
            # The nodes need no answer of the API server.
            self._is_ending = True
            self._folder.kill()
        self._delete()
        left = self._await_gone()
        self._is_over = True
        self._collect()
        return left

    def _delete(self) -> None:
        if self._reference is None:
            return
        if self._reference.uid is None:
            # The tuner that made it was killed before it knew: its name is the attempt's alone.
            job_content = api_of(self._reference.context).read(self._reference)
            if job_content is None:
                return
            self._reference = replace(self._reference, uid=job_content["metadata"]["uid"])
        api_of(self._reference.context).delete(self._reference)

    def _await_gone(self) -> tuple[str, ...]:
        if self._reference is None:
            return ()
        api, end = api_of(self._reference.context), time.monotonic() + _END_S
        while True:
            pods = api.pods(self._reference, self._attempt_id)
            if not pods and api.read(self._reference) is None:
                return ()
            if time.monotonic() >= end:
                names = [pod["metadata"]["name"] for pod in pods]
                return tuple(f"pod {name}" for name in names) or (f"job {self._reference.name}",)
            time.sleep(_POLL_S)

    def _look(self, *, is_forced: bool = False) -> None:
        """Ask for the job and its pods, at most every two seconds."""
        now = time.monotonic()
        if self._is_over or self._reference is None or (now < self._next_look_s and not is_forced):
            return
        self._next_look_s = now + _LOOK_S
        patience_s = PATIENCE_S if is_forced else 0.0
        answer = self._patience.answer(lambda: self._job_and_pods(patience_s))
        if answer is None:
            return
        job_content, pods = answer
        begun = self._folder.num_begun()
        fault = next((words for pod in pods if (words := pod_fault(pod)) is not None), None)
        if job_content is None:
            self._is_over = True
            fault = None if self._is_ending else "Kubernetes no longer has the job: it was deleted"
        elif (condition := terminal_condition(job_content)) is not None:
            self._is_over = True
            if condition.get("reason") in ENDED:
                fault = f"Kubernetes has ended the job: {condition['reason']}"
            elif condition["type"] == "Failed":
                fault = fault or unseen_fault(pods, self._folder.path)
        elif begun and is_suspended(job_content):
            self._is_over = True
            fault = "Kueue has suspended the job, to give its nodes to another"
        elif fault is not None:
            self._is_over = True
        if not self._is_ending:
            self._fault = self._fault or fault
        if self._is_over and not begun:
            self._add_logs(pods)

    def _job_and_pods(self, patience_s: float) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """The object as it is, and its pods; None and none where it is gone."""
        assert self._reference is not None
        api = api_of(self._reference.context)
        job_content = api.read(self._reference, patience_s=patience_s)
        if job_content is None:
            return None, []
        return job_content, api.pods(self._reference, self._attempt_id, patience_s=patience_s)

    def _add_logs(self, pods: Sequence[Mapping[str, Any]]) -> None:
        """Add the output of pods that failed before the command started, which no other file has."""
        assert self._reference is not None
        for pod in pods:
            name = str(pod["metadata"]["name"])
            text = api_of(self._reference.context).log(self._reference.namespace, name)
            if text:
                with contextlib.suppress(OSError):
                    self._folder.add_output(f"pod {name}:\n{text.rstrip()}\n".encode())

    def _collect(self) -> None:
        if not self._has_collected:
            self._has_collected = True
            self._folder.collect()
