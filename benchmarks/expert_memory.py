"""The peak memory of small trainings with experts, predicted and measured on processors.

    python -m benchmarks.expert_memory [--only NAME ...]

Real Megatron trains each model for two iterations in fp32 on the CPU device, in two or four processes over
gloo. The peak of a rank's record is the most bytes of its process in RAM. The table has, in MiB, what the
fullest rank holds beside a process without tensors, and what the cost model predicts for the same command. A
model of almost no tensors says what such a process holds; its predicted tensors are subtracted. The heap is
kept free of holes (`freeing_pretrain.py`). The exit code is 1 where a prediction is more than 8 % away.

Routing is balanced by force, but for the plan that is called `natural`: of so few tokens a router that has
not learned gives some experts many more than others.
"""

import argparse
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quartet_plugin.calibration.machine_prior import PROCESSOR_CORE
from quartet_plugin.cost.iteration.plan_terms import run_of_job
from quartet_plugin.cost.memory import peak_memory
from quartet_plugin.cost.run import TrainingRun, uniform_cluster_of_device
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.training_job import TrainingJob, parse_training_job
from quartet_plugin.trial.request import TrialRequest, TrialResult
from quartet_plugin.trial.runner import run_trial

SCRIPT = Path(__file__).with_name("freeing_pretrain.py")
GOAL = 0.08
MIB = 2**20
FLAGS = """
    --num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4
    --max-position-embeddings 512 --swiglu --position-embedding-type rope --normalization RMSNorm
    --untie-embeddings-and-output-weights --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --mock-data --tokenizer-type NullTokenizer --vocab-size 8191 --train-iters 100 --lr 1e-4 --min-lr 1e-5
    --lr-decay-style cosine --clip-grad 1.0 --log-interval 1000 --eval-interval 1000 --eval-iters 0
    --micro-batch-size 2 --num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 512
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-router-dtype fp32
"""
FORCED = "--moe-router-force-load-balancing"
# Sizes with almost no tensors; of a flag that is given twice the last value counts. The sequence stays: the
# mock data's index has an entry for each.
TINY = """
    --hidden-size 32 --ffn-hidden-size 32 --num-attention-heads 2 --micro-batch-size 1 --vocab-size 127
    --moe-ffn-hidden-size 32
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training of `num_processes` ranks, by the flags that it has beside those of all."""

    name: str
    flags: str
    num_processes: int = 2
    num_samples: int = 4
    seq_length: int = 512
    is_forced: bool = True

    def words(self, *more: str) -> list[str]:
        """The command, with `more` flags at its end."""
        forced = FORCED if self.is_forced else ""
        sizes = f"--seq-length {self.seq_length} --global-batch-size {self.num_samples}"
        flags = f"{FLAGS} {forced} {self.flags} {sizes} {' '.join(more)}"
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        return [torchrun, "--nproc-per-node", str(self.num_processes), str(SCRIPT), *shlex.split(flags)]


_ALL_TO_ALL = "--moe-token-dispatcher-type alltoall"
_EP2 = f"{_ALL_TO_ALL} --expert-model-parallel-size 2"
_TP2 = f"{_ALL_TO_ALL} --tensor-model-parallel-size 2 --sequence-parallel"
_PP2 = f"{_ALL_TO_ALL} --pipeline-model-parallel-size 2"
_LATENT = """
    --multi-latent-attention --qk-layernorm --q-lora-rank 128 --kv-lora-rank 64 --qk-head-dim 64
    --qk-pos-emb-head-dim 32 --v-head-dim 64
"""
_SHARED = "--moe-shared-expert-intermediate-size 512"
_WEIGHTS = "--num-experts 32 --moe-ffn-hidden-size 1024 --micro-batch-size 1"
CASES = (
    Case(name="ep2", flags=_EP2),
    Case(name="ep2, natural", flags=_EP2, is_forced=False),
    Case(name="ep2, distributed optimizer", flags=f"{_EP2} --use-distributed-optimizer"),
    Case(name="ep2, more weights", flags=f"{_EP2} {_WEIGHTS}"),
    Case(
        name="ep2, more weights, distributed optimizer",
        flags=f"{_EP2} {_WEIGHTS} --use-distributed-optimizer",
    ),
    Case(
        name="dp4 ep2, few tokens, distributed optimizer",
        flags=f"{_EP2} {_WEIGHTS} --use-distributed-optimizer",
        num_processes=4,
        seq_length=128,
    ),
    Case(
        name="ep2, allgather",
        flags="--moe-token-dispatcher-type allgather --expert-model-parallel-size 2",
    ),
    Case(name="ep2, latent attention, a shared expert", flags=f"{_EP2} {_LATENT} {_SHARED}"),
    Case(name="ep2, one more token", flags=f"{_EP2} --mtp-num-layers 1"),
    Case(name="ep2, a dense layer", flags=f"{_EP2} --moe-layer-freq ([0]*1+[1]*3) {_SHARED}"),
    Case(name="tp2", flags=_TP2),
    Case(
        name="tp2 ep2, whole experts",
        flags=f"{_TP2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    ),
    Case(
        name="tp2 dp2 ep2, distributed optimizer",
        flags=f"{_TP2} --expert-model-parallel-size 2 --use-distributed-optimizer",
        num_processes=4,
    ),
    Case(name="pp2", flags=_PP2, num_samples=8),
    Case(name="pp2, two chunks", flags=f"{_PP2} --num-layers-per-virtual-pipeline-stage 1", num_samples=8),
    Case(
        name="pp2 dp2 ep2, a shared expert",
        flags=f"{_PP2} --expert-model-parallel-size 2 {_SHARED}",
        num_processes=4,
        num_samples=8,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A training's peak beside that of an almost empty process, and the predicted one, in bytes."""

    name: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """The prediction's error, signed, over the measured peak."""
        return self.predicted / self.measured - 1


def main(arguments: list[str] | None = None) -> int:
    """Launch the trainings, print the table; 1 where a prediction is off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    options = parser.parse_args(arguments)
    chosen = [case for case in CASES if case.name in options.only]
    process_bytes: dict[tuple[int, int], float] = {}
    rows = []
    print(head(chosen), flush=True)
    for case in chosen:
        like = case.num_processes, case.seq_length
        if like not in process_bytes:
            empty = trained(case.words(TINY))
            predicted = predicted_bytes(empty, num_processes=case.num_processes)
            process_bytes[like] = empty.peak_memory_bytes - predicted
        result = trained(case.words())
        rows.append(row_of(case, result, process_bytes=process_bytes[like]))
        print(line_of(rows[-1], width=width_of(chosen)), flush=True)
    print(summary(rows))
    return int(any(abs(row.error) > GOAL for row in rows))


def trained(words: Sequence[str]) -> TrialResult:
    """The result of a trial of the command: two iterations, the second with the optimizer's states."""
    with tempfile.TemporaryDirectory(prefix="expert-memory-") as folder:
        request = TrialRequest(
            folder=Path(folder) / "trial",
            command=parse_command(list(words)),
            warmup=1,
            measure=1,
            device="cpu",
            max_spread=1e6,
            max_attempts=1,
        )
        result = run_trial(request, is_subreaper=True)
    if not result.is_measured:
        raise SystemExit("\n".join((*result.last_lines, f"a launch failed: {result.reason}")))
    return result


def row_of(case: Case, result: TrialResult, *, process_bytes: float) -> Row:
    """The row of a measured case; `process_bytes` are those of a process without tensors."""
    return Row(
        name=case.name,
        measured=result.peak_memory_bytes - process_bytes,
        predicted=predicted_bytes(result, num_processes=case.num_processes),
    )


def predicted_bytes(result: TrialResult, *, num_processes: int) -> float:
    """The peak that the cost model predicts for the command of a result."""
    assert result.job is not None
    return peak_memory(run_of(parse_training_job(result.job), num_processes=num_processes)).total_bytes


def run_of(job: TrainingJob, *, num_processes: int) -> TrainingRun:
    """The run of the cost model that a job is, as its ranks reported it."""
    assert job.split is not None
    return run_of_job(
        job,
        job,
        split=job.split,
        global_batch_size=job.global_batch_size,
        mtp_layers=job.mtp_layers or 0,
        on_cpu=True,
        cluster=uniform_cluster_of_device(PROCESSOR_CORE, num_devices=num_processes),
    )


def width_of(cases: Sequence[Case]) -> int:
    """The columns of the names."""
    return max(len(case.name) for case in cases)


def head(cases: Sequence[Case]) -> str:
    """The heads of the columns."""
    return f"{'plan':<{width_of(cases)}}  measured MiB  predicted MiB    error"


def line_of(row: Row, *, width: int) -> str:
    """A line of the table."""
    measured, predicted = row.measured / MIB, row.predicted / MIB
    return f"{row.name:<{width}}  {measured:12.1f}  {predicted:13.1f}  {row.error:+7.1%}"


def summary(rows: Sequence[Row]) -> str:
    """The mean and the largest error, without signs."""
    sizes = [abs(row.error) for row in rows]
    return (
        f"{len(rows)} plans: mean error {statistics.mean(sizes):.1%}, largest {max(sizes):.1%}; "
        f"goal {GOAL:.0%} each"
    )


if __name__ == "__main__":
    sys.exit(main())
