"""`quartet tune` from the command line: refusals in one line, a whole run, Ctrl-C and kill -9."""

import json
import os
import pty
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli import tune as tune_command
from quartet_plugin.cli.main import main
from quartet_plugin.cli.tune_summary import summary_lines
from quartet_plugin.errors import ExitCode, SeamError
from quartet_plugin.model.plan import Plan
from quartet_plugin.report.plan_difference import difference_lines
from quartet_plugin.trial.request import Outcome
from quartet_plugin.tuner.tune_result import write_best
from quartet_plugin.tuner.winner_choice import rule_of
from tests.cli.tuning import CONFIG, environment, living, prepare, wait_until
from tests.short_searches import short_searches as short_searches
from tests.tuner.fakes import FakeMachine
from tests.tuner.fakes import begin_with_journal as begin
from tests.tuner.fakes import tune as search

ENTRY = "from quartet_plugin.cli.main import entry; entry()"


def tune(folder: Path, *more: str, fake: list[str] | None = None, config: str = CONFIG) -> int:
    options, command = prepare(folder, config=config)
    return main([*options, *more, "--", *command, *(fake or [])])


def start(
    folder: Path, *more: str, fake: list[str], config: str = CONFIG, **options: Any
) -> "subprocess.Popen[bytes]":
    words, command = prepare(folder, config=config)
    argv = [sys.executable, "-c", ENTRY, *words, *more, "--", *command, *fake]
    return subprocess.Popen(argv, env=environment(), **options)


def verdicts(folder: Path) -> list[str]:
    import optuna

    study = optuna.load_study(study_name="fake", storage=f"sqlite:///{folder / 'runs/fake/study.sqlite3'}")
    return [trial.user_attrs["told"]["verdict"] for trial in study.trials if trial.state.is_finished()]


def test_a_run_from_the_baseline_to_the_final_rounds(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert tune(tmp_path) == 0
    run = tmp_path / "runs" / "fake"
    printed = capfd.readouterr().out
    assert "trial 0: your command" in printed
    assert "tokens/s" in printed
    assert "faster than your command" in printed or "no better plan was found" in printed
    assert "verdict" not in printed
    assert verdicts(tmp_path).count("measured") >= 4
    for name in ("config.json", "cluster.json", "events.jsonl"):
        assert (run / name).is_file()
    assert json.loads((run / "cluster.json").read_text())["nodes"][0]["num_slots"] == 2
    assert not (run / "lock.json").exists()
    for number in range(4):
        attempt = run / "trials" / f"{number:06d}" / "attempt-1"
        assert json.loads((attempt / "result.json").read_text())["outcome"] in ("OK", "UNSTABLE")
        assert (attempt / "plan.json").exists() == (number > 0)
    assert living(tmp_path) == []


def test_a_script_that_fails_by_itself_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert tune(tmp_path, fake=["--mode", "nothing"]) == 5
    shown = capfd.readouterr()
    assert "SyntaxError: the script's own" in shown.out
    assert len(shown.err.strip().splitlines()) == 1
    assert "nothing was searched" in shown.err
    assert not (tmp_path / "runs/fake/study.sqlite3").exists()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["tune"], 2, "write it after --"),
        (["tune", "--"], 2, "training command"),
        (["tune", "torchrun", "--nproc-per-node", "2", "x.py"], 2, "after --"),
        (["tune", "--", sys.executable, "nowhere.py"], 2, "'nowhere.py': not found"),
        (["tune", "--", "./torchrun", "x.py"], 2, "'./torchrun': not found"),
        (["tune", "--", "ls", "-l"], 2, "no Python process with quartet-plugin was started"),
        (["tune", "--", "no-such-run", "train.py"], 2, "'no-such-run': not found"),
        (["tune", "--", "sbatch", "train.sh"], 2, "only queues a job"),
        (["tune", "--", "torchrun", "--nnodes", "2", "x.py"], 2, "on this node only"),
        (["tune", "--config", "nowhere.yaml", "--", "python", "x.py"], 2, "nowhere.yaml"),
        (["tune", "--resume", "--run-dir", "nowhere", "--", "python", "x.py"], 2, "no run to resume"),
        (["tune", "--max-minutes", "soon", "--", "python", "x.py"], 2, "max-minutes"),
        (["tune", "--max-minutes", "nan", "--", "python", "x.py"], 2, "max-minutes"),
        (
            ["tune", "--max-minutes", "0.05", "--", "python", "x.py"],
            2,
            "0.05: must be from 0.1 to 1e+06 minutes",
        ),
        (["check", "plan.json", "--deadline", "nan", "--", "python", "x.py"], 2, "--deadline nan"),
    ],
)
def test_refusals_are_one_line(
    words: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert says in lines[0]


def test_plans_that_could_not_be_measured_are_counted(tmp_path: Path) -> None:
    def outcome(plan: Plan) -> Outcome:
        return Outcome.OK if plan.split == plan.made_for.baseline.split else Outcome.INFEASIBLE

    run = begin(tmp_path / "r", search={"pipeline_parallel": 2}, study={"trials": 6})
    result = search(run, FakeMachine(outcome=outcome))
    failed = sum(trial.record.verdict == "infeasible" for trial in result.trials)
    assert failed
    line = summary_lines(replace(result, winner=None), plan=None, run=run)[0]
    assert f"({failed} could not be measured" in line
    assert "events.jsonl" in line


def test_the_closing_lines_say_how_the_winner_was_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(tmp_path / "r", study={"trials": 8})
    result = search(run, FakeMachine())
    plan = write_best(result, run=run)
    assert result.winner is not None
    assert plan is not None
    lines = summary_lines(result, plan=plan, run=run)
    chosen = [line for line in lines if line.startswith(("chosen ", "runner-up "))]
    assert lines[1 : 1 + len(difference_lines(plan))] == difference_lines(plan)
    assert chosen[0] == f"chosen    {rule_of([])}"
    assert chosen[1].startswith(f"runner-up trial {result.rankings[1].trial.number}")
    assert f"trial {result.winner.trial.number} is " in chosen[1]
    assert main(["show", str(run.folder.best_plan)]) == 0
    assert "\n".join(chosen) in capsys.readouterr().out


def test_an_unknown_key_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(tmp_path, config="study: {trails: 3}") == 2
    assert "trails" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_run_that_exists_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(tmp_path, fake=["--mode", "nothing"]) == 5
    assert tune(tmp_path) == 0  # nothing was measured yet, so it may be begun again
    assert tune(tmp_path) == 2
    assert "--resume" in capsys.readouterr().err
    assert tune(tmp_path, "--resume", fake=["--at", "2"]) == 2
    assert "another command" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_on_a_terminal_stops_cleanly_and_the_run_goes_on(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    go = tmp_path / "go"
    fake = ["--nominal", "--hold", str(go)]
    process = start(
        tmp_path,
        fake=fake,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=lambda: _controlling_terminal(theirs),
        start_new_session=True,
    )
    os.close(theirs)
    beat = tmp_path / "runs/fake/trials/000001/attempt-1/rank-0.beat.json"
    wait_until(lambda: beat.exists(), what="trial 1", timeout_s=240)
    os.write(ours, b"\x03")
    printed = _read_all(ours)
    assert process.wait(timeout=60) == 130
    assert "stopping after cleaning up" in printed
    assert "--resume continues" in printed
    assert living(tmp_path) == []
    assert verdicts(tmp_path) == ["measured"]
    go.touch()
    assert tune(tmp_path, "--resume", fake=fake) == 0
    assert verdicts(tmp_path).count("measured") >= 4


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        fake=["--mode", "stubborn", "--faulty-attempts", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    beat = tmp_path / "runs/fake/trials/000000/attempt-1/rank-0.beat.json"
    wait_until(lambda: beat.exists(), what="the baseline")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    for line in process.stdout:
        if b"press again" in line:
            process.send_signal(signal.SIGINT)
            break
    assert process.wait(timeout=60) == 130
    process.stdout.close()
    assert living(tmp_path) == []


@pytest.mark.slow
def test_a_killed_tuner_loses_nothing(tmp_path: Path) -> None:
    go = tmp_path / "go"
    fake = ["--nominal", "--hold", str(go), "--hold-from", "2"]
    process = start(tmp_path, fake=fake, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    beat = tmp_path / "runs/fake/trials/000002/attempt-1/rank-0.beat.json"
    wait_until(lambda: beat.exists(), what="trial 2", timeout_s=240)
    process.kill()
    process.wait(timeout=30)
    assert verdicts(tmp_path) == ["measured", "measured"]
    go.touch()
    assert tune(tmp_path, "--resume", fake=fake) == 0
    assert verdicts(tmp_path).count("measured") >= 4
    for number in (0, 1):
        assert not (tmp_path / f"runs/fake/trials/{number:06d}/attempt-2").exists()
    assert living(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGKILL])
def test_a_tuner_that_ends_in_a_parity_check_leaves_nothing(tmp_path: Path, number: int) -> None:
    """The fake training saves no weights and runs no schedule of ours, so that none of ours is tried then."""
    config = CONFIG.replace("schedule: 1f1b", "schedule: [1f1b, zb-h1]")
    assert config != CONFIG
    run, go = tmp_path / "runs" / "fake", tmp_path / "go"
    fake = ["--nominal", "--hold", str(go), "--hold-from", "1000000"]  # the parity check alone
    process = start(tmp_path, fake=fake, config=config, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    beat = run / "parity/stock/attempt-1/rank-0.beat.json"
    wait_until(lambda: beat.exists(), what="the parity check", timeout_s=240)
    process.send_signal(number)
    assert process.wait(timeout=60) == (130 if number == signal.SIGINT else -number)
    if number == signal.SIGINT:
        assert living(tmp_path) == []
        assert not (run / "parity" / "weights").exists()
    go.touch()
    assert tune(tmp_path, "--resume", fake=fake, config=config) == 0
    assert living(tmp_path) == []
    assert not (run / "parity" / "weights").exists()
    kinds = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert kinds.count("parity") >= 2
    assert kinds.count("quarantine") == 1
    assert not list(run.rglob("*.tmp"))


def _controlling_terminal(descriptor: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)


def _read_all(descriptor: int) -> str:
    pieces = []
    while True:
        try:
            piece = os.read(descriptor, 65536)
        except OSError:
            break
        if not piece:
            break
        pieces.append(piece)
    os.close(descriptor)
    return b"".join(pieces).decode(errors="replace")


DECLARED = ["optuna<6,>=5.0", "pydantic<3,>=2.9", 'torch>=2.11; extra == "megatron"', "rich>=13"]


def check_installed(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(tune_command, "requires", lambda name: DECLARED)
    monkeypatch.setattr(tune_command, "version", version)
    tune_command.check_versions()


@pytest.mark.parametrize(
    ("installed", "says"),
    [
        ({"optuna": "4.2.0"}, "optuna 4.2.0: not supported, must be <6,>=5.0"),
        ({"optuna": "6.0.0"}, "optuna 6.0.0"),
        ({"optuna": "5.1", "pydantic": "1.10.2"}, "pydantic 1.10.2"),
        ({"torch": "2.4.1"}, "torch 2.4.1: not supported, must be >=2.11"),
    ],
)
def test_a_library_out_of_range_is_named_with_the_range(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], says: str
) -> None:
    with pytest.raises(SeamError) as caught:
        check_installed(monkeypatch, **installed)
    assert says in str(caught.value)
    assert "pip install" in str(caught.value)
    assert caught.value.exit_code is ExitCode.UNSUPPORTED


@pytest.mark.parametrize(
    "installed",
    [{}, {"optuna": "5.0.0", "pydantic": "2.12"}, {"torch": "2.12.0a0+nv25.9"}, {"rich": "1.0"}],
)
def test_what_is_in_range_or_absent_is_taken(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]
) -> None:
    check_installed(monkeypatch, **installed)


def test_what_is_installed_here_is_in_range_and_declared() -> None:
    tune_command.check_versions()
    declared = " ".join(metadata.requires(tune_command.DISTRIBUTION) or [])
    for name in tune_command.CHECKED_LIBRARIES:
        assert name in declared


def test_tune_refuses_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(
        tune_command, "version", lambda name: "4.9" if name == "optuna" else metadata.version(name)
    )
    assert main(["tune", "--run-dir", str(tmp_path / "runs"), "--", "torchrun", "x.py"]) == 4
    assert "optuna 4.9: not supported" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_closing_lines_without_a_winner_name_the_nearest_trial(tmp_path: Path) -> None:
    run = begin(tmp_path / "r", study={"trials": 10})
    result = search(run, FakeMachine(seconds=lambda plan: 1.0, noise=0.2))
    assert result.winner is None
    lines = summary_lines(result, plan=None, run=run)
    nearest = result.rankings[0]
    assert lines[1].startswith(f"nearest   trial {nearest.trial.number} (not proven faster), ")
    assert "highest lower end" in lines[2]
    assert lines[4].startswith(f"trial {nearest.trial.number} ")
    assert lines[-1].startswith("explain   quartet explain ")
    assert lines[-1].endswith(f" --trial {nearest.trial.number}")


def test_a_stock_plan_in_the_place_of_a_command_that_does_not_fit_is_what_one_trains_with(
    tmp_path: Path,
) -> None:
    run = begin(tmp_path / "r", study={"trials": 8})
    result = search(run, FakeMachine())
    plan = write_best(result, run=run)
    result = replace(result, stand_in=result.trials[1])
    assert summary_lines(result, plan=plan, run=run)[0].endswith(
        "is faster than the best stock plan that fits"
    )
    lines = summary_lines(replace(result, winner=None), plan=plan, run=run)
    assert lines[0].endswith("keep the best stock plan that fits")
    assert [line.split()[0] for line in lines[-2:]] == ["plan", "train"]
