"""Trials as jobs of Kubernetes: a TrainJob or PyTorchJob of Kubeflow for each attempt.

The folders of the run and of the command lie on volumes that the site names; the tuner, in a pod or outside,
sees them under the same paths. The object is known by a name from the attempt's id.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from quartet_plugin.errors import ConfigError, QuartetError
from quartet_plugin.launchers.kubernetes_api import JobReference
from quartet_plugin.launchers.kubernetes_job import KubernetesJob, api_of
from quartet_plugin.launchers.kubernetes_objects import INDEX_VARIABLES, job_object, object_name
from quartet_plugin.launchers.kubernetes_site import KubernetesSite
from quartet_plugin.launchers.protocol import NodesHandle
from quartet_plugin.launchers.shared_run import SharedFolder
from quartet_plugin.launchers.site import Site
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.protocol.environment import ATTEMPT_ID

# Beside the attempt's output: which object it is.
JOB_FILE = "kubernetes-job.json"


class _PlainDumper(yaml.SafeDumper):
    """Writes what occurs twice twice."""

    def ignore_aliases(self, data: Any) -> bool:
        """See `yaml.SafeDumper`."""
        del data
        return True


@dataclass(frozen=True, slots=True)
class KubernetesLauncher:
    """Makes a job of `num_nodes` nodes for each command."""

    num_nodes: int
    site: Site
    engine: str = "kubernetes"

    def words(self, argv: Sequence[str], *, attempt_id: str, cwd: Path, stdout: Path) -> list[str]:
        """See `NodesLauncher`: as `kubectl` would make the object; the command goes through the folder."""
        kubernetes_site = _kubernetes_site(self.site)
        _check_folders(kubernetes_site, cwd=cwd, stdout=stdout)
        del attempt_id
        return ["kubectl", "create", f"--namespace={kubernetes_site.namespace}", "--filename=-", "<", *argv]

    def object_text(self, *, attempt_id: str, stdout: Path) -> str:
        """See `ObjectLauncher`."""
        made = job_object(self.site, attempt_id=attempt_id, stdout=stdout, num_nodes=self.num_nodes)
        text: str = yaml.dump(made, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True, width=1000)
        return text

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdout: Path) -> NodesHandle:
        """See `NodesLauncher`."""
        kubernetes_site, attempt_id = _kubernetes_site(self.site), env[ATTEMPT_ID]
        _check_folders(kubernetes_site, cwd=cwd, stdout=stdout)
        folder = SharedFolder(stdout)
        folder.write_request(
            argv,
            env=env,
            of_the_site=self.site.environment,
            cwd=cwd,
            num_nodes=self.num_nodes,
            index_variables=(INDEX_VARIABLES[kubernetes_site.kind],),
            names="address",
        )
        reference = JobReference(
            kind=kubernetes_site.kind,
            namespace=kubernetes_site.namespace,
            name=object_name(attempt_id),
            context=kubernetes_site.context,
        )
        # Written before the object is made: a later tuner deletes by it what a killed one has made.
        _write_reference(stdout, reference, num_nodes=self.num_nodes)
        made = job_object(self.site, attempt_id=attempt_id, stdout=stdout, num_nodes=self.num_nodes)
        try:
            reference = replace(reference, uid=api_of(kubernetes_site.context).create(reference, made))
            _write_reference(stdout, reference, num_nodes=self.num_nodes)
        except BaseException:
            # A request without an answer may have made the object: its pods then end the command.
            with contextlib.suppress(QuartetError):
                folder.kill()
            raise
        return KubernetesJob(attempt_id, folder, reference, self.num_nodes)


@dataclass(frozen=True, slots=True)
class KubernetesEngine:
    """The nodes that a cluster's scheduler gives, or Kueue."""

    site: Site

    def divide(self, *, num_nodes: int, at_once: int) -> tuple[tuple[str, ...], ...]:
        """See `Engine`: the scheduler chooses."""
        _kubernetes_site(self.site)
        del num_nodes
        return ((),) * at_once

    def launcher(self, nodes: Sequence[str], *, num_nodes: int) -> KubernetesLauncher:
        """See `Engine`."""
        del nodes
        return KubernetesLauncher(num_nodes, self.site)

    def adopt(self, attempt_id: str, *, stdout: Path) -> NodesHandle:
        """See `Engine`: the file of the start says where the job is, whatever the site says by now."""
        reference, num_nodes = None, 1
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads((stdout.parent / JOB_FILE).read_bytes())
            num_nodes = int(content["num_nodes"])
            reference = JobReference(
                **{name: content[name] for name in ("kind", "namespace", "name", "context", "uid")}
            )
        folder = SharedFolder(stdout)
        job = KubernetesJob(attempt_id, folder, reference, num_nodes)
        if folder.is_to_kill:
            # Its tuner gave it up: it is deleted even while it waits for nodes.
            job.kill()
        return job


def engine(site: Site) -> KubernetesEngine:
    """The engine of the name `kubernetes`. Raises ConfigError where its client is not installed."""
    if find_spec("kubernetes") is None:
        raise ConfigError(
            "launcher: kubernetes; its client is not installed: pip install 'quartet-plugin[kubernetes]'"
        )
    return KubernetesEngine(site)


def _kubernetes_site(site: Site) -> KubernetesSite:
    if site.kubernetes is None:
        raise ConfigError(
            "launcher: kubernetes; there is no section for it: write kubernetes: {volumes: [...]} into a "
            "site.yaml and give it with --site"
        )
    return site.kubernetes


def _check_folders(kubernetes_site: KubernetesSite, *, cwd: Path, stdout: Path) -> None:
    """Raise ConfigError where pods would not see the run's folder or the command's."""
    fix = "kubernetes.volumes names no volume there"
    if not kubernetes_site.mounts(stdout.parent):
        raise ConfigError(
            f"launcher: kubernetes; {stdout.parent} is not mounted in the pods: {fix} that they may write "
            "to; run it in a folder on a shared volume, or name its volume"
        )
    if not kubernetes_site.shows(cwd):
        raise ConfigError(f"launcher: kubernetes; {cwd} is not mounted in the pods: {fix}; name its volume")


def _write_reference(stdout: Path, reference: JobReference, *, num_nodes: int) -> None:
    content = {"schema_version": 1, **asdict(reference), "num_nodes": num_nodes}
    write_json_atomic(stdout.parent / JOB_FILE, content)
