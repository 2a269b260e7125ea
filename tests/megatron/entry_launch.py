"""Starts the example script through the drop-in entry under real torchrun, and makes plans for it."""

import json
import secrets
import shlex
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

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
from tests.megatron import support

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "pretrain_gpt.py"
SHAPE = ModelShape(
    num_layers=6,
    hidden_size=32,
    ffn_hidden_size=128,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=8,
    seq_length=32,
    vocab_size=128,
    max_position_embeddings=32,
    gated_ffn=False,
    tied_embeddings=True,
    position_embedding="learned_absolute",
)
ENTRY = ("-m", "quartet_plugin.megatron")
GLOBAL_BATCH_SIZE = 8
# A user's command: nothing in it is about pipelines. With two TP ranks Megatron would pad it to 256.
MEGATRON_FLAGS = shlex.split("""
    --num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 8 --mock-data --tokenizer-type NullTokenizer --vocab-size 127
    --train-iters 20 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --clip-grad 1.0 --log-interval 1
    --eval-interval 100 --eval-iters 1
""")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a start left behind; `ranks`, `failures`, `beats` and `sheets` are its files by launch rank."""

    code: int
    output: str
    ranks: Mapping[int, dict[str, Any]]
    failures: Mapping[int, dict[str, Any]]
    beats: Mapping[int, dict[str, Any]]
    sheets: Mapping[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def told(self) -> list[str]:
        """The lines that the plugin printed, without the launcher's prefixes."""
        return [
            line[line.index("quartet: ") :] for line in self.output.splitlines() if "quartet: " in line[:30]
        ]

    def losses(self) -> list[float]:
        """The loss of every iteration, from a rank that has it."""
        for content in self.ranks.values():
            values = [step["loss"] for step in content["iterations"]]
            if None not in values:
                return values
        raise AssertionError("no rank has a loss")

    def grad_norms(self) -> list[float]:
        """The gradient norm of every iteration; all ranks must have the same."""
        norms = [[step["grad_norm"] for step in content["iterations"]] for content in self.ranks.values()]
        assert all(norm == norms[0] for norm in norms)
        return norms[0]

    def expert_loads(self) -> list[Counter[tuple[str, int]]]:
        """The tokens of every iteration by part of the model and expert, over all ranks."""
        loads: list[Counter[tuple[str, int]]] = []
        for steps in zip(*(sheet["steps"] for sheet in self.sheets.values()), strict=True):
            loads.append(Counter())
            for step in steps:
                for part, tokens in (step.get("expert_tokens") or {}).items():
                    loads[-1].update({(part, expert): count for expert, count in enumerate(tokens)})
        return loads


def make_plan(
    *,
    split: Sequence[int],
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    context: int = 1,
    chunks: int = 1,
    micro_batch: int = 2,
    group: int | None = None,
    order: Sequence[int] | None = None,
    shape: ModelShape = SHAPE,
    made_for_shape: ModelShape = SHAPE,
    global_batch_size: int = GLOBAL_BATCH_SIZE,
    framework_version: str = "0.19.2",
    hosts: Sequence[str] | None = None,
) -> Plan:
    """A plan for the command above; `order[r]` is the local slot of rank r, all slots over `hosts` evenly."""
    world_size = tensor * pipeline * data * context
    names = list(hosts) if hosts is not None else [socket.gethostname()]
    per_node = world_size // len(names)
    slots = [Slot(node=index // per_node, local=index % per_node) for index in order or range(world_size)]
    name: ScheduleName = "no-pipelining" if pipeline == 1 else "interleaved" if chunks > 1 else "1f1b"
    layout = Layout(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        data_parallel=data,
        virtual_stages=chunks,
        context_parallel=context,
        expert_parallel=1,
        micro_batch_size=micro_batch,
        sequence_parallel=False,
        distributed_optimizer=False,
        recompute="none",
    )
    counts = Split(transformer_layers_per_stage=tuple(split))
    schedule = ScheduleChoice(name=name, group=group)
    return Plan(
        made_for=MadeFor(
            framework="megatron-core",
            framework_version=framework_version,
            shape=made_for_shape,
            global_batch_size=global_batch_size,
            baseline=Baseline(layout=layout, split=counts, schedule=schedule),
            world_size=world_size,
            nodes=tuple(NodeInfo(host=host, node_class="cpu", num_slots=per_node) for host in names),
        ),
        shape=shape,
        layout=layout,
        split=counts,
        schedule=schedule,
        mapping=plans.Mapping(slots=tuple(slots)),
        provenance=Provenance(run="test", trial=0, seed=0, quartet_version="0.1.0"),
    )


def write_trial(
    folder: Path,
    *,
    warmup: int = 0,
    measure: int = 3,
    plan: Plan | None = None,
    weights: Path | None = None,
    save_weights: Path | None = None,
) -> Path:
    """A trial.json in `folder`, as a runner writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "schema_version": 1,
        "attempt_id": secrets.token_hex(16),
        "folder": str(folder),
        "warmup": warmup,
        "measure": measure,
        "plan_key": None if plan is None else plan.key,
    }
    for name, place in (("weights", weights), ("save_weights", save_weights)):
        if place is not None:
            content[name] = str(place)
    path = folder / "trial.json"
    path.write_text(json.dumps(content))
    return path


def launch(
    num_processes: int,
    flags: Sequence[str],
    *,
    script: Path = SCRIPT,
    folder: Path | None = None,
    torchrun: Sequence[str] = (),
    entry: Sequence[str] = ENTRY,
    is_cold: bool = False,
    timeout_s: float = 240.0,
) -> Launch:
    """`torchrun -m quartet_plugin.megatron SCRIPT FLAGS`; the trial's files are read from `folder`.

    Ranks of the CPU device are forked, unless `is_cold`.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_processes)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *torchrun),
        *(*entry, str(script), *flags),
    ]
    # What is said of other starts needs a start.
    is_warm = not is_cold and entry[0] == "-m" and ("--quartet-device", "cpu") in pairwise(flags)
    run = support.run_forked if is_warm else support.run_cold
    with tempfile.TemporaryDirectory() as place:
        code, output = run(
            command, support.launch_environment(), timeout_s=timeout_s, log=Path(place) / "log"
        )

    def read(ending: str) -> dict[int, dict[str, Any]]:
        if folder is None:
            return {}
        paths = {rank: folder / f"rank-{rank}.{ending}" for rank in range(num_processes)}
        return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}

    return Launch(
        code=code,
        output=output,
        ranks=read("json"),
        failures=read("err.json"),
        beats=read("beat.json"),
        sheets=read("parity.json"),
    )
