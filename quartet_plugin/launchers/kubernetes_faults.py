"""Faults in the states of jobs and pods: whether Kubernetes, not the plan, has ended an attempt."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quartet_plugin.launchers.shared_node import NOT_SEEN_EXIT

# Reasons of a failed job that are the cluster's (JobSet, Kubeflow's operator).
ENDED = ("DeadlineExceeded", "PodGroupTimeout")
# Reasons of a pod that never starts: the site is wrong, or a registry.
_NEVER_STARTS = (
    "InvalidImageName",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
)
# Reasons of a pod that the cluster has taken away.
_TAKEN = (
    "Evicted",
    "NodeLost",
    "NodeShutdown",
    "Shutdown",
    "Terminated",
    "Preempting",
    "NodeAffinity",
    "UnexpectedAdmissionError",
)


def terminal_condition(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The condition with which a TrainJob or PyTorchJob has ended; None while it has not."""
    return _true(content, "Failed") or _true(content, "Complete") or _true(content, "Succeeded")


def is_suspended(content: Mapping[str, Any]) -> bool:
    """Whether the job is suspended, as Kueue does with waiting and preempted jobs."""
    spec = content.get("spec", {})
    return bool(spec.get("suspend") or spec.get("runPolicy", {}).get("suspend"))


def pod_fault(pod: Mapping[str, Any]) -> str | None:
    """Why the cluster has ended a pod or cannot start it, with both names; None where it has not."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    node = pod.get("spec", {}).get("nodeName", "no node")
    disruption = _true(pod, "DisruptionTarget")
    if disruption is not None:
        return f"Kubernetes has taken pod {name} from {node}: {disruption.get('reason', 'DisruptionTarget')}"
    if status.get("reason") in _TAKEN:
        return f"Kubernetes has taken pod {name} from {node}: {status['reason']}"
    for container in status.get("containerStatuses", ()):
        reason = container.get("state", {}).get("waiting", {}).get("reason")
        if reason in _NEVER_STARTS:
            return f"pod {name} cannot start on {node}: {reason}"
    return None


def unseen_fault(pods: Sequence[Mapping[str, Any]], folder: Path) -> str | None:
    """That a pod does not see the attempt's folder, for which no plan is to blame; None where all did."""
    for pod in pods:
        for container in pod.get("status", {}).get("containerStatuses", ()):
            if container.get("state", {}).get("terminated", {}).get("exitCode") == NOT_SEEN_EXIT:
                return f"pod {pod['metadata']['name']} does not see {folder}: correct kubernetes.volumes"
    return None


def _true(content: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    for condition in content.get("status", {}).get("conditions", ()):
        if condition.get("type") == kind and condition.get("status") == "True":
            true_condition: Mapping[str, Any] = condition
            return true_condition
    return None
