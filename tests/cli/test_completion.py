"""Completion of the command line by shells."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

QUARTET = Path(sys.executable).with_name("quartet")


def run(*arguments: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a shell starts it, without asking which shell that is."""
    known = {"HOME": str(home), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", **environment}
    return subprocess.run(
        [str(QUARTET), *arguments],
        env={**os.environ, **known},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "index", "expected"),
    [
        ("quartet pl", "1", {"plan"}),
        ("quartet ex", "1", {"explain", "export"}),
        ("quartet plan --fron", "2", {"--frontier"}),
        ("quartet schedule na", "2", {"named"}),
    ],
)
def test_commands_and_options_are_completed(
    words: str, index: str, expected: set[str], tmp_path: Path
) -> None:
    done = run(home=tmp_path, _QUARTET_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=index)
    assert set(done.stdout.split()) == expected
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shells_script_is_shown_and_installed(shell: str, tmp_path: Path) -> None:
    shown = run("--show-completion", shell, home=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "_QUARTET_COMPLETE=complete" in shown.stdout
    done = run("--install-completion", shell, home=tmp_path)
    assert done.returncode == 0
    written = [path.read_text(encoding="utf-8") for path in tmp_path.rglob("*") if path.is_file()]
    assert any("_QUARTET_COMPLETE" in text for text in written)


def test_an_unknown_shell_is_refused(tmp_path: Path) -> None:
    done = run("--show-completion", "tcl", home=tmp_path)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
