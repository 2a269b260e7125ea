"""`quartet tune -- bash train.sh`: a script of the kind of Megatron-LM's examples, tuned unedited."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.plan import read_plan
from quartet_plugin.trial.request import Outcome, TrialRequest
from quartet_plugin.trial.runner import run_trial
from tests.cli.tuning import living, wait_until
from tests.megatron.support import PRETRAIN_SCRIPT, dataset
from tests.ports import free_port
from tests.rank.hooked import HOOK, environment
from tests.short_rounds import SHORT_ENTRY

SCRIPT = Path(__file__).parent / "scripts" / "train_gpt.sh"
CONFIG = """\
run: script
search: {tensor_parallel: 1, pipeline_parallel: 2, virtual_stages: 1, micro_batch_size: 1, schedule: 1f1b}
trial: {warmup: 1, measure: 3, deadline_s: 300}
study: {trials: 2, top_k: 1, rounds: 3}
device: cpu
"""


@pytest.fixture
def surroundings(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine where the plugin is installed, and torchrun is the one beside Python."""
    site = tmp_path / "site"
    site.mkdir()
    (site / HOOK.name).write_text(HOOK.read_text())
    return environment(site, MASTER_PORT=str(free_port()), PYTHONUNBUFFERED="1")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """The script with its arguments; the folder of its logs has a name that a careless shell would run."""
    logs = tmp_path / "my $(touch hostile) logs"
    data = dataset(tmp_path, max_mb=2.0)
    return ["bash", str(SCRIPT), str(tmp_path / "checkpoints"), str(logs), str(data), str(PRETRAIN_SCRIPT)]


def tune_argv(folder: Path, words: list[str]) -> list[str]:
    (folder / "q.yaml").write_text(CONFIG)
    options = ["tune", "--config", str(folder / "q.yaml"), "--run-dir", str(folder / "runs")]
    return [sys.executable, "-c", SHORT_ENTRY, *options, "--", *words]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_bash_script_is_tuned_unedited(
    tmp_path: Path, words: list[str], surroundings: dict[str, str]
) -> None:
    before = SCRIPT.read_bytes()
    done = subprocess.run(
        tune_argv(tmp_path, words),
        env=surroundings,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"found -u {PRETRAIN_SCRIPT}: Megatron, 2 processes, ranks from RANK" in done.stdout
    run = tmp_path / "runs" / "script"
    plan = run / "trials" / "000001" / "attempt-1" / "plan.json"
    assert read_plan(plan).layout.pipeline_parallel == 2
    assert SCRIPT.read_bytes() == before
    # Trials leave no checkpoints, names run nothing, and no process is left.
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "hostile").exists()
    assert living(tmp_path) == []
    trained = subprocess.run(
        [sys.executable, "-c", SHORT_ENTRY, "train", "--plan", str(plan), "--device", "cpu", "--", *words],
        env={**surroundings, "TRAIN_ITERS": "4"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert trained.returncode == 0, trained.stdout[-2000:] + trained.stderr[-2000:]
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert not (tmp_path / "hostile").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_script_that_is_ended_in_a_trial_leaves_no_process(
    tmp_path: Path, words: list[str], surroundings: dict[str, str]
) -> None:
    log = tmp_path / "log"
    with log.open("w") as output:
        tuner = subprocess.Popen(
            tune_argv(tmp_path, words), env=surroundings, cwd=tmp_path, stdout=output, stderr=output
        )
        try:
            wait_until(lambda: "found -u" in log.read_text(), what="the training", timeout_s=240)
            wait_until(lambda: len(living(tmp_path)) > 3, what="its processes")
            tuner.send_signal(signal.SIGTERM)
            assert tuner.wait(60) != 0
        finally:
            tuner.kill()
    assert living(tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_training_in_the_background_is_followed_to_its_end(
    tmp_path: Path, words: list[str], surroundings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in surroundings.items():
        monkeypatch.setenv(name, value)
    result = run_trial(
        TrialRequest(
            folder=tmp_path / "trial",
            command=parse_command(["bash", "-c", 'bash "$@" & echo gone', "bash", *words[1:]]),
            warmup=1,
            measure=2,
            deadline_s=400,
            device="cpu",
            cwd=tmp_path,
            max_spread=10.0,
        )
    )
    assert result.outcome is Outcome.OK, result.reason
    assert len(result.iteration_s) == 2
    assert living(tmp_path) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("echo nothing here", "no Python process with quartet-plugin was started"),
        ('"$0" helper.py; echo done', r"\(helper.py\) imports megatron.training"),
    ],
)
def test_a_command_that_trains_nothing_is_refused_with_what_was_seen(
    tmp_path: Path,
    surroundings: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    said: str,
) -> None:
    (tmp_path / "helper.py").write_text("print('helped')\n")
    for name, value in surroundings.items():
        monkeypatch.setenv(name, value)
    request = TrialRequest(
        folder=tmp_path / "trial",
        command=parse_command(["bash", "-c", line, sys.executable]),
        device="cpu",
        cwd=tmp_path,
    )
    with pytest.raises(ConfigError, match=said):
        run_trial(request)
    assert os.listdir(tmp_path / "trial") == ["attempt-1"]  # noqa: PTH208
