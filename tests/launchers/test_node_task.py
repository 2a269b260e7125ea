"""The process of a trial on one of its nodes, here on this machine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from quartet_plugin.launchers.node_task import (
    ATTEMPT_ID,
    NODE_INDEX,
    NODES,
    TERMINATED_EXIT,
    set_node_variables,
)
from quartet_plugin.protocol import environment

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


def start(*argv: str, **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "quartet_plugin.launchers.node_task", *argv],
        env={**os.environ, NODES: "a,b", NODE_INDEX: "1", ATTEMPT_ID: "0" * 31 + "7", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_command_finds_its_node() -> None:
    assert ATTEMPT_ID == environment.ATTEMPT_ID
    out, _ = start("--", sys.executable, "-c", SHOW).communicate(timeout=60)
    seen = json.loads(out)
    assert [seen[name] for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")] == [
        "2",
        "1",
        "a",
        "20007",
    ]
    assert [seen[f"PET_{name}"] for name in ("NNODES", "NODE_RANK", "MASTER_ADDR")] == ["2", "1", "a"]


def test_slurms_variables_are_those_of_the_trial() -> None:
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "4",
        "SLURM_JOB_NODELIST": "n[1-4]",
        ATTEMPT_ID: "0" * 32,
    }
    set_node_variables(variables, ["n3", "n4"], 0)
    assert (variables["SLURM_NNODES"], variables["SLURM_JOB_NODELIST"]) == ("2", "n3,n4")
    assert variables["SLURM_NODEID"] == "0"


def test_a_port_that_is_said_stays() -> None:
    variables = {ATTEMPT_ID: "0" * 32, "MASTER_PORT": "5"}
    set_node_variables(variables, ["a"], 0)
    assert variables["MASTER_PORT"] == "5"


def test_its_exit_code_is_the_commands() -> None:
    task = start("--", sys.executable, "-c", "raise SystemExit(7)")
    task.communicate(timeout=60)
    assert task.returncode == 7
    killed = start("--", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    killed.communicate(timeout=60)
    assert killed.returncode == 128 + 9


def test_nothing_to_start_is_one_line() -> None:
    task = start()
    assert task.communicate(timeout=60)[1] == "node_task: no command behind --\n"
    assert task.returncode == 2


def test_signals_are_passed_on_and_daemons_end(tmp_path: Path) -> None:
    daemon = tmp_path / "daemon.pid"
    script = (
        "import os, subprocess, sys, time\n"
        "words = [sys.executable, '-c', 'import time; time.sleep(300)']\n"
        "daemon = subprocess.Popen(words, start_new_session=True, env={})\n"
        f"open({str(daemon)!r}, 'w').write(str(daemon.pid))\n"
        "time.sleep(300)\n"
    )
    task = start("--", sys.executable, "-c", script)
    end = time.monotonic() + 60
    while not (daemon.exists() and daemon.read_text()):
        assert time.monotonic() < end
        time.sleep(0.02)
    task.terminate()
    task.communicate(timeout=60)
    assert task.returncode == 128 + 15
    assert not psutil.pid_exists(int(daemon.read_text()))


def test_a_command_that_fails_after_a_sigterm_was_ended(tmp_path: Path) -> None:
    """Whatever its own code is; what ends well, with a checkpoint, has ended well."""
    for handled, expected in (("sys.exit(1)", TERMINATED_EXIT), ("sys.exit(0)", 0)):
        code = (
            "import signal, sys, time; "
            f"signal.signal(signal.SIGTERM, lambda *_: {handled}); print('ready', flush=True); time.sleep(60)"
        )
        task = start("--", sys.executable, "-c", code)
        assert task.stdout is not None
        assert task.stdout.readline() == "ready\n"
        task.terminate()
        task.communicate(timeout=60)
        assert task.returncode == expected


def test_a_sigterm_that_comes_after_the_commands_end_has_ended_it() -> None:
    """As of a job whose processes are signalled one after the other, the command's before this one."""
    code = (
        "import sys\n"
        "from quartet_plugin.launchers import node_task\n"
        "node_task._LATE_SIGTERM_S = 60.0\n"
        "sys.exit(node_task.run(['sh', '-c', '(sleep 0.2; kill -TERM $PPID) & exit 1']))\n"
    )
    task = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert task.returncode == TERMINATED_EXIT
