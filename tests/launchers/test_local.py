"""Commands on this machine."""

import os
import sys
import time
from pathlib import Path

import pytest

from quartet_plugin.errors import ConfigError, InfrastructureError, StorageError
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.launchers.local import (
    LocalLauncher,
    check_one_node,
    child_environment,
    free_port,
    resolve_device,
)
from quartet_plugin.protocol.environment import CPU_SETTINGS


def run(tmp_path: Path, program: str, **environment: str) -> tuple[int, str]:
    """Run a Python program to its end. It finds the file `started` once it was started."""
    log = tmp_path / "log"
    handle = LocalLauncher().start(
        [sys.executable, "-c", program], env={**os.environ, **environment}, cwd=tmp_path, stdout=log
    )
    (tmp_path / "started").touch()
    while (code := handle.poll()) is None:
        time.sleep(0.01)
    return code, log.read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "torchrun --nnodes 2 a.py",
            "torchrun --nnodes: 2; without --launcher quartet starts processes on this node only",
        ),
        ("torchrun --nnodes 1:4 a.py", "torchrun --nnodes: a range; "),
        ("deepspeed --num_nodes 2 --num_gpus 4 a.py", "deepspeed --num_nodes: 2; "),
        ("deepspeed --hostfile hosts a.py", "deepspeed --num_nodes: left to a host file"),
    ],
)
def test_a_command_of_several_nodes_is_not_cut_down_to_this_one(words: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_one_node(parse_command(words.split(), environment={}))
    assert says in str(caught.value)
    assert "quartet plan" in str(caught.value)
    assert "omit it" not in str(caught.value)
    assert "tuned" not in str(caught.value)  # it is also said by check and profile
    check_one_node(parse_command(["torchrun", "--nproc-per-node", "2", "a.py"], environment={}))


def test_output_and_errors_go_to_the_file(tmp_path: Path) -> None:
    code, text = run(tmp_path, "import sys; print('a'); print('b', file=sys.stderr); sys.exit(3)")
    assert code == 3
    assert sorted(text.split()) == ["a", "b"]
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_the_command_has_its_own_session_and_no_input(tmp_path: Path) -> None:
    _, text = run(tmp_path, "import os, sys; print(os.getsid(0) == os.getpid(), repr(sys.stdin.read()))")
    assert text.split() == ["True", "''"]


def test_a_signal_is_a_negative_code(tmp_path: Path) -> None:
    code, _ = run(tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert code == -9


def test_an_abort_leaves_no_core_file(tmp_path: Path) -> None:
    _, text = run(
        tmp_path,
        "import pathlib, resource, time\nwhile not pathlib.Path('started').exists(): time.sleep(0.01)\n"
        "print(resource.getrlimit(resource.RLIMIT_CORE)[0])",
    )
    assert text.strip() == "0"


def test_terminate_and_kill(tmp_path: Path) -> None:
    for number, name in ((15, "terminate"), (9, "kill")):
        handle = LocalLauncher().start(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            env=os.environ,
            cwd=tmp_path,
            stdout=tmp_path / name,
        )
        getattr(handle, name)()
        while (code := handle.poll()) is None:
            time.sleep(0.01)
        assert code == -number
        getattr(handle, name)()


def test_what_cannot_start_is_said(tmp_path: Path) -> None:
    start = LocalLauncher().start
    with pytest.raises(ConfigError, match="not found"):
        start(["no-such-program"], env={"PATH": "/bin"}, cwd=tmp_path, stdout=tmp_path / "a")
    with pytest.raises(InfrastructureError, match="cannot start"):
        start([sys.executable], env={}, cwd=tmp_path / "nowhere", stdout=tmp_path / "b")
    (tmp_path / "c").symlink_to(tmp_path / "d")
    with pytest.raises(StorageError, match="cannot be created"):
        start([sys.executable], env={}, cwd=tmp_path, stdout=tmp_path / "c")


def test_cpu_runs_get_the_allocator_settings_and_others_do_not() -> None:
    assert child_environment("cpu", environment={"A": "b", "OMP_NUM_THREADS": "8"}) == {
        "A": "b",
        **CPU_SETTINGS,
        "DS_ACCELERATOR": "cpu",
    }
    assert child_environment("cuda", environment={"A": "b"}) == {"A": "b"}


def test_the_device_is_what_was_asked_for() -> None:
    assert resolve_device("cuda", environment={}) == "cuda"
    assert resolve_device("cpu", environment={}) == "cpu"
    assert resolve_device("auto", environment={"CUDA_VISIBLE_DEVICES": ""}) == "cpu"


def test_a_free_port_can_be_bound() -> None:
    assert 1024 <= free_port() <= 65535


def test_a_relative_program_is_found_from_the_commands_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "train").symlink_to("/bin/true")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    start = LocalLauncher().start
    started = start(["bin/train"], env={}, cwd=tmp_path, stdout=tmp_path / "a")
    assert started.wait(timeout=30) == 0
    with pytest.raises(ConfigError, match="bin/train"):
        start(["bin/train"], env={}, cwd=tmp_path / "elsewhere", stdout=tmp_path / "b")
