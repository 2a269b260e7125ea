"""The frame of the command line: `--`, exit codes, one line an error, help and version."""

import errno
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import typer

from quartet_plugin import __version__, errors
from quartet_plugin.cli import main as frame
from quartet_plugin.cli.command import invocation, refuse_user_command, user_command
from quartet_plugin.cli.main import main

QUARTET = Path(sys.executable).with_name("quartet")


class ProbeModule:
    """Stands for a module of commands: `probe` does whatever the test says."""

    def __init__(self, act: Callable[[typer.Context], object]) -> None:
        self.act = act

    def probe_command(self, ctx: typer.Context, number: int = 0) -> None:
        self.act(ctx)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[typer.Context], object]], None]:
    def put(act: Callable[[typer.Context], object]) -> None:
        monkeypatch.setattr(frame, "COMMANDS", {"probe": "probe"})
        monkeypatch.setattr(frame, "import_module", lambda name: ProbeModule(act))

    return put


def raising(error: BaseException) -> Callable[[typer.Context], object]:
    def act(ctx: typer.Context) -> object:
        raise error

    return act


Install = Callable[[Callable[[typer.Context], object]], None]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["probe"], None),
        (["probe", "--"], ()),
        (["probe", "--", "torchrun", "x.py", "--number", "5"], ("torchrun", "x.py", "--number", "5")),
        (["probe", "--number", "3", "--", "a", "--", "b", "--debug"], ("a", "--", "b", "--debug")),
    ],
)
def test_the_users_command_is_kept_apart(
    argv: list[str], expected: tuple[str, ...] | None, install: Install
) -> None:
    seen: list[object] = []
    install(lambda ctx: seen.append(invocation(ctx).user_command))
    assert main(argv) == 0
    assert seen == [expected]


def test_a_command_that_needs_the_users_command(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[object] = []
    install(lambda ctx: seen.append(user_command(ctx)))
    assert main(["probe", "--", "torchrun"]) == 0
    assert seen == [("torchrun",)]
    assert main(["probe"]) == 2
    assert capsys.readouterr().err == (
        "quartet: quartet probe: the training command is missing; write it after --, as in: -- torchrun ...\n"
    )


def test_a_command_that_takes_no_users_command(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(refuse_user_command)
    assert main(["probe"]) == 0
    assert main(["probe", "--", "ls"]) == 2
    assert "takes no training command" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("u"), 2),
        (errors.ConfigError("u"), 2),
        (errors.PlanError("u"), 2),
        (errors.InfeasibleError("u"), 3),
        (errors.SeamError("u"), 4),
        (errors.InfrastructureError("u"), 5),
        (errors.StorageError("u"), 6),
        (errors.InterruptedByUserError("u"), 130),
    ],
)
def test_exit_codes(
    error: errors.QuartetError, code: int, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(raising(error))
    assert main(["probe"]) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", "quartet: u\n")


def test_ctrl_c(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(raising(KeyboardInterrupt()))
    assert main(["probe"]) == 130
    assert capsys.readouterr().err == "quartet: interrupted\n"


@pytest.mark.parametrize("depth", [1, 2])
def test_ctrl_c_in_a_compiled_function(
    depth: int, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numba returns a result although a signal has raised; CPython makes a SystemError of the two."""
    error: BaseException = KeyboardInterrupt()
    for _ in range(depth):
        outer = SystemError("a function returned a result with an exception set")
        outer.__cause__ = error
        error = outer
    install(raising(error))
    assert main(["probe"]) == 130
    assert capsys.readouterr().err == "quartet: interrupted\n"


@pytest.mark.parametrize("cause", [None, ValueError("x")])
def test_a_system_error_of_something_else_is_a_bug(
    cause: Exception | None, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    error = SystemError("y")
    error.__cause__ = cause
    install(raising(error))
    assert main(["probe"]) == 1
    assert capsys.readouterr().err.startswith("quartet: internal error: SystemError: y")


def test_a_place_that_is_not_allowed_is_no_bug(
    tmp_path: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a colleague's run folder: its owner alone may read it."""
    install(raising(PermissionError(errno.EACCES, "Permission denied", str(tmp_path))))
    assert main(["probe"]) == 2
    assert capsys.readouterr().err == f"quartet: {tmp_path}: Permission denied\n"


def test_a_bug_is_named_as_one(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(raising(KeyError("x")))
    assert main(["probe"]) == 1
    assert capsys.readouterr().err == (
        "quartet: internal error: KeyError: 'x'; run again with --debug and report the traceback\n"
    )


@pytest.mark.parametrize("argv", [["probe", "--debug"], ["--debug", "probe"]])
def test_debug_shows_the_traceback(
    argv: list[str], install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(raising(errors.PlanError("u")))
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("quartet: u\n")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--nonsense"], "No such option: --nonsense; see quartet --help"),
        (["nonsense"], "No such command 'nonsense'; see quartet --help"),
        (["probe", "--number"], "--number"),
        (["probe", "--number", "x"], "--number"),
        (["probe", "surplus"], "surplus"),
    ],
)
def test_usage_errors_are_one_line(
    argv: list[str], words: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(lambda ctx: None)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("quartet: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["schedule"], ["schedule", "--help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert "Usage: quartet" in out
    assert err == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    first, *installed = capsys.readouterr().out.splitlines()
    assert first == f"quartet {__version__}"
    assert f"optuna {version('optuna')}" in installed
    assert f"megatron-core {version('megatron-core')}" in installed
    assert not [line for line in installed if line.startswith("transformer-engine")]


def test_the_console_script() -> None:
    done = subprocess.run([QUARTET, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[0], done.stderr) == (0, f"quartet {__version__}", "")
    done = subprocess.run([QUARTET, "--nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("quartet: ")


def test_a_reader_that_leaves_early() -> None:
    code = (
        "import sys\n"
        "from quartet_plugin.cli import main as frame\n"
        "class M:\n"
        "    def __getattr__(self, name):\n"
        "        return lambda: print('x' * 1000000)\n"
        "frame.import_module = lambda name: M()\n"
        "sys.argv = ['quartet', 'probe']\n"
        "frame.entry()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() in (1, 141)


def test_commands_load_nothing_heavy_before_they_need_it() -> None:
    code = (
        "import sys\n"
        "from quartet_plugin.cli.main import main\n"
        "main(['schedule', '--help'])\n"
        "heavy = {'numpy', 'numba', 'scipy', 'optuna', 'matplotlib', 'torch', 'megatron'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
        "import quartet_plugin.tuner.history\n"  # what `status` needs, and no study
        "heavy = {'scipy.special', 'scipy.optimize', 'optuna', 'matplotlib', 'torch', 'megatron'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
        "import quartet_plugin.tuner.coordinator\n"
        "heavy = {'scipy.optimize', 'matplotlib', 'torch', 'megatron'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n[]\n[]\n"


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize(
    ("words", "is_output_full", "code"),
    [
        (("--version",), True, 6),
        (("show", "/nonexistent.json"), False, 2),
        (("show", "/nonexistent.json"), True, 2),
        (("--nonsense", "--debug"), True, 2),
    ],
)
def test_an_exit_code_stays_where_the_errors_have_a_full_disk(
    words: tuple[str, ...], is_output_full: bool, code: int
) -> None:
    with FULL.open("w") as full:
        output = full if is_output_full else subprocess.DEVNULL
        done = subprocess.run([QUARTET, *words], stdout=output, stderr=full, check=False)
    assert done.returncode == code


@pytest.mark.parametrize(("name", "told"), [(None, "a file"), ("/scratch/x", "/scratch/x")])
def test_a_disk_that_is_not_the_outputs_is_not_named_as_it(
    name: str | None, told: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(raising(OSError(28, "No space left on device", name)))
    assert main(["probe"]) == 6
    assert capsys.readouterr().err == f"quartet: {told}: cannot be written: No space left on device\n"
