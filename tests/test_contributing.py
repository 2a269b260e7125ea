"""The pages of docs/contributing/: each addition is made in a copy of the package, and its check is run.

A page says what to write in sentences that `steps_of` reads: "Write `FILE`:", "In `FILE`, before `LINE`,
add:", "In `FILE`, in place of `LINE`, write:" and "Check:", each followed by a block of code.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("device", "framework", "knob", "launcher", "release", "schedule")
LIMIT_S = 120
_STEP = re.compile(
    r"(?P<words>Write|In|Check)(?P<rest>[^\n]*(?:\n(?!\n)[^\n]+)*):\n\n```\w+\n(?P<code>.*?)```", re.DOTALL
)


def steps_of(page: str) -> list[tuple[str, list[str], str]]:
    """The steps of a page: its first word and "before" or "in place of", the names in it, and the code."""
    text = (ROOT / "docs" / "contributing" / f"{page}.md").read_text(encoding="utf-8")
    found = []
    for match in _STEP.finditer(text):
        rest = " ".join(match["rest"].split())
        kind = next((word for word in ("before", "in place of") if f", {word} `" in rest), match["words"])
        found.append((kind, re.findall(r"`([^`]+)`", rest), match["code"]))
    return found


def carry_out(page: str, folder: Path) -> str:
    """Make the addition of a page in `folder`; the check."""
    check = ""
    for kind, names, code in steps_of(page):
        if kind == "Check":
            check = code
            continue
        path = folder / names[0]
        if kind == "Write":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code, encoding="utf-8")
            continue
        text = path.read_text(encoding="utf-8")
        (line,) = [known for known in text.splitlines() if known.strip() == names[1]]
        gap = "\n\n" if code.startswith(("def ", "EXAMPLE ")) else ""
        put = f"{code}{gap}{line}\n" if kind == "before" else code
        path.write_text(text.replace(f"{line}\n", put), encoding="utf-8")
    assert check, f"{page}: has no check"
    return check


def tree_of_megatron() -> str:
    """The folder that has the installed `megatron/`."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parents[2])


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what an addition touches."""
    kept = shutil.ignore_patterns("__pycache__")
    for name in ("quartet_plugin", "tools", "patches"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=kept)
    return tmp_path


# Kernels are not compiled: a copy has no cache of them.
@pytest.mark.parametrize("page", PAGES)
def test_the_steps_of_a_page_work(page: str, copy: Path) -> None:
    check = carry_out(page, copy).replace('"TREE"', repr(tree_of_megatron()))
    done = subprocess.run(
        [sys.executable, "-c", check],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "200", "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_every_addition_has_a_page() -> None:
    folder = ROOT / "docs" / "contributing"
    assert sorted(path.stem for path in folder.glob("*.md")) == sorted((*PAGES, "index"))
