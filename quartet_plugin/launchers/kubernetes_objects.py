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
    asked = site.kubernetes
    assert asked is not None
    words = [_escaped(word) for word in node_words(stdout, python=site.python or sys.executable)]
    labels = {ATTEMPT_LABEL: attempt_id}
    queue = {} if asked.queue is None else {_QUEUE_LABEL: asked.queue}
    group, version, _ = APIS[asked.kind]
    is_trainjob = asked.kind == "trainjob"
    spec = (
        _trainjob(asked, words, labels, num_nodes)
        if is_trainjob
        else _pytorchjob(asked, words, labels, num_nodes)
    )
    return {
        "apiVersion": f"{group}/{version}",
        "kind": "TrainJob" if is_trainjob else "PyTorchJob",
        "metadata": {
            "name": object_name(attempt_id),
            "namespace": asked.namespace,
            "labels": labels | queue,
        },
        "spec": spec,
    }


def _trainjob(
    asked: KubernetesSite, words: Sequence[str], labels: dict[str, str], num_nodes: int
) -> dict[str, Any]:
    trainer: dict[str, Any] = {"command": list(words), "numNodes": num_nodes}
    if asked.image is not None:
        trainer["image"] = asked.image
    if resources := _resources(asked):
        trainer["resourcesPerNode"] = resources
    pod = _pod_spec(asked) | {"containers": [{"name": _TRAINJOB_NODE, "volumeMounts": _mounts(asked)}]}
    node = {
        "name": _TRAINJOB_NODE,
        "template": {"spec": {"template": {"metadata": {"labels": labels}, "spec": pod}}},
    }
    patch = {"manager": _MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}}}
    return {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "ClusterTrainingRuntime",
            "name": asked.runtime,
        },
        "trainer": trainer,
        "runtimePatches": [patch],
        **_deadline(asked),
    }


def _pytorchjob(
    asked: KubernetesSite, words: Sequence[str], labels: dict[str, str], num_nodes: int
) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": _PYTORCHJOB_CONTAINER,
        "image": asked.image,
        "command": list(words),
        "volumeMounts": _mounts(asked),
    }
    if resources := _resources(asked):
        container["resources"] = resources
    template = {"metadata": {"labels": labels}, "spec": _pod_spec(asked) | {"containers": [container]}}
    replicas = {"Master": 1} | ({"Worker": num_nodes - 1} if num_nodes > 1 else {})
    return {
        "runPolicy": {
            "cleanPodPolicy": "Running",
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": _KEEP_S,
            **_deadline(asked),
        },
        "pytorchReplicaSpecs": {
            name: {"replicas": number, "restartPolicy": "Never", "template": template}
            for name, number in replicas.items()
        },
    }


def _deadline(asked: KubernetesSite) -> dict[str, int]:
    return {} if asked.minutes is None else {"activeDeadlineSeconds": asked.minutes * 60}


def _pod_spec(asked: KubernetesSite) -> dict[str, Any]:
    """The pod settings that both kinds of jobs share, without containers."""
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": _GRACE_S,
        "volumes": [
            # NCCL and data loaders need more than the 64 MB that a container has.
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            *(_volume(index, asked) for index in range(len(asked.volumes))),
        ],
    }
    if asked.node_selector:
        spec["nodeSelector"] = dict(asked.node_selector)
    if asked.tolerations:
        spec["tolerations"] = [{"key": key, "operator": "Exists"} for key in asked.tolerations]
    if asked.service_account is not None:
        spec["serviceAccountName"] = asked.service_account
    if asked.pull_secret is not None:
        spec["imagePullSecrets"] = [{"name": asked.pull_secret}]
    if asked.user is not None:
        spec["securityContext"] = {"runAsUser": asked.user}
    return spec


def _volume(index: int, asked: KubernetesSite) -> dict[str, Any]:
    volume = asked.volumes[index]
    source: dict[str, Any] = (
        {"hostPath": {"path": volume.host, "type": "Directory"}}
        if volume.claim is None
        else {"persistentVolumeClaim": {"claimName": volume.claim}}
    )
    return {"name": f"volume-{index}", **source}


def _mounts(asked: KubernetesSite) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]  # noqa: S108  # a mount
    for index, volume in enumerate(asked.volumes):
        only_read = {"readOnly": True} if volume.read_only else {}
        mounts.append({"name": f"volume-{index}", "mountPath": volume.path, **only_read})
    return mounts


def _resources(asked: KubernetesSite) -> dict[str, Any]:
    """Equal requests and limits, because a measurement must not share resources."""
    amounts = {name: str(value) for name, value in asked.resources.items()}
    if asked.gpus_per_node is not None:
        amounts[GPU] = str(asked.gpus_per_node)
    return {"requests": amounts, "limits": amounts} if amounts else {}


def _escaped(word: str) -> str:
    """A word in which Kubernetes replaces nothing: `$(NAME)` is a variable, `$$` a dollar."""
    return word.replace("$", "$$")
