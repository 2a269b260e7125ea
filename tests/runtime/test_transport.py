"""Real process groups: the executor over gloo, directly and through host memory."""

import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quartet_plugin.runtime.process_groups import Channels
from quartet_plugin.runtime.programs import ProgramCache
from quartet_plugin.runtime.transport import Boundary, PairTransport
from quartet_plugin.schedule.instruction import Post, Side, Transfer
from tests import warm_ranks
from tests.megatron.support import REPOSITORY, rank_environment, run_ranks
from tests.ports import free_port
from tests.runtime.pipelines import spec_of

RANK_PROGRAM = "tests.runtime.transport_rank"


# In groups that keep the default group's bound device, the first step of a loop with descriptions would hang.
@pytest.mark.parametrize(
    ("groups", "schedules"),
    [
        ("gloo", ["zb-v", "interleaved", "snake-3"]),
        ("troubled", ["zb-v", "interleaved", "snake-3"]),
        ("bound", ["interleaved"]),
    ],
)
def test_gradients_of_every_transport(groups: str, schedules: list[str], tmp_path: Path) -> None:
    words = (RANK_PROGRAM, groups, *schedules)
    code, output = run_ranks(3, *words, timeout_s=120, log=tmp_path / "log", framework=warm_ranks.TORCH)
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


class Sent:
    """The work of a send."""

    def __init__(self) -> None:
        self.is_over = self.is_awaited = False

    def is_completed(self) -> bool:
        """As torch's."""
        return self.is_over

    def wait(self) -> None:
        """As torch's."""
        self.is_awaited = True


def first_sends(count: int) -> list[Transfer]:
    program = ProgramCache(spec_of("gpipe", 2)).program(count)
    posts = (i for i in program.instructions[0] if isinstance(i, Post))
    return [t for post in posts for t in post.transfers if t.side is Side.SEND]


def sending(monkeypatch: pytest.MonkeyPatch, *, is_nccl: bool) -> tuple[PairTransport, list[Sent]]:
    works: list[Sent] = []

    def isend(*_: Any, **__: Any) -> Sent:
        works.append(Sent())
        return works[-1]

    monkeypatch.setattr(dist, "isend", isend)
    boundary = Boundary(shape=(2, 3), dtype=torch.float32, device=torch.device("cpu"))
    return PairTransport(Channels(groups=(None, None), ranks=(0, 1), is_nccl=is_nccl), boundary), works


def test_on_nccl_a_send_is_held_until_it_is_over_and_awaited_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moving, works = sending(monkeypatch, is_nccl=True)
    tensors = [torch.zeros(2, 3) for _ in range(3)]
    alive = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    for transfer in first_sends(3):
        moving.post([(transfer, tensors.pop(0))])
        moving.wait(transfer)
    assert [work.is_awaited for work in works] == [False] * 3
    works[1].is_over = True
    moving.post([])
    assert [held() is not None for held in alive] == [True, False, True]
    moving.end()
    assert [work.is_awaited for work in works] == [True, False, True]
    assert [held() is not None for held in alive] == [False] * 3


def test_on_gloo_a_send_is_awaited_where_the_program_says(monkeypatch: pytest.MonkeyPatch) -> None:
    moving, works = sending(monkeypatch, is_nccl=False)
    for transfer in first_sends(2):
        moving.post([(transfer, torch.zeros(2, 3))])
        moving.wait(transfer)
        assert works[-1].is_awaited


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
