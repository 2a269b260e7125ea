"""The object of an attempt on Kubernetes: a TrainJob of Kubeflow's trainer, or a PyTorchJob of its operator.

Both say the same of their pods: the command line of `shared_node`, the site's volumes and resources, one pod
a node. No value of the user's command is in them but the path of the run's folder.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quartet_plugin.launchers.kubernetes_site import GPU, KubernetesSite
from quartet_plugin.launchers.shared_run import node_words
from quartet_plugin.launchers.site import Site

ATTEMPT_LABEL = "quartet-plugin/attempt"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_MANAGER = "quartet-plugin/launcher"
# The API of each kind: group, version, plural, and the variable by which its pods know their index.
APIS = {
    "trainjob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs"),
    "pytorchjob": ("kubeflow.org", "v1", "pytorchjobs"),
}
INDEX_VARIABLES = {"trainjob": "JOB_COMPLETION_INDEX", "pytorchjob": "RANK"}
# The names that Kubeflow gives the replicated job and the container of the ranks.
_TRAINJOB_NODE, _PYTORCHJOB_CONTAINER = "node", "pytorch"
_GRACE_S = 10
# A job whose tuner is gone is forgotten a day after its end.
_KEEP_S = 86_400


def object_name(attempt_id: str) -> str:
    """The name of an attempt's object: a label of the DNS, and unlike any other attempt's."""
    return f"quartet-{attempt_id}"


def job_object(site: Site, *, attempt_id: str, stdout: Path, num_nodes: int) -> dict[str, Any]:
    """The object of an attempt of `num_nodes` nodes with this output."""
    kubernetes_site = site.kubernetes
    assert kubernetes_site is not None
    words = [_escaped(word) for word in node_words(stdout, python=site.python or sys.executable)]
    labels = {ATTEMPT_LABEL: attempt_id}
    queue = {} if kubernetes_site.queue is None else {_QUEUE_LABEL: kubernetes_site.queue}
    group, version, _ = APIS[kubernetes_site.kind]
    is_trainjob = kubernetes_site.kind == "trainjob"
    spec = (
        _trainjob(kubernetes_site, words, labels, num_nodes)
        if is_trainjob
        else _pytorchjob(kubernetes_site, words, labels, num_nodes)
    )
    return {
        "apiVersion": f"{group}/{version}",
        "kind": "TrainJob" if is_trainjob else "PyTorchJob",
        "metadata": {
            "name": object_name(attempt_id),
            "namespace": kubernetes_site.namespace,
            "labels": labels | queue,
        },
        "spec": spec,
    }


def _trainjob(
    kubernetes_site: KubernetesSite, words: Sequence[str], labels: dict[str, str], num_nodes: int
) -> dict[str, Any]:
    trainer: dict[str, Any] = {"command": list(words), "numNodes": num_nodes}
    if kubernetes_site.image is not None:
        trainer["image"] = kubernetes_site.image
    if resources := _resources(kubernetes_site):
        trainer["resourcesPerNode"] = resources
    pod = _pod_spec(kubernetes_site) | {
        "containers": [{"name": _TRAINJOB_NODE, "volumeMounts": _mounts(kubernetes_site)}]
    }
    node = {
        "name": _TRAINJOB_NODE,
        "template": {"spec": {"template": {"metadata": {"labels": labels}, "spec": pod}}},
    }
    patch = {"manager": _MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}}}
    return {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "ClusterTrainingRuntime",
            "name": kubernetes_site.runtime,
        },
        "trainer": trainer,
        "runtimePatches": [patch],
        **_deadline(kubernetes_site),
    }


def _pytorchjob(
    kubernetes_site: KubernetesSite, words: Sequence[str], labels: dict[str, str], num_nodes: int
) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": _PYTORCHJOB_CONTAINER,
        "image": kubernetes_site.image,
        "command": list(words),
        "volumeMounts": _mounts(kubernetes_site),
    }
    if resources := _resources(kubernetes_site):
        container["resources"] = resources
    template = {
        "metadata": {"labels": labels},
        "spec": _pod_spec(kubernetes_site) | {"containers": [container]},
    }
    replicas = {"Master": 1} | ({"Worker": num_nodes - 1} if num_nodes > 1 else {})
    return {
        "runPolicy": {
            "cleanPodPolicy": "Running",
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": _KEEP_S,
            **_deadline(kubernetes_site),
        },
        "pytorchReplicaSpecs": {
            name: {"replicas": number, "restartPolicy": "Never", "template": template}
            for name, number in replicas.items()
        },
    }


def _deadline(kubernetes_site: KubernetesSite) -> dict[str, int]:
    return {} if kubernetes_site.minutes is None else {"activeDeadlineSeconds": kubernetes_site.minutes * 60}


def _pod_spec(kubernetes_site: KubernetesSite) -> dict[str, Any]:
    """The pod settings that both kinds of jobs share, without containers."""
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": _GRACE_S,
        "volumes": [
            # NCCL and data loaders need more than the 64 MB that a container has.
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            *(_volume(index, kubernetes_site) for index in range(len(kubernetes_site.volumes))),
        ],
    }
    if kubernetes_site.node_selector:
        spec["nodeSelector"] = dict(kubernetes_site.node_selector)
    if kubernetes_site.tolerations:
        spec["tolerations"] = [{"key": key, "operator": "Exists"} for key in kubernetes_site.tolerations]
    if kubernetes_site.service_account is not None:
        spec["serviceAccountName"] = kubernetes_site.service_account
    if kubernetes_site.pull_secret is not None:
        spec["imagePullSecrets"] = [{"name": kubernetes_site.pull_secret}]
    if kubernetes_site.user is not None:
        spec["securityContext"] = {"runAsUser": kubernetes_site.user}
    return spec


def _volume(index: int, kubernetes_site: KubernetesSite) -> dict[str, Any]:
    volume = kubernetes_site.volumes[index]
    source: dict[str, Any] = (
        {"hostPath": {"path": volume.host, "type": "Directory"}}
        if volume.claim is None
        else {"persistentVolumeClaim": {"claimName": volume.claim}}
    )
    return {"name": f"volume-{index}", **source}


def _mounts(kubernetes_site: KubernetesSite) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]  # noqa: S108  # a mount
    for index, volume in enumerate(kubernetes_site.volumes):
        only_read = {"readOnly": True} if volume.read_only else {}
        mounts.append({"name": f"volume-{index}", "mountPath": volume.path, **only_read})
    return mounts


def _resources(kubernetes_site: KubernetesSite) -> dict[str, Any]:
    """Equal requests and limits, because a measurement must not share resources."""
    amounts = {name: str(value) for name, value in kubernetes_site.resources.items()}
    if kubernetes_site.gpus_per_node is not None:
        amounts[GPU] = str(kubernetes_site.gpus_per_node)
    return {"requests": amounts, "limits": amounts} if amounts else {}


def _escaped(word: str) -> str:
    """A word in which Kubernetes replaces nothing: `$(NAME)` is a variable, `$$` a dollar."""
    return word.replace("$", "$$")
