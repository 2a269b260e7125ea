"""What ends a command from outside, and terminals that lack characters: a line at most, and no traceback."""

import codecs
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.cli.output_encoding import encodable

GOLDEN = Path(__file__).parents[1] / "golden"
PLAN = str(GOLDEN / "plan.json")
ENTRY = "from quartet_plugin.cli.main import entry; entry()"
# SIGINT comes where the module that the first word names is looked for.
INTERRUPTED_ENTRY = f"""
import os, signal, sys
name = sys.argv.pop(1)
class Finder:
    def find_spec(wanted, path=None, target=None):
        if wanted == name:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
signal.signal(signal.SIGINT, signal.default_int_handler)
{ENTRY}
"""


def encoded(text: str, encoding: str, *, errors: str = "strict") -> bytes:
    """What a stream of an encoding gets."""
    content = io.BytesIO()
    stream = encodable(io.TextIOWrapper(content, encoding=encoding, errors=errors))
    stream.write(text)
    stream.flush()
    return content.getvalue()


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("ascii", b"2 x 3.4 us -> ... +-|# \\xe9 \\u4e2d"),
        ("latin-1", b"2 \xd7 3.4 \xb5s -> ... +-|# \xe9 \\u4e2d"),
        ("utf-8", "2 × 3.4 µs → … ╭─│█ é 中".encode()),  # noqa: RUF001
    ],
)
def test_characters_that_an_encoding_lacks_become_ascii(encoding: str, expected: bytes) -> None:
    assert encoded("2 × 3.4 µs → … ╭─│█ é 中", encoding) == expected  # noqa: RUF001


def test_file_names_that_are_no_text_are_printed() -> None:
    assert encoded("a\udcff", "utf-8") == b"a\\udcff"


def test_an_error_handler_of_the_users_stays() -> None:
    assert encoded("→", "latin-1", errors="replace") == b"?"


@pytest.mark.parametrize("columns", ["60", "80"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_every_command_prints_in_any_encoding(
    encoding: str, columns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(shutil.copytree(GOLDEN / "run_0.1.0", tmp_path / "run"))
    monkeypatch.setenv("COLUMNS", columns)
    commands = [
        ["--help"],
        ["--version"],
        ["schedule", "--help"],
        ["schedule", "list", "--devices", "4", "--microbatches", "8"],
        ["show", PLAN],
        ["export", PLAN],
        ["explain", PLAN],
        ["status", run],
        ["trials", run],
    ]
    for command in commands:
        content = io.BytesIO()
        stream = encodable(io.TextIOWrapper(content, encoding=encoding))
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(command) == 0, command
        stream.flush()
        assert content.getvalue().decode(encoding), command


def quartet(
    code: str, *words: str, stdout: int = subprocess.PIPE, variables: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """Exit code, output and errors of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, **(variables or {})},
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=False,
    )
    return done.returncode, (done.stdout or b"").decode("latin-1"), done.stderr.decode("latin-1")


@pytest.mark.parametrize(
    "variables", [{"PYTHONIOENCODING": "latin-1"}, {"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C"}]
)
def test_the_console_script_takes_the_encoding_over(variables: dict[str, str]) -> None:
    code, out, err = quartet(ENTRY, "explain", PLAN, variables={"COLUMNS": "80", **variables})
    assert (code, err) == (0, "")
    assert "iteration" in out
    if "LC_ALL" not in variables:
        assert "█" not in out
        assert "#" in out
    codecs.encode(out, variables.get("PYTHONIOENCODING", "latin-1"))


@pytest.mark.parametrize("words", [("--help",), ("show", PLAN), ("explain", PLAN)])
def test_a_reader_that_left_is_said_nothing(words: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert quartet(ENTRY, *words, stdout=writing) == (141, "", "")
    finally:
        os.close(writing)


def test_an_output_that_is_full_is_a_storage_error() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        code, _, errors = quartet(ENTRY, "show", PLAN, stdout=full)
    finally:
        os.close(full)
    assert (code, errors) == (6, "quartet: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("typer", ("--help",)),
        ("quartet_plugin.cli.workers", ("show", PLAN)),
        ("quartet_plugin.model.plan", ("show", PLAN)),
        ("pydantic", ("explain", PLAN)),
    ],
)
def test_ctrl_c_while_modules_are_imported_is_one_line(module: str, words: tuple[str, ...]) -> None:
    assert quartet(INTERRUPTED_ENTRY, module, *words) == (130, "", "quartet: interrupted\n")


def test_the_entrys_own_modules_are_few() -> None:
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import quartet_plugin.cli.main\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    _, out, _ = quartet(code)
    assert not {"typer", "typing", "importlib.metadata", "rich", "email", "inspect"} & set(out.split())


SWALLOWED_ENTRY = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that runs in the background ignores it
class Swallowing:
    def __del__(self):
        raise KeyboardInterrupt
class Finder:
    def find_spec(wanted, path=None, target=None):
        if wanted == "quartet_plugin.cli.runs":
            Swallowing()
sys.meta_path.insert(0, Finder)
{ENTRY}
"""


def test_ctrl_c_that_a_library_swallows_is_given_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWED_ENTRY, "status", "none"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "quartet: interrupted\n")
