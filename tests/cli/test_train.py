"""`quartet train`: the user's command with a plan, its output, signals and exit code."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.cli import train_nodes
from quartet_plugin.cli.main import main
from quartet_plugin.cli.train import first_error
from quartet_plugin.errors import InfrastructureError
from quartet_plugin.model.plan import Plan, write_plan
from quartet_plugin.protocol.environment import ACCEPT_CHANGED_SOURCE
from tests.cli.tuning import environment, wait_until
from tests.model.plans import PLAN

SCRIPT = """\
import sys, time
from pathlib import Path
print("began", sys.argv[1:], flush=True)
if "--wait" in sys.argv:
    Path(sys.argv[-1]).write_text("up")
    time.sleep(60)
sys.exit(int(sys.argv[1]))
"""


def script(folder: Path) -> str:
    path = folder / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def saved(folder: Path, plan: Plan = PLAN) -> str:
    path = folder / "plan.json"
    write_plan(plan, path=path)
    return str(path)


def test_the_output_and_a_good_end_are_the_commands(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--", sys.executable, script(tmp_path), "0", "two words"]) == 0
    assert "began ['0', 'two words']" in capfd.readouterr().out


def test_a_bad_end_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--", sys.executable, script(tmp_path), "7"]) == 5
    assert "the script ended with exit code 7" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 5), (signal.SIGHUP, 5), (signal.SIGINT, 130)])
def test_signals_reach_the_command(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Also SIGINT, where no terminal sends it to the command itself."""
    up = tmp_path / "up"
    words = [sys.executable, script(tmp_path), "--wait", str(up)]
    entry = "from quartet_plugin.cli.main import entry; entry()"
    process = subprocess.Popen(
        [sys.executable, "-c", entry, "train", "--", *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    wait_until(up.exists, what="the script")
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == code
    assert ("interrupted" if number == signal.SIGINT else number.name) in out.decode()


def test_a_plan_for_another_number_of_processes_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--plan", saved(tmp_path), "--", sys.executable, script(tmp_path), "0"]) == 2
    shown = capfd.readouterr()
    assert "made for 2 processes, the command starts 1" in shown.err
    assert "began" not in shown.out


def test_a_plan_for_another_version_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = replace(PLAN, made_for=replace(PLAN.made_for, framework_version="0.1.0"))
    command = ["torchrun", "--nproc-per-node", "2", script(tmp_path), "0"]
    assert main(["train", "--plan", saved(tmp_path, other), "--", *command]) == 2
    assert "0.1.0" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num-layers", "7"], "num_layers 7 (plan: 8)"),
        (["--num-layers=8", "--micro-batch-size=1"], "global_batch_size 2 (plan: 32)"),
    ],
)
def test_a_plan_for_other_flags_is_refused_before_a_process_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    command = ["torchrun", "--nproc-per-node", "2", script(tmp_path), "0", *flags]
    assert main(["train", "--plan", saved(tmp_path), "--", *command]) == 2
    assert words in capfd.readouterr().err


def test_a_damaged_plan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(saved(tmp_path))
    path.write_text(path.read_text().replace('"num_layers": 8', '"num_layers": 9', 1))
    assert main(["train", "--plan", str(path), "--", "torchrun", "x.py"]) == 2
    assert "digest" in capsys.readouterr().err


def test_an_unknown_device_and_a_missing_command_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--device", "tpu", "--", "python", "x.py"]) == 2
    assert main(["train"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 2


@pytest.mark.parametrize("nodes", ["0", "-1", "10001"])
def test_a_training_has_nodes(capsys: pytest.CaptureFixture[str], nodes: str) -> None:
    words = ["train", "--launcher", "slurm", "--nodes", nodes, "--", "torchrun", "x.py"]
    assert main(words) == 2
    assert f"--nodes {nodes}: must be from 1 to 10000" in capsys.readouterr().err


@pytest.mark.parametrize("is_option", [True, False])
def test_a_changed_source_is_not_accepted_without_the_parity_gate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_option: bool
) -> None:
    """Neither by the option nor by the variable, which a run's command.sh sets."""
    monkeypatch.setenv(ACCEPT_CHANGED_SOURCE, "" if is_option else "a.f@0123456789abcdef")
    options = ["--accept-changed-source"] if is_option else []
    assert main(["train", *options, "--skip-parity-check", "--", sys.executable, "missing.py"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("omit --skip-parity-check")


def test_the_ranks_own_error_gives_the_exit_code(tmp_path: Path) -> None:
    def write(rank: int, **content: object) -> None:
        failure = {
            "type": "X",
            "peak_memory_bytes": 0,
            "wanted_bytes": 0,
            "traceback": [],
            "launch_rank": rank,
        }
        (tmp_path / f"rank-{rank}.err.json").write_text(json.dumps({**failure, **content}))

    assert first_error(tmp_path) is None
    write(0, kind="network", time=1.0, exit_code=1, message="Connection closed by peer")
    write(1, kind="plan", time=2.0, exit_code=2, message="the plan was made\nfor another job")
    write(2, kind="plan", time="never", exit_code=2, message="torn")
    error = first_error(tmp_path)
    assert error is not None
    assert str(error) == "the plan was made for another job"
    assert error.exit_code == 2
    write(1, kind="refused", time=2.0, exit_code=2, type="SystemExit", message="unrecognized arguments: --x")
    error = first_error(tmp_path)
    assert error is not None
    assert str(error) == "your command failed: SystemExit: unrecognized arguments: --x"
    assert error.exit_code == 5


def test_a_refusal_by_the_ranks_keeps_its_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = replace(PLAN, made_for=replace(PLAN.made_for, framework="another-framework"))
    command = ["torchrun", "--nproc-per-node", "2", script(tmp_path), "0"]
    assert main(["train", "--plan", saved(tmp_path, plan), "--device", "cpu", "--", *command]) == 2
    shown = capfd.readouterr()
    assert shown.err.splitlines()[-1].startswith("quartet: ")
    assert "began" not in shown.out


class Training:
    """A training on nodes whose engine answers `answers` in turn; what was done to it is in `calls`."""

    pid = 0
    is_pending = False
    fault = None
    num_nodes = 1
    engine = "queue"

    def __init__(self, *answers: int | BaseException | None) -> None:
        self.answers, self.calls = list(answers), list[str]()

    def start(self, argv: Sequence[str], **more: object) -> "Training":
        """It is its own handle."""
        return self

    def words(self, argv: Sequence[str], **more: object) -> list[str]:
        """See `NodesLauncher`."""
        return list(argv)

    def poll(self) -> int | None:
        """The next answer."""
        self.calls.append("poll")
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            return answer
        if answer is not None:
            raise answer
        signal.raise_signal(signal.SIGINT)
        return None

    def terminate(self) -> None:
        """What the first Ctrl-C does."""
        self.calls.append("terminate")

    def kill(self) -> None:
        """Never called."""
        self.calls.append("kill")

    def end_on_nodes(self) -> tuple[str, ...]:
        """What ends it on every node."""
        self.calls.append("end")
        return ()


def test_an_engine_that_cannot_say_does_not_end_a_training_on_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_nodes, "_AGAIN_S", 0.0)
    away = InfrastructureError("squeue: no answer")
    training = Training(away, away, 0)
    assert train_nodes._follow(training, ["true"], token="ab" * 16) == 0
    assert training.calls == ["poll", "poll", "poll", "end"]
    assert capsys.readouterr().err.count("squeue: no answer; the training continues") == 1


def test_a_closed_pipe_ends_a_training_on_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `quartet train ... | head`: what was started on the nodes does not outlive the command."""

    def show(_: object) -> None:
        raise BrokenPipeError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_nodes._Following, "show", show)
    training = Training()
    with pytest.raises(BrokenPipeError):
        train_nodes._follow(training, ["true"], token="ab" * 16)
    assert training.calls == ["end"]


def test_the_second_ctrl_c_ends_a_training_on_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    training = Training(None, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        train_nodes._follow(training, ["true"], token="ab" * 16)
    assert training.calls == ["poll", "terminate", "poll", "end"]
