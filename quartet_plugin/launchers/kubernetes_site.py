"""`kubernetes:` of `site.yaml`: where the jobs of trials run, and their resources."""

import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from quartet_plugin.model.sections import Section

# Names of Kubernetes (RFC 1123), references of images, and quantities of resources.
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._:/@-]{0,499}")
_QUANTITY = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_PATH = re.compile(r"(/[A-Za-z0-9_.+-]{1,200}){1,20}")
_CONTEXT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/@+-]{0,499}")
GPU = "nvidia.com/gpu"


def matching(pattern: re.Pattern[str], rule: str) -> AfterValidator:
    """A check that all of a text matches `pattern`; `rule` says to a user what may be written."""

    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(rule)
        return value

    return AfterValidator(check)


def _path(value: str) -> str:
    if not _PATH.fullmatch(value) or ".." in value.split("/") or "." in value.split("/"):
        raise ValueError("an absolute path of letters, digits and _.+-")
    return value


def _resources(values: dict[str, str | int]) -> dict[str, str | int]:
    for name, value in values.items():
        if not _KEY.fullmatch(name) or not _QUANTITY.fullmatch(str(value)):
            raise ValueError("resources as Kubernetes names them, each with a quantity such as 8 or 512Gi")
    return values


def _labels(values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if not _KEY.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ValueError("labels as Kubernetes has them")
    return values


Name = Annotated[str, matching(_NAME, "a name of Kubernetes: lower-case letters, digits, - and .")]
Label = Annotated[str, matching(_LABEL, "a name of Kubernetes: lower-case letters, digits and -, at most 63")]
Image = Annotated[str, matching(_IMAGE, "a reference of an image, as REGISTRY/NAME:TAG")]
Key = Annotated[str, matching(_KEY, "a key as Kubernetes has them")]
Context = Annotated[str, matching(_CONTEXT, "the name of a context of the kubeconfig")]
MountPath = Annotated[str, AfterValidator(_path)]


class KubernetesVolume(Section):
    """A folder that every pod and the tuner see under the same path: of a claim, or of every node itself."""

    claim: Name | None = Field(default=None, description="the name of a PersistentVolumeClaim")
    host: MountPath | None = Field(
        default=None, description="or a path that every node of the cluster has mounted"
    )
    path: MountPath = Field(description="the path at which pods and tuner mount it")
    read_only: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="whether pods mount it read-only"
    )

    @model_validator(mode="after")
    def _one_source(self) -> "KubernetesVolume":
        if (self.claim is None) == (self.host is None):
            raise ValueError("name one of claim and host")
        return self


class KubernetesSite(Section):
    """Jobs of Kubeflow: a TrainJob (trainer v2) or a PyTorchJob (training operator v1) for each attempt."""

    namespace: Label = Field(default="default", description="the namespace of the jobs")
    context: Context | None = Field(
        default=None, description="context of the kubeconfig; default: the current one, or the pod's account"
    )
    kind: Literal["trainjob", "pytorchjob"] = Field(default="trainjob", description="trainjob or pytorchjob")
    runtime: Name = Field(default="torch-distributed", description="the ClusterTrainingRuntime of TrainJobs")
    image: Image | None = Field(
        default=None, description="the image of the pods; a TrainJob without it takes that of its runtime"
    )
    queue: Label | None = Field(default=None, description="the LocalQueue of Kueue")
    volumes: Annotated[tuple[KubernetesVolume, ...], Field(max_length=100, strict=False)] = Field(
        default=(), description="shared folders, which must contain the folders of the run and of the command"
    )
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description=f"{GPU} of each node"
    )
    resources: Annotated[dict[Key, str | int], Field(max_length=100), AfterValidator(_resources)] = Field(
        default={}, description="further resources of each node for a trial: cpu, memory, rdma/ib"
    )
    node_selector: Annotated[dict[str, str], Field(max_length=100), AfterValidator(_labels)] = Field(
        default={}, description="labels of the nodes that may be used"
    )
    tolerations: Annotated[tuple[Key, ...], Field(max_length=100, strict=False)] = Field(
        default=(), description="keys of the taints to tolerate"
    )
    service_account: Name | None = Field(default=None, description="the service account of the pods")
    pull_secret: Name | None = Field(default=None, description="the secret for pulling the image")
    user: Annotated[int, Field(ge=0, le=2**31)] | None = Field(
        default=None, description="the user id of the pods, which owns the run's folder"
    )
    minutes: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        default=None, description="time limit of the job of one running trial"
    )

    @model_validator(mode="after")
    def _image_of_a_pytorchjob(self) -> "KubernetesSite":
        if self.kind == "pytorchjob" and self.image is None:
            raise ValueError("a pytorchjob has no runtime that names an image: write image: too")
        if self.gpus_per_node is not None and GPU in self.resources:
            raise ValueError(f"{GPU} is requested twice: by gpus_per_node and by resources")
        return self

    def mounts(self, path: Path) -> bool:
        """Whether pods can write to a folder."""
        plain = PurePosixPath(path)
        return any(plain.is_relative_to(volume.path) and not volume.read_only for volume in self.volumes)

    def shows(self, path: Path) -> bool:
        """Whether pods see a folder."""
        return any(PurePosixPath(path).is_relative_to(volume.path) for volume in self.volumes)
