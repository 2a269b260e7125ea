"""Ranks that are forked for torchrun are as those that it starts, and end with it."""

import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from quartet_plugin.launchers.local import LocalLauncher
from quartet_plugin.launchers.warm import WarmLauncher
from tests.launchers.warm_commands import ENTRY, Workplace, exit_code_of, light_command, wait_for

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
REPORT = """
import json, os, sys
state = {"environment": dict(os.environ), "argv": sys.argv, "path": sys.path, "orig_argv": sys.orig_argv,
         "is_leader": os.getsid(0) == os.getpid(), "parent": os.getppid(),
         "output": [os.readlink(f"/proc/self/fd/{fd}").rpartition("/")[2] for fd in (0, 1, 2)]}
with open(f"{sys.argv[1]}-{os.environ['RANK']}", "w") as file:
    json.dump(state, file)
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """With a folder of its own for what torchrun leaves."""
    made = Workplace(tmp_path_factory.mktemp("torchrun"))
    temporary = made.folder / "temporary"
    temporary.mkdir()
    made.environment["TMPDIR"] = str(temporary)
    return made


@pytest.fixture(scope="module")
def launcher(workplace: Workplace) -> Iterator[WarmLauncher]:
    """One server for all tests: its imports take seconds."""
    workplace.script("", "train.py")
    with WarmLauncher(command_of=light_command) as warm:
        yield warm


def torchrun(*words: str, options: tuple[str, ...] = ()) -> list[str]:
    return [TORCHRUN, "--nproc-per-node", "2", *options, "-m", ENTRY, "train.py", *words]


def states(workplace: Workplace, name: str) -> list[dict[str, object]]:
    """What both ranks reported, without what no two launches have alike."""
    found = []
    for rank in range(2):
        text = (workplace.folder / f"{name}-{rank}").read_text()
        text = re.sub(r"log-[0-9]+", "LOG", text)
        text = re.sub(r"torchelastic_[^/]*/none_[^/]*/", "FOLDER/", text).replace(name, "NAME")
        state = json.loads(text)
        state["environment"].pop("MASTER_PORT")
        state.pop("parent")
        found.append(state)
    return found


def test_ranks_get_what_torchrun_gives(workplace: Workplace, launcher: WarmLauncher) -> None:
    workplace.script(REPORT)
    assert workplace.run(launcher, torchrun("launch-w")) == (0, "")
    assert launcher.latest.is_warm
    code, _ = workplace.run(LocalLauncher(), torchrun("launch-c"))
    assert code == 0
    warm, cold = states(workplace, "launch-w"), states(workplace, "launch-c")
    for rank in range(2):
        assert warm[rank] == cold[rank]
        environment = warm[rank]["environment"]
        assert isinstance(environment, dict)
        assert environment["LOCAL_RANK"] == str(rank)
        assert environment["TORCHELASTIC_ERROR_FILE"].endswith(f"attempt_0/{rank}/error.json")


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_torchrun_leaves_what_it_leaves_in_a_process_of_its_own(
    workplace: Workplace, launcher: WarmLauncher
) -> None:
    workplace.script("print('buffered', end='')\n")
    temporary = Path(workplace.environment["TMPDIR"])
    left = {}
    for name, way in (("warm", launcher), ("cold", LocalLauncher())):
        before = files_in(temporary)
        code, output = workplace.run(way, torchrun())
        left[name] = code, output, len(files_in(temporary) - before)
    assert launcher.latest.is_warm
    assert left["warm"] == left["cold"]
    assert left["cold"][:2] == (0, "buffered" * 2)


def test_a_rank_that_dies_ends_the_others(workplace: Workplace, launcher: WarmLauncher) -> None:
    workplace.script("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(100)\n")
    handle, log = workplace.start(launcher, torchrun())
    assert exit_code_of(handle) == 1
    assert launcher.latest.is_warm
    assert re.search(r"exitcode\s*:\s*7", log.read_text())
    assert "local_rank: 1" in log.read_text()


def test_torchrun_that_is_ended_ends_its_ranks(workplace: Workplace, launcher: WarmLauncher) -> None:
    # In one write each: those of two ranks would mix.
    workplace.script("import sys, time\nsys.stdout.write('here\\n')\nsys.stdout.flush()\ntime.sleep(100)\n")
    handle, log = workplace.start(launcher, torchrun())
    wait_for(log, "here\nhere\n")
    ranks = psutil.Process(handle.pid).children()
    assert len(ranks) == 2
    handle.terminate()
    assert exit_code_of(handle) in (1, -signal.SIGTERM)
    assert not [rank for rank in ranks if rank.is_running()]


def test_torchrun_that_is_killed_leaves_no_rank_that_waits(
    workplace: Workplace, launcher: WarmLauncher
) -> None:
    workplace.script("print('never')")
    handle, _ = workplace.start(launcher, torchrun(options=("--rdzv-backend", "c10d", "--nnodes", "1:2")))
    end = time.monotonic() + 30.0
    while len(waiting := psutil.Process(handle.pid).children()) < 2:
        assert time.monotonic() < end
    handle.kill()
    assert exit_code_of(handle) == -signal.SIGKILL
    _, left = psutil.wait_procs(waiting, timeout=20.0)
    assert not left


def test_ranks_of_a_restart_are_started_anew(workplace: Workplace, launcher: WarmLauncher) -> None:
    workplace.script(
        "import os, sys\ncount = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "sys.stdout.write(f\"{count} {os.environ['RANK']} {sys.argv}\\n\")\nsys.exit(count == '0')\n"
    )
    code, output = workplace.run(launcher, torchrun("word", options=("--max-restarts", "1")))
    assert code == 0
    lines = {line for line in output.splitlines() if "word" in line}
    assert lines >= {"1 0 ['train.py', 'word']", "1 1 ['train.py', 'word']"}


def test_output_goes_where_torchrun_sends_it(workplace: Workplace, launcher: WarmLauncher) -> None:
    workplace.script(
        "import os, sys\nsys.stdout.write(f\"rank {os.environ['RANK']}\\n\"); print('error', file=sys.stderr)"
    )
    options = ("--log-dir", "logs", "--redirects", "3", "--tee", "1")
    code, output = workplace.run(launcher, torchrun(options=options))
    assert (code, launcher.latest.is_warm) == (0, True)
    texts = {
        f"{path.parent.name}/{path.name}": path.read_text()
        for path in (workplace.folder / "logs").rglob("std*.log")
    }
    assert texts == {
        f"{rank}/std{kind}.log": f"rank {rank}\n" if kind == "out" else "error\n"
        for rank in range(2)
        for kind in ("out", "err")
    }
    assert "[default0]:rank 0" in output
