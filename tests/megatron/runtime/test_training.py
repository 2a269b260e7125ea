"""Real Megatron on CPU with our schedules: losses and gradient norms of ten steps are one process's."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet_plugin.cost import held_bytes
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.model.costs import Costs, LayerCost
from quartet_plugin.schedule.choice import choice_of
from quartet_plugin.schedule.files import write_schedule
from quartet_plugin.schedule.named import named
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.search.problem import ScheduleProblem
from quartet_plugin.schedule.search.refinement import improve_by_insertion
from tests.cost.runs import ROW
from tests.cost.runs import run as run_of_row
from tests.megatron import support
from tests.megatron.runtime.rank_server import TIMED_OUT, RankServer
from tests.megatron.runtime.rank_with_schedule import preparation
from tests.runtime.pipelines import stage_costs

_TOLERANCE = 1e-6
_TOLERANCE_ACROSS_TP = 5e-6
# Ten layers fill the twelve stages of a snake with three chunks on four devices.
_MODEL = "--num-layers 10 --hidden-size 32 --seq-length 32 --max-position-embeddings 32"
_OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
# Several bucket groups in the first stage, where Megatron makes more than one.
_BUCKETS = "--ddp-bucket-size 8000"
_TRAIN_ITERS = 10
_NUM_MICROBATCHES = 8

TWO, FOUR = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
LINEAR_2 = f"{TWO} --pipeline-model-parallel-layout E{'t' * 6}|ttttL"
EVEN_2 = f"{TWO} --pipeline-model-parallel-layout Ettttt|tttttL"
CHUNKS_2 = f"{TWO} --pipeline-model-parallel-layout Ettt|tttt|tt|tL"
SIX_2 = f"{TWO} --pipeline-model-parallel-layout Ett|tt|t|tt|tt|tL"
LINEAR_4 = f"{FOUR} --pipeline-model-parallel-layout Ett|ttt|ttt|ttL"
CHUNKS_4 = f"{FOUR} --pipeline-model-parallel-layout Et|tt|t|t|tt|t|t|tL"
TWELVE_4 = f"{FOUR} --pipeline-model-parallel-layout E{'|t' * 10}|L"
# With a layer of multi-token prediction.
MTP_2 = f"{TWO} --pipeline-model-parallel-layout E{'t' * 7}|tttmL"
MTP_CHUNKS_2 = f"{TWO} --pipeline-model-parallel-layout Etttt|tttt|t|tmL"
MTP_CHUNKS_4 = f"{FOUR} --pipeline-model-parallel-layout Et|tt|t|t|tt|t|tt|mL"
V_2, V_4 = "0-1-1-0", "0-1-2-3-3-2-1-0"
SNAKE_2, SNAKE_4 = "0-1-1-0-0-1", "0-1-2-3-3-2-1-0-0-1-2-3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run; `variant` names flags that its reference shares."""

    order: str
    flags: str
    num_processes: int = 2
    variant: str = ""
    tolerance: float = _TOLERANCE


UNTIED = "--untie-embeddings-and-output-weights"
MTP = f"{UNTIED} --position-embedding-type rope --mtp-num-layers 1"
# Megatron-Core ignores --rampup-batch-size from 0.18.2 on. Thresholds are tokens: three steps of 4 sequences,
# three of 6, then 8 each.
RAMP = "--step-batch-size-schedule 0:4,384:6,960:8"
RAMPED_BATCHES = [4, 4, 4, 6, 6, 6, 8, 8, 8, 8]
EVALUATED = "--eval-iters 2 --eval-interval 4 --split 80,20,0"
PER_TOKEN = "--calculate-per-token-loss"
BF16 = "--bf16"
# Eight experts, two of them a token's, behind a dense layer; a bias of experts writes into a view.
EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32 "
    "--moe-layer-freq ([0]*1+[1]*9) --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 "
    "--moe-router-dtype fp32 --moe-token-dispatcher-type alltoall --disable-bias-linear"
)
MTP_EXPERTS = f"{MTP} {EXPERTS}"
# Those with other weights, the most words first.
VARIANTS = (MTP_EXPERTS, MTP, UNTIED, EXPERTS)
EP2 = "--expert-model-parallel-size 2"
CP2 = "--context-parallel-size 2"
FP16 = "--fp16 --initial-loss-scale 4096"

FUSED = "--gradient-accumulation-fusion"
# The flags of a production command with Transformer Engine's layers.
ENGINE = f"--transformer-impl transformer_engine {FUSED} {_OVERLAP}"
ENGINE_TP2 = f"{ENGINE} --tensor-model-parallel-size 2 --sequence-parallel"

# A few that touch everything once; the others run with the slow tests.
CORE = {
    "zb-h1 pp2 uneven": Case(order="zb-h1:0-1", flags=LINEAR_2),
    "zb-v pp2 tied": Case(order=f"zb-v:{V_2}", flags=CHUNKS_2),
    "snake-3 pp2": Case(order=f"plain:{SNAKE_2}", flags=SIX_2),
    "zb-v pp2 dp2 both overlaps": Case(
        order=f"zb-v:{V_2}", flags=f"{CHUNKS_2} {_OVERLAP} {_BUCKETS}", num_processes=4
    ),
    "searched pp2": Case(order=f"searched:{V_2}", flags=CHUNKS_2),
    "zb-v pp2 ramp-up": Case(order=f"zb-v:{V_2}", flags=CHUNKS_2, variant=RAMP),
    "zb-v pp2 evaluated": Case(order=f"zb-v:{V_2}", flags=CHUNKS_2, variant=EVALUATED),
    "zb-v pp2 dp2 ep2 experts": Case(
        order=f"zb-v:{V_2}", flags=f"{CHUNKS_2} {EP2} {_OVERLAP}", num_processes=4, variant=EXPERTS
    ),
    "1f1b pp2 dp2 fused as a trial": Case(
        order="1f1b:0-1:tracked", flags=f"{EVEN_2} {FUSED} {_OVERLAP}", num_processes=4
    ),
    "zb-h1 pp2 tp2 engine as a trial": Case(
        order="zb-h1:0-1:tracked",
        flags=f"{LINEAR_2} {ENGINE_TP2} {_BUCKETS}",
        num_processes=4,
        tolerance=_TOLERANCE_ACROSS_TP,
    ),
}
MATRIX = {
    "zb-v pp2 dp2 fused as a trial": Case(
        order=f"zb-v:{V_2}:tracked", flags=f"{CHUNKS_2} {FUSED} {_OVERLAP}", num_processes=4
    ),
    "zb-h1 pp2 dp2 ep2 experts as a trial": Case(
        order="zb-h1:0-1:tracked", flags=f"{LINEAR_2} {EP2}", num_processes=4, variant=EXPERTS
    ),
    "zb-h1 pp2 tp2 experts of one device": Case(
        order="zb-h1:0-1",
        flags=f"{LINEAR_2} {EP2} --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-tensor-parallel-size 1",
        num_processes=4,
        variant=EXPERTS,
        tolerance=_TOLERANCE_ACROSS_TP,
    ),
    "zb-v pp2 dp2 engine as a trial": Case(
        order=f"zb-v:{V_2}:tracked", flags=f"{CHUNKS_2} {ENGINE}", num_processes=4
    ),
    "1f1b pp2 dp2 engine as a trial": Case(
        order="1f1b:0-1:tracked", flags=f"{EVEN_2} {ENGINE}", num_processes=4
    ),
    "zb-h1 pp2 dp2 engine unfused": Case(
        order="zb-h1:0-1",
        flags=f"{LINEAR_2} --transformer-impl transformer_engine {_OVERLAP}",
        num_processes=4,
    ),
    "zb-h1 pp4 engine": Case(order="zb-h1:0-1-2-3", flags=f"{LINEAR_4} {ENGINE}", num_processes=4),
    "zb-h1 pp2 engine without biases": Case(
        order="zb-h1:0-1", flags=f"{LINEAR_2} {ENGINE}", variant="--disable-bias-linear"
    ),
    "zb-v pp2 tp2 engine": Case(
        order=f"zb-v:{V_2}",
        flags=f"{CHUNKS_2} {ENGINE_TP2}",
        num_processes=4,
        tolerance=_TOLERANCE_ACROSS_TP,
    ),
    "family pp2 tp2 engine": Case(
        order=f"family:{V_2}",
        flags=f"{CHUNKS_2} {ENGINE_TP2}",
        num_processes=4,
        tolerance=_TOLERANCE_ACROSS_TP,
    ),
    "zb-v pp2 engine ramp-up": Case(order=f"zb-v:{V_2}", flags=f"{CHUNKS_2} {ENGINE}", variant=RAMP),
    "zb-v pp2 dp2 engine bf16": Case(
        order=f"zb-v:{V_2}:tracked",
        flags=f"{CHUNKS_2} {ENGINE}",
        num_processes=4,
        variant=BF16,
        tolerance=1e-2,
    ),
    "searched pp4": Case(order=f"searched:{V_4}", flags=CHUNKS_4, num_processes=4),
    "gpipe pp2": Case(order="gpipe:0-1", flags=EVEN_2),
    "1f1b pp2": Case(order="1f1b:0-1", flags=EVEN_2),
    "interleaved pp2": Case(order="interleaved:0-1-0-1", flags=CHUNKS_2),
    "breadth-first pp2": Case(order="breadth-first:0-1-0-1", flags=CHUNKS_2),
    "v-half pp2": Case(order=f"v-half:{V_2}", flags=CHUNKS_2),
    "family pp2": Case(order=f"family:{V_2}", flags=CHUNKS_2),
    "family list pp2": Case(order="family:0-1-0-1-1-0", flags=SIX_2),
    "zb-v pp2 through host memory": Case(order=f"zb-v:{V_2}:host", flags=CHUNKS_2),
    "gpipe pp4": Case(order="gpipe:0-1-2-3", flags=LINEAR_4, num_processes=4),
    "1f1b pp4": Case(order="1f1b:0-1-2-3", flags=LINEAR_4, num_processes=4),
    "zb-h1 pp4": Case(order="zb-h1:0-1-2-3", flags=LINEAR_4, num_processes=4),
    "interleaved pp4": Case(order="interleaved:0-1-2-3-0-1-2-3", flags=CHUNKS_4, num_processes=4),
    "breadth-first pp4": Case(order="breadth-first:0-1-2-3-0-1-2-3", flags=CHUNKS_4, num_processes=4),
    "zb-v pp4": Case(order=f"zb-v:{V_4}", flags=CHUNKS_4, num_processes=4),
    "v-half pp4": Case(order=f"v-half:{V_4}", flags=CHUNKS_4, num_processes=4),
    "snake-3 pp4": Case(order=f"plain:{SNAKE_4}", flags=TWELVE_4, num_processes=4),
    "family pp4": Case(order=f"family:{V_4}", flags=CHUNKS_4, num_processes=4),
    "zb-v untied pp2": Case(order=f"zb-v:{V_2}", flags=CHUNKS_2, variant=UNTIED),
    "zb-h1 untied pp2": Case(order="zb-h1:0-1", flags=LINEAR_2, variant=UNTIED),
    "zb-h1 mtp pp2": Case(order="zb-h1:0-1", flags=MTP_2, variant=MTP),
    "zb-v mtp pp2 dp2 both overlaps": Case(
        order=f"zb-v:{V_2}", flags=f"{MTP_CHUNKS_2} {_OVERLAP}", num_processes=4, variant=MTP
    ),
    "zb-v mtp pp2": Case(order=f"zb-v:{V_2}", flags=MTP_CHUNKS_2, variant=MTP),
    "zb-h1 mtp pp2 as a trial": Case(order="zb-h1:0-1:tracked", flags=MTP_2, variant=MTP),
    "zb-h1 mtp tp2 sequence parallel": Case(
        order="zb-h1:0-1",
        flags=f"{MTP_2} --tensor-model-parallel-size 2 --sequence-parallel",
        num_processes=4,
        variant=MTP,
        tolerance=_TOLERANCE_ACROSS_TP,
    ),
    "zb-h1 mtp pp2 dp2 engine": Case(
        order="zb-h1:0-1", flags=f"{MTP_2} {ENGINE}", num_processes=4, variant=MTP
    ),
    "zb-v mtp pp2 dp2 ep2 experts": Case(
        order=f"zb-v:{V_2}", flags=f"{MTP_CHUNKS_2} {EP2}", num_processes=4, variant=MTP_EXPERTS
    ),
    "v-half mtp pp4": Case(order=f"v-half:{V_4}", flags=MTP_CHUNKS_4, num_processes=4, variant=MTP),
    "zb-v per-token loss": Case(order=f"zb-v:{V_2}", flags=CHUNKS_2, variant=PER_TOKEN),
    "zb-h1 dp2 overlap": Case(
        order="zb-h1:0-1", flags=f"{LINEAR_2} --overlap-grad-reduce {_BUCKETS}", num_processes=4
    ),
    "zb-h1 dp2 both overlaps": Case(
        order="zb-h1:0-1", flags=f"{LINEAR_2} {_OVERLAP} {_BUCKETS}", num_processes=4
    ),
    "zb-v dp2 gathers that are not aligned": Case(
        order=f"zb-v:{V_2}", flags=f"{CHUNKS_2} {_OVERLAP} --no-align-param-gather", num_processes=4
    ),
    "zb-v dp2 distributed optimizer": Case(
        order=f"zb-v:{V_2}", flags=f"{CHUNKS_2} --use-distributed-optimizer", num_processes=4
    ),
    "interleaved dp2 both overlaps": Case(
        order="interleaved:0-1-0-1", flags=f"{CHUNKS_2} {_OVERLAP}", num_processes=4
    ),
    "zb-v dp2 both overlaps ramp-up": Case(
        order=f"zb-v:{V_2}", flags=f"{CHUNKS_2} {_OVERLAP}", num_processes=4, variant=RAMP
    ),
    "zb-h1 tp2": Case(
        order="zb-h1:0-1",
        flags=f"{LINEAR_2} --tensor-model-parallel-size 2",
        num_processes=4,
        tolerance=_TOLERANCE_ACROSS_TP,
    ),
    "zb-v tp2 sequence parallel": Case(
        order=f"zb-v:{V_2}",
        flags=f"{CHUNKS_2} --tensor-model-parallel-size 2 --sequence-parallel",
        num_processes=4,
        tolerance=_TOLERANCE_ACROSS_TP,
    ),
    "zb-h1 pp2 cp2 uneven": Case(order="zb-h1:0-1", flags=f"{LINEAR_2} {CP2}", num_processes=4),
    "zb-v pp2 cp2 both overlaps": Case(
        order=f"zb-v:{V_2}", flags=f"{CHUNKS_2} {CP2} {_OVERLAP}", num_processes=4
    ),
    "zb-v pp2 cp2 ep2 experts": Case(
        order=f"zb-v:{V_2}", flags=f"{CHUNKS_2} {CP2} {EP2}", num_processes=4, variant=EXPERTS
    ),
    "zb-h1 tp4 sequence parallel": Case(
        order="zb-h1:0-1",
        flags=f"{LINEAR_2} --tensor-model-parallel-size 4 --sequence-parallel",
        num_processes=8,
        tolerance=_TOLERANCE_ACROSS_TP,
    ),
    "zb-h1 tp4 engine": Case(
        order="zb-h1:0-1",
        flags=f"{LINEAR_2} {ENGINE} --tensor-model-parallel-size 4 --sequence-parallel",
        num_processes=8,
        tolerance=_TOLERANCE_ACROSS_TP,
    ),
    "zb-v full recompute": Case(
        order=f"zb-v:{V_2}:whole",
        flags=f"{CHUNKS_2} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "zb-v bf16": Case(order=f"zb-v:{V_2}", flags=CHUNKS_2, variant=BF16, tolerance=1e-2),
    "zb-v bf16 dp2 both overlaps": Case(
        order=f"zb-v:{V_2}", flags=f"{CHUNKS_2} {_OVERLAP}", num_processes=4, variant=BF16, tolerance=1e-2
    ),
    "zb-v fp16": Case(order=f"zb-v:{V_2}", flags=CHUNKS_2, variant=FP16, tolerance=1e-2),
    "zb-v selective recompute": Case(
        order=f"zb-v:{V_2}", flags=f"{CHUNKS_2} --recompute-granularity selective"
    ),
}

# Cases of many processes, or near to others: `make test-nightly`.
LONG = {
    "zb-h1 pp2 tp2 experts of one device",
    "zb-v pp2 dp2 fused as a trial",
    "1f1b pp2 dp2 engine as a trial",
    "zb-h1 pp2 dp2 engine unfused",
    "zb-h1 pp4 engine",
    "zb-v pp2 tp2 engine",
    "family pp2 tp2 engine",
    "zb-v pp2 engine ramp-up",
    "zb-v pp2 dp2 engine bf16",
    "zb-v pp2 cp2 ep2 experts",
    "zb-h1 tp4 sequence parallel",
    "zb-h1 tp4 engine",
    "1f1b pp2",
    "breadth-first pp2",
    "family pp2",
    "gpipe pp2",
    "interleaved pp2",
    "v-half pp2",
    "zb-h1 dp2 overlap",
    "zb-h1 untied pp2",
    "zb-v bf16",
    "zb-h1 mtp pp2",
    "zb-v mtp pp2",
    "zb-h1 mtp tp2 sequence parallel",
    "zb-h1 mtp pp2 dp2 engine",
    "v-half mtp pp4",
    "1f1b pp4",
    "breadth-first pp4",
    "family pp4",
    "zb-h1 pp4",
    "interleaved dp2 both overlaps",
    "zb-h1 dp2 both overlaps",
    "zb-v dp2 both overlaps ramp-up",
    "zb-v dp2 distributed optimizer",
    "zb-v mtp pp2 dp2 both overlaps",
    "zb-v untied pp2",
    "zb-h1 tp2",
    "zb-h1 pp2 dp2 ep2 experts as a trial",
    "zb-v pp2 dp2 engine as a trial",
    "interleaved pp4",
    "zb-v pp4",
    "zb-h1 mtp pp2 as a trial",
    "zb-v pp2 cp2 both overlaps",
}


def training_flags(flags: str) -> list[str]:
    """The usual flags; Megatron refuses a global batch size beside a batch that changes in steps."""
    usual = support.TRAINING_FLAGS
    at = usual.index("--global-batch-size")
    return [*usual[:at], *usual[at + 2 :]] if RAMP in flags else usual


@dataclass(slots=True)
class References:
    """One process's training for every variant, made when first asked for."""

    folder: Path
    _data: Path | None = None
    _loading: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _runs: dict[str, support.Run] = field(default_factory=dict)
    _servers: dict[tuple[str, ...], RankServer] = field(default_factory=dict)

    def train(self, name: str, program: tuple[str, ...], flags: str, *, num_processes: int) -> support.Run:
        """A run of `program` from the same weights, with the same data."""
        folder = self.folder / name.replace(" ", "-")
        folder.mkdir()
        arguments = [
            *support.MODEL_FLAGS, *training_flags(flags), *shlex.split(f"{_MODEL} {flags}"),
            *("--train-iters", str(_TRAIN_ITERS), "--data-path", str(self.data)),
            *self.loading(next((variant for variant in VARIANTS if variant in flags), "")),
        ]  # fmt: skip
        words = [str(folder), *program, *arguments]
        code, output = self.server(preparation(words)).run(
            words, num_processes=num_processes, timeout_s=240, log=folder / "log"
        )
        assert code == 0, output[-3000:]
        assert "successfully loaded checkpoint" in output
        return support.Run(exit_code=code, output=output, steps=support.read_steps(folder))

    def server(self, flags: list[str]) -> RankServer:
        """What forks the ranks, started when first asked for."""
        return self._servers.get(tuple(flags)) or self._servers.setdefault(tuple(flags), RankServer(flags))

    def close(self) -> None:
        """End the servers."""
        for server in self._servers.values():
            server.close()

    @property
    def data(self) -> Path:
        """A small dataset."""
        if self._data is None:
            self._data = support.dataset(self.folder)
        return self._data

    def loading(self, variant: str) -> tuple[str, ...]:
        """Flags that start from the variant's weights."""
        if variant not in self._loading:
            folder = self.folder / f"weights{len(self._loading)}"
            folder.mkdir()
            flags = shlex.split(f"{_MODEL} {variant}")
            self._loading[variant] = support.save_weights(folder, *flags, data=self.data)
        return self._loading[variant]

    def run(self, variant: str) -> support.Run:
        """The variant on one process with Megatron's own schedule."""
        if variant not in self._runs:
            name = f"reference{len(list(self.folder.glob('reference*')))}"
            program = ("stock", str(support.PRETRAIN_SCRIPT))
            self._runs[variant] = self.train(name, program, variant, num_processes=1)
        return self._runs[variant]


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    references = References(tmp_path_factory.mktemp("runtime"))
    yield references
    references.close()


def check(references: References, name: str, case: Case) -> support.Run:
    reference = references.run(case.variant)
    order = case.order
    if order.startswith("searched:"):
        file = references.folder / f"{name.replace(' ', '-')}.schedule.json"
        write_schedule(file, searched_order(order.split(":")[1], layers=layers_of(case)))
        order = order.replace("searched", f"searched@{file}")
    program = (order, str(support.PRETRAIN_SCRIPT))
    run = references.train(name, program, f"{case.flags} {case.variant}", num_processes=case.num_processes)
    assert len(run.losses()) == _TRAIN_ITERS
    loss, norm = support.largest_deviation(run, reference)
    assert loss <= case.tolerance
    assert norm <= case.tolerance
    batches = [int(size) for size in re.findall(r"global batch size: +(\d+)", run.output)]
    assert batches == (RAMPED_BATCHES if case.variant == RAMP else [_NUM_MICROBATCHES] * _TRAIN_ITERS)
    folder = references.folder / name.replace(" ", "-")
    check_split(folder, case)
    check_reductions(folder, case)
    assert mtp_losses(run) == pytest.approx(mtp_losses(reference), rel=case.tolerance)
    assert len(mtp_losses(run)) == (_TRAIN_ITERS if MTP in case.variant else 0)
    return run


def mtp_losses(run: support.Run) -> list[float]:
    """What Megatron's log says of each iteration's further token."""
    return [float(loss) for loss in re.findall(r"mtp_1 loss: (\S+)", run.output)]


def check_reductions(folder: Path, case: Case) -> None:
    """From the second step with a number of microbatches on, reductions start inside of actions."""
    files = list(folder.glob("reductions-*"))
    assert len(files) == (case.num_processes if "--overlap-grad-reduce" in case.flags else 0)
    largest = 0
    for path in files:
        lines = [tuple(map(int, line.split())) for line in path.read_text().splitlines()]
        for count in {microbatches for microbatches, _, _ in lines}:
            steps = [(groups, started) for microbatches, groups, started in lines if microbatches == count]
            num_chunks = len(layers_of(case)) // (max(map(int, case.order.split(":")[1].split("-"))) + 1)
            assert {started for _, started in steps[:num_chunks]} == {0}
            assert all(started == groups for groups, started in steps[num_chunks:])
            largest = max(largest, *(groups for groups, _ in steps))
    assert largest > 1 or "--ddp-bucket-size" not in case.flags


def check_split(folder: Path, case: Case) -> None:
    """Where the order has W actions, its I left them work, and kept for it what the memory model says."""
    lines = [json.loads(line) for path in folder.glob("deferred-*") for line in path.read_text().splitlines()]
    is_split = case.order.startswith(("zb", "v-half", "family", "searched")) and ":whole" not in case.order
    assert bool(lines) == is_split
    layout = layers_of(case)
    if is_split and EXPERTS in case.variant:
        check_experts(lines, layout, expert_parallel=2)
    elif is_split:
        run = training_run(case)
        layer = [product[1:] for product in held_bytes.layer_products(run, experts=None)]
        _, head_input, head_gradient = held_bytes.head_product(run)
        joined = [held_bytes.joined_product(run)[1:]]
        for stage, _, kept in lines:
            layers, heads, further = (layout[stage].count(kind) for kind in "tLm")
            # The inputs of a head that predicts further tokens, too, are views of one tensor.
            head = [(head_input * (1 + further), head_gradient)] * (heads + further)
            expected = sorted(layer * (layers + further) + head + joined * further)
            assert sorted(map(tuple, kept)) == expected


def check_experts(lines: list[list[Any]], layout: list[str], *, expert_parallel: int) -> None:
    """Of every product of experts the inputs are kept; how many tokens they hold is the router's choice."""
    dense, experts = 2 + 2, 2 + 2 + 2 * (8 // expert_parallel)
    for stage, _, kept in lines:
        has_dense = "t" in layout[stage] and "t" not in "".join(layout[:stage])
        layers, heads, further = (layout[stage].count(kind) for kind in "tLm")
        expected = experts * (layers + further) + (dense - experts) * has_dense
        assert len(kept) == expected + heads + 2 * further


def training_run(case: Case) -> TrainingRun:
    """The case as the memory model takes it."""
    flags, words = f"{case.flags} {case.variant}", case.flags.split()
    tensor_parallel, context_parallel = (
        int(words[words.index(flag) + 1]) if flag in words else 1
        for flag in ("--tensor-model-parallel-size", "--context-parallel-size")
    )
    small = run_of_row(
        ROW,
        layers=10,
        hidden=32,
        heads=4,
        kv_heads=4,
        ffn=128,
        vocab=1024,
        seq_len=32,
        gbs=1,
        mbs=1,
        tp=tensor_parallel,
        cp=context_parallel,
        gpus=tensor_parallel * context_parallel,
        gpus_per_node=tensor_parallel * context_parallel,
        sp="--sequence-parallel" in flags,
        recompute="none",
    )
    software = replace(small.software, keeps_gathered_inputs="transformer_engine" in flags)
    return replace(small, half="bf16" if BF16 in flags or "--fp16" in flags else "fp32", software=software)


def layers_of(case: Case) -> list[str]:
    """The letters of every stage's layers."""
    return case.flags.split("-layout ")[1].split()[0].split("|")


def searched_order(placement: str, *, layers: list[str]) -> Schedule:
    """An order that insertion has changed, as a search leaves it."""
    devices = [int(device) for device in placement.split("-")]
    num_devices = max(devices) + 1
    names = ["embedding", *(f"layer.{n}" for n in range("".join(layers).count("t"))), "head"]
    # The head weighs as much as three layers.
    times = [(0.2, 0.0, 0.2), *[(1.0, 1.1, 0.9)] * (len(names) - 2), (3.0, 3.0, 3.0)]
    costs = Costs(
        num_devices=num_devices,
        num_microbatches=_NUM_MICROBATCHES,
        layers=tuple(
            LayerCost(name=name, forward_s=f, input_grad_s=i, weight_grad_s=w, activation_bytes=1.0)
            for name, (f, i, w) in zip(names, times, strict=True)
        ),
        device_slowdown=np.ones(num_devices),
        transfer_s=0.1 * (1 - np.eye(num_devices)),
        memory_limit_bytes=None,
        weight_grad_held_fraction=0.5,
        backward_fused_s=None,
    )
    start = replace(
        named("v-half", num_devices=num_devices, num_microbatches=_NUM_MICROBATCHES),
        layers_per_stage=tuple(len(text) for text in layers),
    )
    problem = ScheduleProblem.of(costs, has_period_objective=False, allow_empty=False, has_free_split=False)
    (_, found), _ = improve_by_insertion((start, 300), 3, problem=problem, target=0.0)
    assert any(not np.array_equal(*rows) for rows in zip(found.orders, start.orders, strict=True))
    # No name and no point of the family makes it again: a plan has it written out.
    assert choice_of(found, stage_costs(tuple(devices))).orders is not None
    return found


def printed(run: support.Run, pattern: str) -> list[float]:
    """Numbers in Megatron's own lines, which only the last global rank prints."""
    return [float(value) for value in re.findall(pattern, run.output)]


@pytest.mark.parametrize("name", CORE)
def test_core(name: str, references: References) -> None:
    case = CORE[name]
    run = check(references, name, case)
    pattern = r"lm loss: ([0-9.E+-]+)"
    assert printed(run, pattern) == pytest.approx(printed(references.run(case.variant), pattern), rel=2e-6)
    if case.variant == EVALUATED:
        pattern = r"validation loss at iteration .*lm loss value: ([0-9.E+-]+)"
        values = printed(run, pattern)
        assert len(values) >= 2
        assert values == pytest.approx(printed(references.run(EVALUATED), pattern), rel=2e-6)


def test_stages_that_nothing_gave_to_the_placement_are_refused(references: References) -> None:
    """Megatron asks for a stage's layers only where there is a layout: without one it counts in a loop."""
    folder = references.folder / "without-layout"
    folder.mkdir()
    words = [
        *(str(folder), f"zb-v:{V_2}", str(support.PRETRAIN_SCRIPT), *support.MODEL_FLAGS),
        *(*support.TRAINING_FLAGS, *shlex.split(f"{_MODEL} --num-layers 8 {TWO}")),
        *("--num-virtual-stages-per-pipeline-rank", "2", "--train-iters", "1"),
        *("--data-path", str(references.data)),
    ]
    code, output = references.server([]).run(words, num_processes=2, timeout_s=60, log=folder / "log")
    assert code not in (0, TIMED_OUT)
    assert "PlanError: split: layers 6 to 8 were built as stage 2 of the plan" in output, output[-3000:]


# A V with everything once, and a loop, whose devices receive from two others in one group.
ON_NCCL = ["zb-v pp2 dp2 both overlaps", "interleaved pp4"]


def as_strict_as_nccl(name: str) -> Case:
    case = {**CORE, **MATRIX}[name]
    # Host memory and gloo are for several processes on one GPU, where there is no NCCL.
    return replace(case, order=f"{case.order}:{'troubled' if name in CORE else 'nccl'}")


@pytest.mark.parametrize("name", ON_NCCL)
def test_groups_as_strict_as_nccl(name: str, references: References) -> None:
    check(references, f"nccl {name}", as_strict_as_nccl(name))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [name for name, case in {**CORE, **MATRIX}.items() if name not in ON_NCCL and ":host" not in case.order],
)
def test_matrix_on_groups_as_strict_as_nccl(name: str, references: References) -> None:
    check(references, f"nccl {name}", as_strict_as_nccl(name))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_layers_of_the_engine_are_profiled(references: References) -> None:
    """The profiler's delayed weight gradients train as stock does, and every layer has its I and its W."""
    program = ("profile", str(support.PRETRAIN_SCRIPT))
    run = references.train("profile", program, ENGINE, num_processes=1)
    assert max(support.largest_deviation(run, references.run(""))) <= _TOLERANCE
    profile = json.loads((references.folder / "profile" / "rank-0.profile.json").read_text())
    parts = {part["name"]: part for part in profile["parts"]}
    assert parts.keys() == {"embedding", *(f"layer.{n}" for n in range(10)), "head"}
    for name, part in parts.items():
        assert part["forward_s"] > 0
        assert name == "embedding" or part["input_grad_s"] > 0
        # The head's weight is the embedding's here, whose gradient stays whole.
        assert name in ("embedding", "head") or part["weight_grad_s"] > 0
        assert name == "embedding" or part["backward_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MATRIX if name not in LONG])
def test_matrix(name: str, references: References) -> None:
    check(references, name, MATRIX[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(LONG))
def test_long_matrix(name: str, references: References) -> None:
    check(references, name, MATRIX[name])
