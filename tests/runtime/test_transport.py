"""Real process groups: the executor over gloo, directly and through host memory."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quartet_plugin.runtime.programs import ProgramCache
from quartet_plugin.runtime.transport import Boundary, Channels, PairTransport
from quartet_plugin.schedule.instruction import Post, Side
from tests.megatron.support import REPOSITORY, free_port, rank_environment, run_processes, torchrun
from tests.runtime.pipelines import spec_of

RANK_PROGRAM = "tests.runtime.gloo_rank"


def test_gradients_over_gloo(tmp_path: Path) -> None:
    command = torchrun(3, "-m", RANK_PROGRAM, "zb-v", "interleaved", "snake-3")
    code, output = run_processes(command, timeout_s=120, log=tmp_path / "log")
    assert code == 0, output[-3000:]
    assert output.count(" done") == 3


def test_a_device_that_dies_is_noticed_and_the_message_named() -> None:
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.megatron.runtime.dying_rank"],
            env=rank_environment()
            | {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        output = processes[0].communicate(timeout=120)[0]
        assert processes[0].returncode == 5
        assert re.search(r"device 0: 0(RECV|SEND)_[FB]\d with device 1 failed: .*device 0 was at", output), (
            output
        )
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_tensor_of_another_shape_or_type_is_refused_before_it_is_sent() -> None:
    boundary = Boundary(shape=(2, 3), dtype=torch.float32, device=torch.device("cpu"))
    moving = PairTransport(Channels(groups=(None, None), ranks=(0, 1)), boundary)
    program = ProgramCache(spec_of("1f1b", 2)).program(1)
    send = next(
        transfer
        for instruction in program.instructions[0]
        if isinstance(instruction, Post)
        for transfer in instruction.transfers
        if transfer.side is Side.SEND
    )
    for wrong, words in (
        (torch.zeros(3, 2), "boundary is"),
        (torch.zeros(2, 3).double(), "float64"),
        (None, "None"),
    ):
        with pytest.raises(ValueError, match=words):
            moving.post([(send, wrong)])
    assert not moving._pending
