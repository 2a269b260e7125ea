"""The Makefile, and tools/system_packages.sh with commands that only write down how they were called."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tools" / "system_packages.sh"
ALL = "g++ postgresql slurm-wlm munge openssh-server openmpi-bin shellcheck chromium fonts-dejavu-core"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A folder that stands for / and holds the only programs on the PATH."""

    root: Path

    def add(self, name: str, body: str) -> None:
        """A program whose every call is written down."""
        path = self.root / "bin" / name
        path.write_text(f'#!{shutil.which("bash")}\necho "{name} $*" >>"$SYSTEM_ROOT/calls"\n{body}\n')
        path.chmod(0o755)

    def run(self, *argv: str) -> "subprocess.CompletedProcess[str]":
        """The script, or a command that calls it."""
        environment = {"PATH": str(self.root / "bin"), "SYSTEM_ROOT": str(self.root)}
        return subprocess.run(
            argv or ["bash", str(SCRIPT)],
            executable=shutil.which(argv[0] if argv else "bash"),
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def calls(self) -> list[str]:
        """The calls so far, those of `id` left out."""
        path = self.root / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if not line.startswith("id ")]


def machine(root: Path, *, user: int, present: tuple[str, ...] = ("make",), apt_code: int = 0) -> Machine:
    """One with apt-get, for a user of that number."""
    (root / "bin").mkdir()
    made = Machine(root=root)
    for name in ("env", "mkdir", "tee", "bash"):
        program = shutil.which(name)
        assert program is not None
        (root / "bin" / name).symlink_to(program)
    made.add("id", f"echo {user}")
    made.add("apt-get", f'[ "$1" = install ] && exit {apt_code}; exit 0')
    for name in present:
        made.add(name, "exit 0")
    return made


def test_nothing_is_done_where_nothing_is_missing(tmp_path: Path) -> None:
    whole = machine(
        tmp_path,
        user=1000,
        present=("make", "g++", "initdb", "slurmctld", "sshd", "mpirun", "shellcheck", "google-chrome"),
    )
    done = whole.run()
    assert (done.returncode, done.stdout, done.stderr, whole.calls) == (0, "", "", [])


def test_root_installs_what_is_missing(tmp_path: Path) -> None:
    fresh = machine(tmp_path, user=0)
    assert fresh.run().returncode == 0
    assert fresh.calls == [
        "apt-get update -qq",
        f"apt-get install -y -qq --no-install-recommends {ALL}",
    ]
    conf = tmp_path / "etc" / "postgresql-common" / "createcluster.conf"
    assert conf.read_text() == "create_main_cluster = false\n"


def test_a_user_with_passwordless_sudo_installs_by_it(tmp_path: Path) -> None:
    fresh = machine(tmp_path, user=1000, present=("make", "g++", "initdb"))
    fresh.add("sudo", 'shift; [ "$1" = true ] || "$@"')
    assert fresh.run().returncode == 0
    assert fresh.calls[-2:] == [
        "sudo -n env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "
        "slurm-wlm munge openssh-server openmpi-bin shellcheck chromium fonts-dejavu-core",
        "apt-get install -y -qq --no-install-recommends "
        "slurm-wlm munge openssh-server openmpi-bin shellcheck chromium fonts-dejavu-core",
    ]
    assert not (tmp_path / "etc").exists()  # PostgreSQL was there


@pytest.mark.parametrize("has_sudo", [True, False])
def test_another_user_is_told_the_one_command(tmp_path: Path, has_sudo: bool) -> None:
    fresh = machine(tmp_path, user=1000)
    if has_sudo:
        fresh.add("sudo", "exit 1")  # it would ask for a password
    done = fresh.run()
    assert done.returncode == 5
    assert f"run `sudo apt-get install --no-install-recommends {ALL}`, then make test again" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not any(call.startswith("apt-get") for call in fresh.calls)


def test_what_apt_cannot_install_is_named(tmp_path: Path) -> None:
    done = machine(tmp_path, user=0, apt_code=100).run()
    assert done.returncode == 5
    assert f"the tests need {ALL}: apt-get could not install them" in done.stderr


def test_a_system_without_apt_is_told_what_is_missing(tmp_path: Path) -> None:
    other = machine(tmp_path, user=0)
    (tmp_path / "bin" / "apt-get").unlink()
    done = other.run()
    assert done.returncode == 5
    assert f"the tests need {ALL}: install them by this system's package manager" in done.stderr


@pytest.mark.parametrize(("target", "installs"), [("test", True), ("test-slow", True), ("demo", False)])
def test_tests_install_and_the_demo_does_not(target: str, installs: bool) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ("tools/system_packages.sh" in done.stdout) is installs


def test_make_lets_processes_keep_the_modules_that_they_compile() -> None:
    """Where PYTHONDONTWRITEBYTECODE is set, every process of a test would compile all of them again."""
    done = subprocess.run(
        ["make", "--no-print-directory", "--eval", 'shown: ; @echo "[$$PYTHONDONTWRITEBYTECODE]"', "shown"],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "[]\n"
