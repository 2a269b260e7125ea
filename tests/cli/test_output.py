"""What a script, a file or a path says reaches the terminal printable and cut, by every way that it takes."""

import ast
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import typer
from rich.console import Console

from quartet_plugin.cli import main as frame
from quartet_plugin.cli.main import main
from quartet_plugin.cli.output import show
from quartet_plugin.cli.train import first_error
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.launch import LaunchRecord
from quartet_plugin.model.plan import read_plan, write_plan
from quartet_plugin.model.printable import MAX_LINE
from quartet_plugin.report.live import LiveTable, PlainLines

GOLDEN = Path(__file__).parents[1] / "golden"
# Sets the terminal's title, rings, erases the line, turns the direction of what follows, and ends the line.
HOSTILE = "\x1b]0;title\x07\x1b[2K\u202eevil\u2028\x9b31m\r\nquartet: forged"
LONG = "a" * 10_000


def assert_tame(printed: str) -> None:
    """Nothing acts on the terminal, no line is long, and none begins as another message would."""
    for line in printed.splitlines():
        assert len(line) <= MAX_LINE + 20, line[:80]
    assert printed.replace("\n", "").isprintable(), ascii(printed)[:200]
    assert "\nquartet: forged" not in printed


def printed_by(capsys: pytest.CaptureFixture[str], argv: Sequence[str]) -> tuple[int, str]:
    """The exit code of a command, and all that it printed, which must be tame."""
    code = main(argv)
    out, err = capsys.readouterr()
    assert_tame(out + err)
    assert out + err
    return code, out + err


@pytest.mark.parametrize("part", [HOSTILE, LONG])
@pytest.mark.parametrize(
    "command",
    [
        *(["show"], ["export"], ["explain"], ["plan"], ["status"], ["trials"], ["report"]),
        *(
            ["predict"],
            ["schedule", "bound"],
            ["trace"],
            ["recheck"],
            ["calibrate", "--runs"],
            ["--nonsense"],
        ),
        *(["train", "--plan"], ["tune", "--config"]),
    ],
)
def test_a_path_in_an_error(command: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    behind = ["--", "torchrun", "x.py"] if command[0] in ("train", "tune") else []
    code, shown = printed_by(capsys, [*command, f"/nowhere/{part}", *behind])
    assert code != 0
    assert shown.startswith("quartet: ")
    assert shown.count("\n") == 1


@pytest.mark.parametrize("part", [HOSTILE, LONG])
def test_a_word_of_the_command_in_an_error(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed_by(capsys, ["train", "--", part, "x.py"])[0] == 2
    assert printed_by(capsys, [part])[0] == 2


@pytest.mark.parametrize("part", [HOSTILE, LONG])
@pytest.mark.parametrize("error", [ConfigError, RuntimeError])
@pytest.mark.parametrize("options", [[], ["--debug"]])
def test_an_exceptions_text(
    error: type[Exception],
    part: str,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(ctx: typer.Context) -> None:
        raise error(part)

    monkeypatch.setattr(frame, "COMMANDS", {"probe": "probe"})
    monkeypatch.setattr(frame, "import_module", lambda name: type("Module", (), {"probe_command": fail}))
    code, shown = printed_by(capsys, ["probe", *options])
    assert code == (2 if error is ConfigError else 1)
    assert ("Traceback" in shown) == bool(options)


@pytest.mark.parametrize("part", [HOSTILE, LONG])
def test_the_message_of_a_rank_that_failed(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = {
        "kind": "error",
        "type": part[:500],
        "message": part,
        "exit_code": 1,
        "peak_memory_bytes": 0,
        "wanted_bytes": 0,
        "traceback": [],
        "launch_rank": 0,
        "time": 0.0,
    }
    write_json_atomic(tmp_path / "rank-0.err.json", failure)
    reported = first_error(tmp_path)
    assert reported is not None

    def fail(ctx: typer.Context) -> None:
        raise reported

    monkeypatch.setattr(frame, "COMMANDS", {"probe": "probe"})
    monkeypatch.setattr(frame, "import_module", lambda name: type("Module", (), {"probe_command": fail}))
    assert "your command failed" in printed_by(capsys, ["probe"])[1]


@pytest.fixture
def hostile_run(tmp_path: Path) -> Path:
    """A run whose trials and folder say what a hostile script would let them say."""
    run = Path(shutil.copytree(GOLDEN / "run_0.1.0", tmp_path / "run"))
    (run / "study.sqlite3").unlink()
    for path in run.glob("trials/*/attempt-*/result.json"):
        result = json.loads(path.read_text())
        if not path.match("trials/000000/*/*"):
            content = {**result, "outcome": "INFEASIBLE", "reason": HOSTILE + LONG, "iteration_s": []}
            write_json_atomic(path, content)
    config = json.loads((run / "config.json").read_text())
    config["command"].append(HOSTILE + LONG)
    config["config"]["run"] = None
    write_json_atomic(run / "config.json", config)
    return run


@pytest.mark.parametrize("command", ["trials", "status", "report"])
def test_a_runs_words(command: str, hostile_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "quartet:" in printed_by(capsys, [command, str(hostile_run)])[1] or command in ("report", "status")


def test_data_stays_whole(hostile_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trials", str(hostile_run), "-f", "json"]) == 0
    out = capsys.readouterr().out
    reasons = [row["reason"] for row in json.loads(out)["trials"]]
    is_whole = HOSTILE + LONG in reasons
    assert is_whole
    is_tame = out.replace("\n", "").isprintable()
    assert is_tame
    for form in ("csv", "yaml"):
        assert main(["trials", str(hostile_run), "-f", form]) == 0
        out = capsys.readouterr().out
        is_tame = out.replace("\r\n", "").replace("\n", "").isprintable()
        assert is_tame, form


def test_a_plans_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = read_plan(GOLDEN / "plan.json")
    name = (HOSTILE + LONG)[:200]
    nodes = tuple(replace(node, host=name) for node in plan.made_for.nodes)
    path = tmp_path / "plan.json"
    hostile = replace(
        plan,
        made_for=replace(plan.made_for, nodes=nodes),
        provenance=replace(plan.provenance, run=name),
    )
    write_plan(hostile, path=path)
    for command in ("show", "export", "explain"):
        printed_by(capsys, [command, str(path)])


def a_launch(reason: str) -> LaunchRecord:
    """A launch that was not measured."""
    return LaunchRecord(label="1", plan=None, outcome="INFRA", reason=reason)


@pytest.mark.parametrize("part", [HOSTILE, LONG])
def test_the_lines_of_a_running_search(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = PlainLines(show)
    lines.message(part)
    lines.plan_finished(a_launch(part))
    written: list[str] = []
    plain = PlainLines(written.append)
    plain.message(part)
    plain.plan_finished(a_launch(part))
    for line in (*written, *capsys.readouterr().out.splitlines()):
        assert_tame(line)


@pytest.mark.parametrize("part", [HOSTILE, LONG])
def test_the_table_of_a_running_search(part: str) -> None:
    screen = StringIO()
    table = LiveTable(Console(file=screen, width=MAX_LINE, color_system=None))
    table.message(part)
    table.plan_finished(a_launch(part))
    Console(file=screen, width=MAX_LINE, color_system=None).print(table.render())
    assert_tame(screen.getvalue())


def test_no_command_prints_by_itself() -> None:
    """Lines go through one function: all but data, the version, and a line that is drawn over."""
    calls = []
    for path in sorted(Path(frame.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "typer.echo"):
                words = ast.unparse(node.args[0]) if node.args else ""
                calls.append(f"{path.name}: {words}")
    data = ("json.dumps(", "text.rstrip(", "csv_text(")
    others = [call for call in calls if not call.partition(": ")[2].startswith(data)]
    allowed = {"output.py", "main.py: ", "check.py: f'\\r{text:<60}'", "main.py: '\\n'.join(lines)"}
    assert {call for call in others if call not in allowed and call.partition(":")[0] not in allowed} == set()
