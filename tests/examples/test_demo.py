"""The demo: its search's configuration, the options of its commands, and nightly the whole of it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from quartet_plugin.tuner.config import parse_config
from tests.megatron.support import own_environment
from tests.test_documents import ROOT, options_by_command

DEMOS = ("demo", "demo_deepspeed")


def script_of(demo: str) -> str:
    """The script of a demo, its continued lines joined."""
    text = (ROOT / "examples" / demo / "run.sh").read_text(encoding="utf-8")
    return text.replace("\\\n", " ")


@pytest.mark.parametrize("demo", DEMOS)
def test_the_configuration_is_read(demo: str) -> None:
    path = ROOT / "examples" / demo / "q.yaml"
    config = parse_config(yaml.safe_load(path.read_text(encoding="utf-8")), where=path.name)
    assert config.study.trials >= 10


@pytest.mark.parametrize("demo", DEMOS)
def test_the_commands_have_their_options(demo: str) -> None:
    known = options_by_command()
    commands = re.findall(r"^ *quartet (\w+)([^\n]*?)(?: -- |$)", script_of(demo), re.MULTILINE)
    assert {name for name, _ in commands} >= {"tune", "train"}
    for name, words in commands:
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", words)) <= known[name], name


def test_the_tutorial_shows_the_commands_words() -> None:
    shown = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"== 2\. quartet tune -- (.*) \.\.\.", shown)
    (command,) = re.findall(r"command=\((.*?)\)", script_of("demo"), re.DOTALL)
    assert " ".join(command.split()).startswith(line)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_demo_runs_to_its_end(tmp_path: Path) -> None:
    """In a copy, with three trials in five minutes: the training ends with a validation loss."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    done = subprocess.run(
        ["bash", "examples/demo/run.sh", sys.executable],
        cwd=tmp_path,
        env={**own_environment(), "DEMO_OPTIONS": "--trials 3 --max-minutes 5", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = done.stdout + done.stderr
    assert re.search(r"trial 0: your command: .* s/iteration", said)
    assert list((tmp_path / "runs" / "demo" / "trials").glob("00000[1-3]"))
    assert "decided after" in said or "no better plan was found" in said
    assert re.search(r"validation loss at iteration 40 .* lm loss value: [0-9.E+-]+", said)
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
