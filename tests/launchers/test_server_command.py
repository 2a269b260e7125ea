"""Which commands start from a trial server, and what else starts cold for which reason."""

import os
import sys
from pathlib import Path

import pytest

from quartet_plugin.launchers.command import parse_command
from quartet_plugin.launchers.server_command import ServerCommand, server_command
from quartet_plugin.protocol.environment import ATTEMPT_ID, CPU_REEXECUTED, CPU_SETTINGS

BIN = Path(sys.executable).parent
FLAGS = ("--quartet-trial", "/t.json", "--quartet-device", "cpu")


def made(words: str, *, cwd: Path = Path("/work"), **environment: str) -> ServerCommand | str:
    command = parse_command(words.split(), environment={})
    known = {"PATH": f"{BIN}:{os.defpath}", ATTEMPT_ID: "b" * 32, **environment}
    return server_command(command.wrapped(FLAGS, port=1), env=known, cwd=cwd)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("deepspeed --num_gpus 2 train.py", "deepspeed starts the processes itself"),
        (
            "torchrun --nproc-per-node 2 -m megatron.bridge.train",
            "only ranks of Megatron and DeepSpeed are forked",
        ),
        ("torchrun --nproc-per-node gpu train.py", "the number of processes is left to the machine"),
        (
            "torchrun --numa-binding node train.py",
            "torchrun --numa-binding starts the ranks by another program",
        ),
        ("python -O train.py", "a trial server does not support options of python"),
        ("python -X dev -m torch.distributed.run train.py", "a trial server does not support options"),
        ("/nowhere/torchrun train.py", "the interpreter of '/nowhere/torchrun' is not known"),
    ],
)
def test_reasons_for_cold_starts(words: str, reason: str) -> None:
    answer = made(words)
    assert isinstance(answer, str)
    assert answer.startswith(reason)


def test_a_torchrun_of_the_users_own_starts_cold(tmp_path: Path) -> None:
    program = tmp_path / "torchrun"
    program.write_text("#!/bin/sh\nexec /usr/bin/torchrun-2.11 $@\n")
    program.chmod(0o700)
    assert made(f"{program} train.py") == f"the interpreter of '{program}' is not known"


def test_a_torchrun_with_a_long_interpreters_name(tmp_path: Path) -> None:
    """Installers that meet a name too long for the kernel write a line for the shell."""
    program = tmp_path / "torchrun"
    lines = ("#!/bin/sh", f'\'\'\'exec\' "{sys.executable}" "$0" "$@"', "' '''")
    program.write_text("\n".join((*lines, "from torch.distributed.run import main\n")))
    program.chmod(0o700)
    command = made(f"{program} train.py")
    assert isinstance(command, ServerCommand)
    assert command.argv[0] == sys.executable


@pytest.mark.parametrize(
    ("words", "num_ranks", "options"),
    [
        ("torchrun --nproc-per-node 4 train.py --lr 1", 4, ("-u",)),
        ("env A=1 python -u -m torch.distributed.run --nproc-per-node=2 train.py", 2, ("-u",)),
        ("python train.py", 0, ()),
        ("python -u train.py", 0, ("-u",)),
    ],
)
def test_the_servers_own_command(words: str, num_ranks: int, options: tuple[str, ...]) -> None:
    command = made(words)
    assert isinstance(command, ServerCommand)
    assert command.num_ranks == num_ranks
    assert command.argv[1:] == (*options, "-m", "quartet_plugin.rank.warm")
    assert Path(command.argv[0]).name.startswith("python")
    assert (command.target, command.on_cpu) == ("/work/train.py", True)


def test_trials_that_differ_in_plan_port_and_id_have_one_server() -> None:
    first = made("torchrun --nproc-per-node 2 train.py", OMP_NUM_THREADS="1")
    second = made(
        "torchrun --nproc-per-node 2 train.py --lr 2", OMP_NUM_THREADS="1", QUARTET_ATTEMPT_ID="c" * 32
    )
    assert first == second
    assert first != made("torchrun --nproc-per-node 2 train.py", OMP_NUM_THREADS="2")
    assert first != made("torchrun --nproc-per-node 2 train.py", cwd=Path("/"), OMP_NUM_THREADS="1")


def test_the_server_has_what_libraries_read_when_a_rank_starts() -> None:
    command = made("torchrun --nproc-per-node 2 train.py", OMP_NUM_THREADS="4")
    assert isinstance(command, ServerCommand)
    assert command.environment.items() >= {**CPU_SETTINGS, CPU_REEXECUTED: "1"}.items()
    assert command.preload.environment["OMP_NUM_THREADS"] == "4"
    assert CPU_REEXECUTED not in command.preload.environment


def test_what_env_sets_is_in_the_environment_of_both() -> None:
    command = made("env A=1 B=2 python train.py")
    assert isinstance(command, ServerCommand)
    assert command.environment.items() >= {"A": "1", "B": "2"}.items()
    request = command.request(["env", "A=1", "B=2", "python", "-m", "x"], env={"C": "3"})
    assert request.argv == ("python", "-m", "x")
    assert request.environment == {"A": "1", "B": "2", "C": "3"}
