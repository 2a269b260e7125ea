"""Megatron-LM clones of any release: a tree with scripts of our own writing beside it, changed or not."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quartet_plugin.megatron.seams import installed_version, package_roots
from tests.megatron.entry_launch import MEGATRON_FLAGS
from tests.megatron.support import REPOSITORY, rank_environment

SCRIPTS = Path(__file__).with_name("clone")
INSTALLED = installed_version().partition("+")[0]
_SCHEDULES = "megatron/core/pipeline_parallel/schedules.py"
_TRACED = """

def _traced(function):
    import functools

    @functools.wraps(function)
    def traced(*args, **kwargs):
        return function(*args, **kwargs)

    return traced

"""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A tree: a release, as it is or changed; `state` is what the matrix expects of custom schedules."""

    release: str
    change: Callable[[Path], None] | None = None
    state: str = "works"


def _as_next_release(root: Path) -> None:
    """The version says 0.20.0, and the pipeline's functions carry a decorator of the tree's own."""
    info = root / "megatron" / "core" / "package_info.py"
    text = re.sub(r"^MINOR = .*$", "MINOR = 20", info.read_text(), flags=re.MULTILINE)
    info.write_text(re.sub(r"^PATCH = .*$", "PATCH = 0", text, flags=re.MULTILINE))
    schedules = root / _SCHEDULES
    text = schedules.read_text()
    first = re.search(r"^def ", text, flags=re.MULTILINE)
    assert first is not None
    text = text[: first.start()] + _TRACED + text[first.start() :]
    names = r"^def (forward_backward_pipelining_with\w+|forward_step|backward_step)\("
    text, count = re.subn(names, r"@_traced\ndef \1(", text, flags=re.MULTILINE)
    assert count == 4
    schedules.write_text(text)


def _with_a_changed_line(root: Path) -> None:
    """`backward_step` has one line more, which changes nothing."""
    schedules = root / _SCHEDULES
    text, count = re.subn(
        r"^(def backward_step\(.*\):\n)",
        r"\1    _ = len('changed')\n",
        schedules.read_text(),
        flags=re.MULTILINE,
    )
    assert count == 1
    schedules.write_text(text)


def _without_train_step(root: Path) -> None:
    """`train_step` has another name, so that only the log tells times."""
    training = root / "megatron" / "training" / "training.py"
    text, count = re.subn(r"\btrain_step\(", "train_one_step(", training.read_text())
    assert count >= 2
    training.write_text(text)


VARIANTS: Mapping[str, Variant] = {
    "0.17.1": Variant(release="0.17.1", state="kept"),
    "0.18.2": Variant(release="0.18.2"),
    "0.19.0": Variant(release="0.19.0"),
    INSTALLED: Variant(release=INSTALLED),
    f"{INSTALLED} as 0.20.0, decorated": Variant(release=INSTALLED, change=_as_next_release),
    f"{INSTALLED} with a changed line": Variant(release=INSTALLED, change=_with_a_changed_line, state="kept"),
    f"{INSTALLED} without train_step": Variant(release=INSTALLED, change=_without_train_step, state="kept"),
}


def make_clone(folder: Path, variant: Variant) -> Path:
    """The tree of a variant with the scripts beside it, in `folder`, which must be new."""
    source = next(path for path in package_roots() if (path / "megatron" / "core").is_dir())
    if variant.release != INSTALLED:
        source = REPOSITORY / ".venv" / "releases" / f"megatron-core-{variant.release}"
    shutil.copytree(source / "megatron", folder / "megatron", ignore=shutil.ignore_patterns("*.pyc"))
    for script in SCRIPTS.glob("*.py"):
        shutil.copy(script, folder)
    if variant.change is not None:
        variant.change(folder)
    return folder


def run_there(clone: Path, *words: str, timeout_s: float = 900.0) -> "subprocess.CompletedProcess[str]":
    """Run a command in the clone's folder, as a user would who is in it."""
    environment = {**rank_environment(), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        words, cwd=clone, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def training_command(*flags: str, num_processes: int = 2) -> Sequence[str]:
    """The user's command in a clone."""
    return ("torchrun", "--nproc-per-node", str(num_processes), "pretrain_gpt.py", *MEGATRON_FLAGS, *flags)
