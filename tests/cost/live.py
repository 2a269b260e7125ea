"""Runs on processors for the calibration's tests, as the live benchmark has them."""

from benchmarks.live_cases import Case, Schedule, Size, two_cores
from quartet_plugin.cost.run import TrainingRun


def cpu_run(
    *,
    layers: int = 8,
    hidden: int = 256,
    seq: int = 128,
    vocab: int = 4096,
    pp: int = 2,
    tp: int = 1,
    split: tuple[int, ...] = (),
    micro_batch: int = 1,
    num_microbatches: int = 8,
    schedule: Schedule = "stock",
) -> TrainingRun:
    """A small GPT in fp32 on two cores."""
    case = Case(
        size=Size(layers=layers, hidden=hidden, heads=4, seq=seq, vocab=vocab),
        how="pp2" if pp == 2 else "tp2" if tp == 2 else "dp2",
        split=split,
        schedule=schedule,
        micro_batch=micro_batch,
        num_microbatches=num_microbatches,
    )
    return case.run(two_cores())


def varied_runs() -> list[TrainingRun]:
    """Runs whose terms differ enough to be told apart."""
    return [
        cpu_run(),
        cpu_run(num_microbatches=2, micro_batch=4),
        cpu_run(pp=1, tp=2, num_microbatches=4),
        cpu_run(pp=1, num_microbatches=4),
        cpu_run(layers=6, hidden=384, vocab=8192, split=(4, 2), num_microbatches=4),
        cpu_run(layers=6, hidden=384, vocab=8192, pp=1, num_microbatches=2),
        cpu_run(hidden=128, seq=256, split=(2, 2, 2, 2)),
        cpu_run(hidden=128, seq=512, pp=1, tp=2),
        cpu_run(layers=4, seq=256, vocab=16384, split=(3, 1), schedule="zb-h1"),
        cpu_run(layers=12, hidden=64, seq=64, vocab=2048, num_microbatches=4),
        cpu_run(layers=12, hidden=64, seq=32, vocab=2048, pp=1, num_microbatches=2, micro_batch=2),
        cpu_run(layers=4, hidden=512, seq=64, vocab=2048, num_microbatches=16),
        cpu_run(layers=2, hidden=512, seq=32, vocab=32768, num_microbatches=2),
    ]
