"""The files of launch/, which users copy: read by what they are for."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from quartet_plugin.launchers.site import parse_site, read_site
from tests.launchers.kubernetes_models import faults, pods_of

LAUNCH = Path(__file__).parents[2] / "launch"
SCRIPTS = sorted(path for engine in ("slurm", "ray") for path in LAUNCH.glob(f"{engine}/*"))
JOBS = sorted(LAUNCH.glob("kubernetes/t*job.yaml"))
OBJECTS = [*JOBS, LAUNCH / "kubernetes" / "access.yaml"]
BEGIN, END = "# ---- edit", "# ---- end of what is to be edited"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_and_shellcheck_accept_it(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck") is None:
        pytest.fail("shellcheck is not installed: bash tools/system_packages.sh")
    found = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_what_is_to_be_edited_stands_in_one_place(script: Path) -> None:
    text = script.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert text.index(BEGIN) < text.index(END)


@pytest.mark.parametrize("file", OBJECTS, ids=lambda path: path.name)
def test_objects_of_kubernetes_are_valid(file: Path) -> None:
    contents = list(yaml.safe_load_all(file.read_text()))
    assert contents
    for content in contents:
        assert faults(content) == []


@pytest.mark.parametrize("file", JOBS, ids=lambda path: path.name)
def test_scripts_of_pods_are_accepted_too(file: Path, tmp_path: Path) -> None:
    (content,) = yaml.safe_load_all(file.read_text())
    for pod in pods_of(content):
        (container,) = pod["spec"]["containers"]
        assert container["command"] == ["bash", "-c"]
        (text,) = container["args"]
        # Kubernetes would replace it.
        assert "$(" not in text
        assert "$$" not in text
        script = tmp_path / "script.sh"
        script.write_text(f"#!/bin/bash\n{text}")
        found = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("file", [*OBJECTS, LAUNCH / "kubernetes" / "site.yaml"], ids=lambda path: path.name)
def test_objects_have_one_place_to_edit(file: Path) -> None:
    text = file.read_text()
    if file.name == "site.yaml":
        site = read_site(file)
        assert site.kubernetes is not None
        assert site.kubernetes.mounts(Path("/shared/my-model/runs"))
    else:
        assert text.count(BEGIN) == text.count(END) == 1


def test_the_site_is_read() -> None:
    site = read_site(LAUNCH / "site.yaml")
    assert "--gpus-per-node=8" in site.slurm.of_job()
    assert "--time=30" in site.slurm.of_job()


def test_the_site_shows_every_key() -> None:
    """What is commented out is read, too."""
    text = (LAUNCH / "site.yaml").read_text()
    lines = [re.sub(r"^( *)# ", r"\1", line) for line in text.splitlines()[2:]]
    site = parse_site(yaml.safe_load("\n".join(lines)), where="site.yaml")
    assert site.kubernetes is not None
    assert site.ssh is not None
    sections = (site, site.slurm, site.ssh, site.nemo_run, site.ray, site.kubernetes)
    missing = {type(part).__name__: set(type(part).model_fields) - part.model_fields_set for part in sections}
    assert not any(missing.values()), missing
