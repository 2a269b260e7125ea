"""The files of launch/, which users copy: read by what they are for."""

import shutil
import subprocess
from pathlib import Path

import pytest

from quartet_plugin.launchers.site import read_site

LAUNCH = Path(__file__).parents[2] / "launch"
SCRIPTS = sorted(path for engine in ("slurm", "ray") for path in LAUNCH.glob(f"{engine}/*"))
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


def test_the_site_is_read() -> None:
    site = read_site(LAUNCH / "site.yaml")
    assert "--gpus-per-node=8" in site.slurm.of_job()
    assert "--time=30" in site.slurm.of_job()
