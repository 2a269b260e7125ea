"""Plans and schedules for the tests' small model, and runs of several processes."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.deepspeed.pipeline import unit_costs
from quartet_plugin.launchers.server_command import ServerCommand, server_command
from quartet_plugin.model import plan as plans
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import (
    Baseline,
    MadeFor,
    NodeInfo,
    Plan,
    Provenance,
    ScheduleChoice,
    ScheduleName,
    Slot,
    Split,
)
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.protocol.environment import CPU_INSTRUCTIONS, CPU_SETTINGS
from quartet_plugin.schedule.choice import choice_of
from quartet_plugin.schedule.files import write_schedule
from quartet_plugin.schedule.named import named
from quartet_plugin.schedule.schedule import Schedule
from tests import warm_ranks
from tests.megatron.support import run_forked

ROOT = Path(__file__).parents[2]
# How users start two ranks.
STARTERS = ("deepspeed --num_gpus 2", f"{sys.executable} -m torch.distributed.run --nproc-per-node 2")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--rdzv-backend", "c10d"]
TIMEOUT_S = 280


def shape(num_layers: int = 4) -> ModelShape:
    """What the adapter reads off the tests' model."""
    return ModelShape(
        num_layers=num_layers,
        hidden_size=32,
        ffn_hidden_size=128,
        num_attention_heads=2,
        num_query_groups=2,
        kv_channels=16,
        seq_length=16,
        vocab_size=96,
        max_position_embeddings=16,
        gated_ffn=False,
        tied_embeddings=False,
        position_embedding="learned_absolute",
    )


def layout(
    pipeline: int, *, world: int, chunks: int = 1, micro_batch: int = 2, is_sharded: bool = False
) -> Layout:
    """A pipeline x data layout."""
    return Layout(
        tensor_parallel=1,
        pipeline_parallel=pipeline,
        data_parallel=world // pipeline,
        virtual_stages=chunks,
        context_parallel=1,
        expert_parallel=1,
        micro_batch_size=micro_batch,
        sequence_parallel=False,
        distributed_optimizer=is_sharded,
        recompute="none",
    )


def plan(
    split: Sequence[int],
    *,
    planned: Layout,
    own: Layout,
    batch: int,
    order: Sequence[int] | None = None,
    schedule: Schedule | None = None,
    group: int | None = None,
) -> Plan:
    """A plan for the tests' model on this host; `order[r]` is the local slot that plays RANK r.

    Without a `schedule`, several chunks a device take turns in groups of `group` microbatches.
    """
    world, num_layers = own.world_size, sum(split)
    order = range(world) if order is None else order
    name: ScheduleName = "1f1b" if planned.pipeline_parallel > 1 else "no-pipelining"
    choice = ScheduleChoice(name=name if group is None else "interleaved", group=group)
    if schedule is not None:
        bounds = [0]
        for count in schedule.layers_per_stage or ():
            bounds.append(bounds[-1] + count)
        choice = ScheduleChoice(
            name="custom", custom=choice_of(schedule, unit_costs(bounds, schedule.placement))
        )
    even = [num_layers // own.pipeline_parallel] * own.pipeline_parallel
    return Plan(
        made_for=MadeFor(
            framework="deepspeed",
            framework_version=version("deepspeed").partition("+")[0],
            shape=shape(num_layers),
            global_batch_size=batch,
            baseline=Baseline(
                layout=own,
                split=Split(transformer_layers_per_stage=tuple(even)),
                schedule=ScheduleChoice(name="1f1b" if own.pipeline_parallel > 1 else "no-pipelining"),
            ),
            world_size=world,
            nodes=(NodeInfo(host=socket.gethostname(), node_class=f"cpu x{world}", num_slots=world),),
        ),
        shape=shape(num_layers),
        layout=planned,
        split=Split(transformer_layers_per_stage=tuple(split)),
        schedule=choice,
        mapping=plans.Mapping(slots=tuple(Slot(node=0, local=local) for local in order)),
        provenance=Provenance(run="test", trial=1, seed=0, quartet_version="0"),
    )


def schedule(name: str, devices: int, microbatches: int, entries: Sequence[int]) -> Schedule:
    """A named schedule with a split that counts embedding and head."""
    made = named(name, num_devices=devices, num_microbatches=microbatches)
    return replace(made, layers_per_stage=tuple(entries))


def schedule_file(folder: Path, made: Schedule) -> str:
    """Written down; returns its path."""
    path = folder / f"schedule-{len(list(folder.iterdir()))}.json"
    write_schedule(path, made)
    return str(path)


def environment() -> dict[str, str]:
    """For processes of a test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QUARTET")}
    settings = {"OMP_NUM_THREADS": "1", CPU_INSTRUCTIONS: CPU_SETTINGS[CPU_INSTRUCTIONS]}
    return {**kept, **settings, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}


def run_ranks(words: Sequence[str], *, log: Path, **more: str) -> tuple[int, str]:
    """Run torchrun with `words`, its ranks forked, in an environment with `more`: exit code and output."""
    return run_forked(
        [*TORCHRUN, *words],
        {**environment(), **more},
        timeout_s=TIMEOUT_S,
        log=log,
        framework=warm_ranks.DEEPSPEED,
    )


def command_of(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> ServerCommand | str:
    """The server of a command, the same in every test."""
    return server_command(
        argv, env={name: value for name, value in env.items() if name != "PYTEST_CURRENT_TEST"}, cwd=cwd
    )


def train(folder: Path, *, processes: int, options: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train with each of the options in the same processes; returns what rank 0 saw of each."""
    number = len(list(folder.iterdir()))
    given, output = folder / f"options-{number}.json", folder / f"output-{number}.json"
    given.write_text(json.dumps(list(options)), encoding="utf-8")
    words = [f"--nproc-per-node={processes}", "--rdzv-endpoint=localhost:0"]
    words += ["-m", "tests.deepspeed.train_rank", str(given), str(output)]
    code, said = run_ranks(words, log=folder / f"log-{number}")
    assert code == 0, said[-4000:]
    results: list[dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))
    return results


def prepare_launchers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this test start commands as users do, and make real text for them in `folder`."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    text_in(folder)


def text_in(folder: Path) -> Path:
    """The prefix of real text in `folder`, which is made where it is not there yet."""
    prefix = folder / "text"
    if not prefix.with_suffix(".idx").exists():
        script = [str(ROOT / "examples" / "prepare_data.py"), str(prefix), "--max-mb", "0.2"]
        subprocess.run([sys.executable, *script], check=True, capture_output=True)
    return prefix
