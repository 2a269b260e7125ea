"""A fake of Kubernetes at the boundary of HTTP: a server on loopback that stores jobs and runs their pods.

It stands for the API server, Kubeflow's controllers and the nodes: a job's object is validated by the models
of its own project and stored, each replica is a pod, and each pod a process of this machine in namespaces of
its own, with the variables that Kubeflow gives it. What the client sends is what the real one would get; what
it gets back has the form that the real one sends, of the parts that are read. Images, volumes and networks
are not there: pods see this machine's files.
"""

import json
import os
import re
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.launchers import namespaces
from tests.launchers.kubernetes_models import faults, pods_of

_QUEUE = "kueue.x-k8s.io/queue-name"
_OBJECTS = re.compile(
    r"/apis/(?P<group>[^/]+)/[^/]+/namespaces/(?P<namespace>[^/]+)/(?P<plural>[^/]+)(/(?P<name>[^/]+))?"
)
_PODS = re.compile(r"/api/v1/namespaces/(?P<namespace>[^/]+)/pods(/(?P<name>[^/]+)/log)?")
_TICK_S = 0.05


@dataclass
class Pod:
    """A replica and its process."""

    name: str
    job: str
    labels: dict[str, str]
    words: list[str]
    environment: dict[str, str]
    log: Path
    grace_s: float
    process: "subprocess.Popen[bytes] | None" = None
    node: str | None = None
    condition: dict[str, Any] | None = None
    waiting: str | None = None
    terminated_s: float | None = None

    @property
    def exit_code(self) -> int | None:
        """The exit code as Kubernetes has it."""
        code = None if self.process is None else self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def phase(self) -> str:
        """As Kubernetes names it."""
        if self.process is None:
            return "Pending"
        return "Running" if self.exit_code is None else "Failed" if self.exit_code else "Succeeded"

    def content(self) -> dict[str, Any]:
        """The pod as the API shows it."""
        state: dict[str, Any] = {}
        if self.waiting is not None:
            state = {"waiting": {"reason": self.waiting}}
        elif self.exit_code is not None:
            state = {"terminated": {"exitCode": self.exit_code}}
        container = {
            "name": "node",
            "image": "i",
            "imageID": "i",
            "ready": False,
            "restartCount": 0,
            "state": state,
        }
        return {
            "metadata": {"name": self.name, "labels": self.labels},
            "spec": {"containers": [{"name": "node"}], "nodeName": self.node},
            "status": {
                "phase": self.phase,
                "conditions": [] if self.condition is None else [self.condition],
                "containerStatuses": [container],
            },
        }


@dataclass
class FakeCluster:
    """The state, under one lock."""

    folder: Path
    nodes: tuple[str, ...]
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    pods: list[Pod] = field(default_factory=list)
    # What a test sets: whether Kueue admits, whether images are there, and how often the server fails.
    admits: bool = True
    has_images: bool = True
    num_failures: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    def create(self, plural: str, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Store a job and make its pods."""
        if wrong := faults(content):
            return 422, {"message": "; ".join(wrong)}
        name = content["metadata"]["name"]
        if (plural, name) in self.objects:
            return 409, {"message": f"{plural} {name} already exists"}
        content["metadata"]["uid"] = str(uuid.uuid4())
        content["status"] = {"conditions": []}
        self.objects[plural, name] = content
        # As Kueue's webhook does with what has a queue.
        self._suspend(content, _QUEUE in content["metadata"]["labels"] and not self.admits)
        if not self._is_suspended(content):
            self._make_pods(content)
        return 201, content

    def delete(self, plural: str, name: str, options: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """End the pods of a job; the job is gone when they are."""
        content = self.objects.get((plural, name))
        if content is None:
            return 404, {"message": f"{plural} {name} not found"}
        wanted = options.get("preconditions", {}).get("uid")
        if wanted is not None and wanted != content["metadata"]["uid"]:
            return 409, {"message": "the uid is another"}
        assert options.get("propagationPolicy") == "Foreground"
        content["metadata"]["deletionTimestamp"] = "now"
        return 200, {}

    def preempt(self) -> None:
        """Take its nodes from every job, as Kueue does."""
        with self.lock:
            for content in self.objects.values():
                self._suspend(content, True)
                for pod in self._of(content):
                    self._end(pod)

    def lose_node(self, node: str) -> None:
        """Kill what runs on a node and say so, as the controller of taints does."""
        with self.lock:
            for pod in self.pods:
                if pod.node == node and pod.process is not None:
                    pod.condition = {
                        "type": "DisruptionTarget",
                        "status": "True",
                        "reason": "DeletionByTaintManager",
                    }
                    pod.process.kill()

    def step(self) -> None:
        """What controllers and nodes do in a moment."""
        with self.lock:
            for pod in self.pods:
                if pod.process is None and pod.terminated_s is None:
                    self._place(pod)
                is_ending = pod.terminated_s is not None and pod.phase == "Running"
                if is_ending and time.monotonic() > (pod.terminated_s or 0.0) + pod.grace_s:
                    assert pod.process is not None
                    pod.process.kill()
            for key, content in list(self.objects.items()):
                self._settle(key, content)

    def stop(self) -> None:
        """Kill every pod."""
        with self.lock:
            for pod in self.pods:
                if pod.process is not None:
                    pod.process.kill()
                    pod.process.wait()

    def _settle(self, key: tuple[str, str], content: dict[str, Any]) -> None:
        pods = self._of(content)
        if "deletionTimestamp" in content["metadata"]:
            for pod in pods:
                self._end(pod)
            if all(pod.phase != "Running" for pod in pods):
                self.pods = [pod for pod in self.pods if pod not in pods]
                del self.objects[key]
        elif self._is_suspended(content):
            self.pods = [pod for pod in self.pods if pod not in pods or pod.phase == "Running"]
        elif not content["status"]["conditions"] and pods:
            phases = [pod.phase for pod in pods]
            is_done = (
                phases[0] == "Succeeded" if content["kind"] == "PyTorchJob" else set(phases) == {"Succeeded"}
            )
            if "Failed" in phases or is_done:
                kind = (
                    "Failed"
                    if "Failed" in phases
                    else {"TrainJob": "Complete"}.get(content["kind"], "Succeeded")
                )
                content["status"]["conditions"].append({"type": kind, "status": "True", "reason": "Ended"})
                for pod in pods:
                    self._end(pod)

    def _place(self, pod: Pod) -> None:
        if not self.has_images:
            pod.waiting = "ImagePullBackOff"
            return
        taken = {other.node for other in self.pods if other.phase == "Running"}
        free = [node for node in self.nodes if node not in taken]
        if not free:
            return
        pod.node = free[0]
        hosts = self.folder / f"{pod.name}.hosts"
        hosts.write_text(f"127.0.0.1 localhost {pod.name}\n")
        with pod.log.open("wb") as log:
            pod.process = subprocess.Popen(
                namespaces.words_on(pod.name, str(hosts), pod.words),
                env=pod.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _end(self, pod: Pod) -> None:
        """SIGTERM to a pod's own first process, SIGKILL after its grace."""
        if pod.terminated_s is None:
            pod.terminated_s = time.monotonic()
            if pod.process is not None and pod.phase == "Running":
                children = Path(f"/proc/{pod.process.pid}/task/{pod.process.pid}/children")
                # It may end by itself in between.
                with suppress(FileNotFoundError, ProcessLookupError):
                    for child in children.read_text().split():
                        os.kill(int(child), signal.SIGTERM)

    def _of(self, content: dict[str, Any]) -> list[Pod]:
        return [pod for pod in self.pods if pod.job == content["metadata"]["name"]]

    @staticmethod
    def _is_suspended(content: dict[str, Any]) -> bool:
        spec = content["spec"]
        return bool(spec.get("suspend") or spec.get("runPolicy", {}).get("suspend"))

    @staticmethod
    def _suspend(content: dict[str, Any], value: bool) -> None:
        where = content["spec"] if content["kind"] == "TrainJob" else content["spec"]["runPolicy"]
        where["suspend"] = value

    def _make_pods(self, content: dict[str, Any]) -> None:
        name, spec = content["metadata"]["name"], content["spec"]
        if content["kind"] == "TrainJob":
            number = spec["trainer"]["numNodes"]
            named = [(f"{name}-node-0-{index}", pods_of(content)[0]) for index in range(number)]
        else:
            replicas = zip(spec["pytorchReplicaSpecs"].items(), pods_of(content), strict=True)
            named = [
                (f"{name}-{kind.lower()}-{index}", pod)
                for (kind, replica), pod in replicas
                for index in range(replica["replicas"])
            ]
        number = len(named)
        for index, (pod_name, pod) in enumerate(named):
            assert len(pod_name) <= 63
            container = pod["spec"]["containers"][0]
            given = {entry["name"]: entry["value"] for entry in container.get("env", ())}
            self.pods.append(
                Pod(
                    name=pod_name,
                    job=name,
                    labels=pod["metadata"]["labels"],
                    words=[
                        _expanded(word, given) for word in container["command"] + container.get("args", [])
                    ],
                    environment=_of_the_image() | given | _of_kubeflow(content["kind"], name, index, number),
                    log=self.folder / f"{pod_name}.log",
                    grace_s=pod["spec"]["terminationGracePeriodSeconds"],
                )
            )


def _of_the_image() -> dict[str, str]:
    """What the image of a pod sets: here the tests' own installation."""
    kept = ("PATH", "PYTHONPATH", "HOME", "LANG", "LC_ALL")
    return {name: os.environ[name] for name in kept if name in os.environ}


def _of_kubeflow(kind: str, job: str, index: int, number: int) -> dict[str, str]:
    """The variables that Kubeflow's controllers give to the ranks of torch."""
    address = f"{job}-node-0-0.{job}" if kind == "TrainJob" else f"{job}-master-0"
    common = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "PET_NNODES": str(number),
        "PET_NPROC_PER_NODE": "auto",
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": "29500",
    }
    if kind == "TrainJob":
        return common | {"JOB_COMPLETION_INDEX": str(index)}
    more = {"RANK": str(index), "WORLD_SIZE": str(number), "MASTER_ADDR": address, "MASTER_PORT": "23456"}
    return common | more


def _expanded(word: str, variables: dict[str, str]) -> str:
    """A word of a command as Kubernetes expands it: `$$` is a dollar, `$(NAME)` a variable that is set."""

    def value(found: "re.Match[str]") -> str:
        if found[0] == "$$":
            return "$"
        return variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)", value, word)


class _Handler(BaseHTTPRequestHandler):
    cluster: FakeCluster

    def log_message(self, *words: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:  # http.server's name
        """A job, the pods of a label, or a log."""
        where = urlsplit(self.path)
        with self.cluster.lock:
            if (found := _PODS.fullmatch(where.path)) is not None:
                self._pods(found, parse_qs(where.query))
            elif (found := _OBJECTS.fullmatch(where.path)) is not None:
                content = self.cluster.objects.get((found["plural"], found["name"]))
                self._answer(*((404, {"message": "not found"}) if content is None else (200, content)))
            else:
                self._answer(404, {"message": "no such path"})

    def do_POST(self) -> None:  # http.server's name
        """Make a job."""
        self._change("create")

    def do_DELETE(self) -> None:  # http.server's name
        """Delete a job."""
        self._change("delete")

    def _change(self, verb: str) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = _OBJECTS.fullmatch(urlsplit(self.path).path)
        assert found is not None
        with self.cluster.lock:
            if verb == "create":
                self._answer(*self.cluster.create(found["plural"], content))
            else:
                self._answer(*self.cluster.delete(found["plural"], found["name"], content))

    def _pods(self, found: "re.Match[str]", query: dict[str, list[str]]) -> None:
        if found["name"] is not None:
            (pod,) = [pod for pod in self.cluster.pods if pod.name == found["name"]]
            self._answer(200, pod.log.read_text() if pod.log.exists() else "")
            return
        key, _, value = query["labelSelector"][0].partition("=")
        items = [pod.content() for pod in self.cluster.pods if pod.labels.get(key) == value]
        self._answer(200, {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": items})

    def _answer(self, status: int, content: "dict[str, Any] | str") -> None:
        if self.cluster.num_failures > 0:
            self.cluster.num_failures -= 1
            status, content = 503, {"message": "the server is starting"}
        body = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(content, str) else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def fake_cluster(folder: Path, *, num_nodes: int) -> Iterator[FakeCluster]:
    """A cluster of nodes that take one pod each, and its kubeconfig in the folder; ended with the block."""
    cluster = FakeCluster(folder, tuple(f"node-{index}" for index in range(num_nodes)))
    handler = type("Handler", (_Handler,), {"cluster": cluster})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    (folder / "kubeconfig").write_text(yaml.safe_dump(_kubeconfig(url)))
    has_ended = threading.Event()

    def run() -> None:
        while not has_ended.wait(_TICK_S):
            cluster.step()

    works = (partial(server.serve_forever, poll_interval=_TICK_S), run)
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield cluster
    finally:
        has_ended.set()
        server.shutdown()
        server.server_close()
        threads[1].join()
        cluster.stop()


def _kubeconfig(url: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": {"server": url}}],
        "users": [{"name": "fake", "user": {"token": "of-the-tests"}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
    }
