"""The objects of attempts on Kubernetes: as their projects' models have them, whatever a value holds."""

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet_plugin.cli.main import main
from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers import kubernetes
from quartet_plugin.launchers.kubernetes_objects import job_object
from quartet_plugin.launchers.site import Site, parse_site
from quartet_plugin.testing.launchers import HOSTILE
from tests.cli.tuning import prepare
from tests.launchers.fake_kubernetes_api import _expanded as expanded
from tests.launchers.kubernetes_models import faults, pods_of

FULL: dict[str, Any] = {
    "namespace": "training",
    "image": "registry.example:5000/team/megatron@sha256:0af",
    "runtime": "torch-distributed",
    "queue": "team-a",
    "volumes": [
        {"claim": "shared", "path": "/shared"},
        {"host": "/lustre", "path": "/data", "read_only": True},
    ],
    "gpus_per_node": 8,
    "resources": {"cpu": 64, "memory": "512Gi", "rdma/ib": 8},
    "node_selector": {"nvidia.com/gpu.product": "H100"},
    "tolerations": ["nvidia.com/gpu"],
    "service_account": "trials",
    "pull_secret": "registry",
    "user": 1000,
    "minutes": 30,
}
SMALL = {"volumes": [{"claim": "shared", "path": "/shared"}]}
# More of what a template, a shell or a parser would read.
CORPUS = (
    *HOSTILE,
    "nul\0",
    "{{ .Values.x }}",
    "${IFS}x",
    "a: b",
    "&anchor",
    "!!python/object:x",
    "../x",
    "\u202e",
)
FIELDS = ("namespace", "context", "image", "runtime", "queue", "service_account", "pull_secret")


def site_of(kind: str, content: dict[str, Any]) -> Site:
    """The section as a site."""
    return parse_site({"kubernetes": {**content, "kind": kind}}, where="s")


def made(site: Site, *, stdout: str = "/shared/run/trials/1/out", num_nodes: int = 3) -> dict[str, Any]:
    """The object of an attempt, through the form in which it is sent."""
    content = job_object(site, attempt_id="0a" * 16, stdout=Path(stdout), num_nodes=num_nodes)
    sent: dict[str, Any] = json.loads(json.dumps(content))
    return sent


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
@pytest.mark.parametrize("num_nodes", [1, 3])
def test_the_published_models_accept_it(kind: str, num_nodes: int) -> None:
    assert faults(made(site_of(kind, FULL), num_nodes=num_nodes)) == []
    assert faults(made(site_of(kind, {**SMALL, "image": "i"}), num_nodes=num_nodes)) == []


def test_the_models_refuse_what_they_do_not_know() -> None:
    content = made(site_of("trainjob", FULL))
    content["spec"]["trainer"]["numNode"] = 3
    assert faults(content) == [".spec.trainer.numNode: unknown"]
    content = made(site_of("pytorchjob", FULL))
    content["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["volumes"][0]["emptyDir"] = 3
    assert faults(content)


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
def test_what_a_site_asks_is_in_every_pod(kind: str) -> None:
    content = made(site_of(kind, FULL))
    assert content["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    for pod in pods_of(content):
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/dev/shm", "/shared", "/data"]
        assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "H100"}
        assert spec["securityContext"] == {"runAsUser": 1000}
        assert pod["metadata"]["labels"] == {"quartet-plugin/attempt": "0a" * 16}


@pytest.mark.parametrize("value", CORPUS, ids=range(len(CORPUS)))
def test_hostile_values_of_a_site_are_refused_or_stay_themselves(value: str) -> None:
    hostile: list[dict[str, Any]] = [{field: value} for field in FIELDS]
    hostile += [
        {"volumes": [{"claim": value, "path": "/x"}]},
        {"volumes": [{"claim": "c", "path": f"/{value}"}]},
        {"volumes": [{"host": f"/{value}", "path": "/x"}]},
        {"resources": {value: 1}},
        {"resources": {"cpu": value}},
        {"node_selector": {value: "x"}},
        {"node_selector": {"x": value}},
        {"tolerations": [value]},
    ]
    for change in hostile:
        try:
            site = site_of("trainjob", {**FULL, **change})
        except ConfigError:
            continue
        # An empty label, or a name that only looks odd.
        assert faults(made(site)) == []


@pytest.mark.parametrize("value", [v for v in CORPUS if v and "\0" not in v], ids=repr)
@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
def test_a_hostile_path_is_one_word_that_nothing_expands(kind: str, value: str) -> None:
    content = made(site_of(kind, {**FULL, "image": "i"}), stdout=f"/shared/{value}/$(HOME)/$$x/out")
    for pod in pods_of(content):
        (container,) = pod["spec"]["containers"]
        words = [expanded(word, {"HOME": "/root", "x": "y"}) for word in container["command"]]
        assert words[1:] == [
            "-m",
            "quartet_plugin.launchers.shared_node",
            f"/shared/{value}/$(HOME)/$$x/nodes/request.json",
        ]


def test_a_folder_that_is_not_mounted_is_refused(tmp_path: Path) -> None:
    launcher = kubernetes.KubernetesLauncher(1, site_of("trainjob", FULL))
    with pytest.raises(
        ConfigError, match=r"is not mounted in the pods: kubernetes.volumes names no volume there"
    ):
        launcher.words(["x"], attempt_id="a", cwd=Path("/shared"), stdout=tmp_path / "out")
    with pytest.raises(ConfigError, match="that they may write to"):
        launcher.words(["x"], attempt_id="a", cwd=Path("/shared"), stdout=Path("/data/out"))
    with pytest.raises(ConfigError, match=f"{tmp_path} is not mounted"):
        launcher.words(["x"], attempt_id="a", cwd=tmp_path, stdout=Path("/shared/out"))


def test_without_a_section_it_says_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"write kubernetes: \{volumes: \[...\]\} into a site.yaml"):
        kubernetes.engine(Site()).divide(num_nodes=1, at_once=1)


def test_a_dry_run_shows_the_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "site.yaml"
    volumes = [{"claim": "shared", "path": str(Path.cwd())}, {"claim": "runs", "path": str(tmp_path)}]
    site.write_text(json.dumps({"kubernetes": {"volumes": volumes}}))
    options, command = prepare(tmp_path)
    more = ["--launcher", "kubernetes", "--site", str(site), "--trial-nodes", "2", "--dry-run"]
    assert main([*options, *more, "--", *command]) == 0
    lines = capsys.readouterr().out.splitlines()
    (place,) = [index for index, line in enumerate(lines) if line.startswith("launcher ")]
    assert shlex.split(lines[place])[1:5] == ["kubectl", "create", "--namespace=default", "--filename=-"]
    indented = itertools.takewhile(lambda line: line.startswith(" " * 10), lines[place + 1 :])
    content = yaml.safe_load("\n".join(indented))
    content["metadata"]["name"] = "quartet-0"
    assert (content["kind"], content["spec"]["trainer"]["numNodes"]) == ("TrainJob", 2)
    assert faults(content) == []
