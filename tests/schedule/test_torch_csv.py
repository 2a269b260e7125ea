"""The CSV and PyTorch's own loader and validator."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import PlanError
from quartet_plugin.schedule.action import Action, ActionKind
from quartet_plugin.schedule.files import to_csv
from quartet_plugin.schedule.named import named
from quartet_plugin.schedule.schedule import Schedule
from tests.schedule.pipelines import random_placement, random_schedule, with_random_pairs


def make(seed: int, placement: list[int] | None = None, num_microbatches: int = 5) -> Schedule:
    rng = np.random.default_rng(seed)
    placement = placement or random_placement(rng, int(rng.integers(1, 5)), int(rng.integers(1, 4)))
    return random_schedule(rng, placement=placement, num_microbatches=num_microbatches)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 100_000), num_microbatches=st.integers(1, 12))
def test_every_action_is_written_in_its_devices_line(seed: int, num_microbatches: int) -> None:
    schedule = make(seed, num_microbatches=num_microbatches)
    rows = [[Action.parse(cell) for cell in line.split(",")] for line in to_csv(schedule).splitlines()]
    assert rows == [schedule.actions(device) for device in range(schedule.num_devices)]


def test_two_copies_of_the_model_cannot_be_written() -> None:
    order = np.array([0], dtype=np.int64)
    schedule = Schedule(
        num_devices=1,
        num_microbatches=1,
        placement=(0,),
        orders=(order,),
        routes=((0,), (0,)),
        route_of_microbatch=(0,),
    )
    with pytest.raises(PlanError, match="two copies"):
        to_csv(schedule)


LOADER = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules

dist.init_process_group("fake", rank=0, world_size=int(sys.argv[1]), store=dist.HashStore())
for argument in sys.argv[2:]:
    path, num_microbatches, *devices = argument.split(",")
    placement = list(map(int, devices))
    stages = [
        PipelineStage(torch.nn.Linear(2, 2), index, len(placement), torch.device("cpu"))
        for index in range(len(placement)) if placement[index] == 0
    ]
    runtime = schedules._PipelineScheduleRuntime(stages, int(num_microbatches), loss_fn=lambda a, b: a.sum())
    runtime._load_csv(path, format="compute_only")
    sizes = (int(sys.argv[1]), len(placement), int(num_microbatches))
    found = schedules._validate_schedule(runtime.pipeline_order, *sizes)
    assert found == dict(enumerate(placement)), found
    for row in runtime.pipeline_order.values():
        print(",".join(map(str, row)))
made = schedules.ScheduleDualPipeV.__new__(schedules.ScheduleDualPipeV)
for made.pp_group_size, made._n_microbatches in SIZES:
    for rank in range(made.pp_group_size):
        print(",".join(map(str, made._calculate_single_rank_operations(rank))))
"""
# Devices and microbatches of DualPipeV.
SIZES = [(1, 2), (2, 4), (2, 7), (3, 6), (4, 8), (4, 10), (4, 19), (6, 12), (8, 32)]


def cases() -> Iterator[tuple[str, Schedule]]:
    """A V, a loop and a linear placement, with full and split backwards, alone and in overlapped pairs."""
    for name, placement in (("v", [0, 1, 2, 2, 1, 0]), ("loop", [0, 1, 2, 0, 1, 2]), ("linear", [0, 1, 2])):
        schedule = make(1, placement, num_microbatches=6)
        kinds = {a.kind for d in range(schedule.num_devices) for a in schedule.actions(d)}
        assert kinds == set(ActionKind)
        yield name, schedule
        paired = with_random_pairs(np.random.default_rng(1), schedule)
        assert "OVERLAP_F_B" in to_csv(paired)
        yield f"{name} in pairs", paired


def test_pytorch_loads_and_validates_it_and_has_the_same_dual_pipe_v(tmp_path: Path) -> None:
    """All in one process, which then writes PyTorch's own DualPipeV, whose every action must be ours."""
    arguments, texts = ["3"], []
    for name, schedule in cases():
        placement = list(schedule.placement)
        path = tmp_path / f"{name}.csv"
        path.write_text(to_csv(schedule))
        texts.append(to_csv(schedule))
        arguments.append(",".join(map(str, [path, 6, *placement])))
    texts += [
        to_csv(named("dualpipev", num_devices=p, num_microbatches=m, with_pairs=True)) for p, m in SIZES
    ]
    loader = LOADER.replace("SIZES", repr(SIZES))
    done = subprocess.run(
        [sys.executable, "-c", loader, *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    assert done.stdout == "".join(texts)
