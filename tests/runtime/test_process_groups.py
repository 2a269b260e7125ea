"""How process groups are made: unbound, named, with NCCL's options, and with every communicator in place."""

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import PlanError
from quartet_plugin.runtime.process_groups import Channels, agree_on_program, new_group
from quartet_plugin.runtime.programs import ProgramCache
from quartet_plugin.schedule.instruction import Post, Program
from quartet_plugin.schedule.lowering import group_names
from tests.runtime.pipelines import SCHEDULES, spec_of

CPU = torch.device("cpu")


class Torch:
    """torch.distributed as one process of a job sees it, with what it was asked to do."""

    def __init__(self, patch: pytest.MonkeyPatch, *, rank: int = 0, backend: str = "gloo") -> None:
        self.world = SimpleNamespace(bound_device_id=torch.device("cuda", 3))
        self.made: list[dict[str, Any]] = []
        self.bound: list[Any] = []
        self.moved: list[tuple[str, int, str]] = []
        self.gathered: list[Any] = []
        patch.setattr(dist, "group", SimpleNamespace(WORLD=self.world))
        patch.setattr(dist, "new_group", self.new_group)
        patch.setattr(dist, "get_rank", lambda: rank)
        patch.setattr(dist, "get_backend", lambda group=None: backend)
        patch.setattr(dist, "isend", lambda _, peer, group: self.move("send", peer, group))
        patch.setattr(dist, "irecv", lambda _, peer, group: self.move("receive", peer, group))
        patch.setattr(dist, "all_gather", self.all_gather)
        patch.setattr(dist, "get_world_size", lambda group=None: len(self.gathered))
        patch.setattr(dist, "get_process_group_ranks", lambda group: list(range(len(self.gathered))))

    def new_group(self, ranks: list[int], **options: Any) -> str:
        """As torch's."""
        self.made.append({"ranks": ranks, **options})
        self.bound.append(self.world.bound_device_id)
        return f"{options['group_desc']} {ranks}"

    def move(self, what: str, peer: int, group: str) -> SimpleNamespace:
        """A transfer of one element."""
        self.moved.append((what, peer, group))
        return SimpleNamespace(wait=lambda: None)

    def all_gather(self, everybody: list[torch.Tensor], mine: torch.Tensor, group: Any = None) -> None:
        """What the ranks bring."""
        for tensor, words in zip(everybody, self.gathered, strict=True):
            tensor.copy_(torch.tensor(words, dtype=mine.dtype))


def test_groups_are_made_without_the_bound_device_which_is_there_again_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = Torch(monkeypatch)
    new_group([0, 1], name="forward")
    assert (fake.bound, fake.world.bound_device_id) == ([None], torch.device("cuda", 3))
    assert fake.made[0]["group_desc"] == "quartet_forward"
    assert fake.made[0]["pg_options"] is None

    monkeypatch.setattr(dist, "new_group", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        new_group([0, 1], name="forward")
    assert fake.world.bound_device_id == torch.device("cuda", 3)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch is built without NCCL")
def test_nccl_gets_a_stream_of_high_priority_few_ctas_and_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = Torch(monkeypatch, backend="nccl")
    new_group([0, 1], name="backward", timeout=timedelta(seconds=77))
    options = fake.made[0]["pg_options"]
    assert options.is_high_priority_stream
    assert options.config.max_ctas == 8
    assert options._timeout == timedelta(seconds=77)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_communicator_of_a_program_is_made_before_it_runs(name: str) -> None:
    """Each device does its part of one common order, in which nothing can wait in a circle."""
    program = ProgramCache(spec_of(name, 3)).program(4)
    used = {
        (device, "send" if t.side == "SEND" else "receive", t.peer, program.groups[t.message.group])
        for device, row in enumerate(program.instructions)
        for instruction in row
        if isinstance(instruction, Post)
        for t in instruction.transfers
    }
    warmed: list[list[tuple[str, int, str]]] = []
    for device in range(3):
        with pytest.MonkeyPatch.context() as patch:
            fake = Torch(patch, rank=10 + device)
            fake.gathered = [[10, 11, 12]] * 3
            channels = Channels.open(program.placement, ranks=(10, 11, 12))
            assert channels.groups == tuple(f"quartet_{n} [10, 11, 12]" for n in program.groups)
            warmed.append([(w, p - 10, g.split()[0].removeprefix("quartet_")) for w, p, g in fake.moved])
    assert {(device, *move) for device, moves in enumerate(warmed) for move in moves} == used
    # All devices take the moves in one order: whoever is next in it finds its peer there.
    while any(warmed):
        device, peer = next(
            (device, moves[0][1])
            for device, moves in enumerate(warmed)
            if moves and warmed[moves[0][1]] and warmed[moves[0][1]][0][1:] == (device, moves[0][2])
        )
        assert {warmed[device].pop(0)[0], warmed[peer].pop(0)[0]} == {"send", "receive"}


def test_all_pipelines_of_the_job_are_made_by_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Torch(monkeypatch, rank=1)
    fake.gathered = [[0, 2], [1, 3], [0, 2], [1, 3]]
    channels = Channels.open((0, 1), ranks=(1, 3))
    assert [made["ranks"] for made in fake.made] == [[0, 2]] * 2 + [[1, 3]] * 2
    assert channels.groups == ("quartet_forward [1, 3]", "quartet_backward [1, 3]")
    assert fake.moved == [
        ("send", 3, "quartet_forward [1, 3]"),
        ("receive", 3, "quartet_backward [1, 3]"),
    ]


@settings(deadline=None, max_examples=20)
@given(name=st.sampled_from(sorted(SCHEDULES)), num_devices=st.integers(1, 4))
def test_a_placement_names_the_groups_of_its_programs(name: str, num_devices: int) -> None:
    spec = spec_of(name, num_devices)
    assert group_names(spec.placement) == ProgramCache(spec).program(2).groups


def program_of(name: str = "zb-v") -> Program:
    return ProgramCache(spec_of(name, 2)).program(4)


def words_of(program: Program) -> list[int]:
    return list(bytes.fromhex(program.digest))


def test_ranks_with_one_program_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Torch(monkeypatch)
    fake.gathered = [words_of(program_of())] * 4
    agree_on_program(program_of(), group=None, device=CPU)


def test_a_rank_with_another_order_is_named_instead_of_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Torch(monkeypatch)
    program = program_of()
    row = list(program.instructions[1])
    row[-2], row[-1] = row[-1], row[-2]
    other = replace(program, instructions=(program.instructions[0], tuple(row)))
    fake.gathered = [words_of(program), words_of(program), words_of(other), words_of(program)]
    with pytest.raises(
        PlanError, match=r"4 microbatches: ranks 0, 1, 3 made \w{12}, rank 2 made \w{12}; inst"
    ):
        agree_on_program(program, group=None, device=CPU)


def test_a_digest_tells_orders_and_placements_apart_and_not_processes() -> None:
    digests = [program_of(name).digest for name in ("zb-v", "v-half", "interleaved", "gpipe")]
    assert len(set(digests)) == 4
    assert program_of().digest == digests[0]
