"""Objects of Kubernetes and Kubeflow, read by the models that their own projects publish."""

import json
from typing import Any

import kubernetes_validate
from kubeflow.training import models as _  # noqa: F401  # what the client's own deserializer looks up
from kubeflow.training.api_client import ApiClient
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

KUBERNETES = "1.31"


class _Answer:
    """What the client's deserializer takes for an answer."""

    def __init__(self, content: Any) -> None:
        self.data = json.dumps(content)


def faults(content: dict[str, Any]) -> list[str]:
    """What the published models and schemas find wrong in an object, and what they do not know in it."""
    found = []
    try:
        if content["kind"] == "TrainJob":
            model = TrainerV1alpha1TrainJob.from_dict(content)
            assert model is not None
            understood = json.loads(json.dumps(model.to_dict(), default=str))
        elif content["kind"] == "PyTorchJob":
            client = ApiClient()
            understood = client.sanitize_for_serialization(
                client.deserialize(_Answer(content), "KubeflowOrgV1PyTorchJob")
            )
        else:
            kubernetes_validate.validate(content, KUBERNETES, strict=True)
            return []
        found += unknown(content, understood)
        for pod in pods_of(content):
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    except (ValueError, kubernetes_validate.ValidationError) as error:
        found.append(str(error).splitlines()[0])
    return found


def pods_of(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods that the job asks for, as objects of Kubernetes itself; the runtime's parts are left out."""
    spec = content["spec"]
    if content["kind"] == "PyTorchJob":
        templates = [replica["template"] for replica in spec["pytorchReplicaSpecs"].values()]
    else:
        trainer = spec["trainer"]
        templates = []
        for patch in spec.get("runtimePatches", ()):
            for job in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
                template = job["template"]["spec"]["template"]
                container = {
                    **template["spec"]["containers"][0],
                    "image": trainer.get("image", "of-the-runtime"),
                    "command": trainer.get("command", []),
                    "args": trainer.get("args", []),
                    "env": trainer.get("env", []),
                    "resources": trainer.get("resourcesPerNode", {}),
                }
                templates.append({**template, "spec": {**template["spec"], "containers": [container]}})
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template} for template in templates
    ]


def unknown(content: Any, understood: Any, place: str = "") -> list[str]:
    """The places of an object that a model has dropped or changed."""
    if isinstance(content, dict):
        lost = [f"{place}.{key}: unknown" for key in content if key not in (understood or {})]
        both = [key for key in content if key in (understood or {})]
        return lost + [
            line for key in both for line in unknown(content[key], understood[key], f"{place}.{key}")
        ]
    if isinstance(content, list):
        if len(content) != len(understood):
            return [f"{place}: {len(understood)} of {len(content)}"]
        pairs = enumerate(zip(content, understood, strict=True))
        return [line for index, (a, b) in pairs for line in unknown(a, b, f"{place}[{index}]")]
    return [] if content == understood else [f"{place}: {content!r} became {understood!r}"]
