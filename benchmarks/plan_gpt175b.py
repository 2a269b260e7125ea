"""How long planning takes: GPT-175B on 1,024 H100, everything `auto`, and models with experts.

    python benchmarks/plan_gpt175b.py                  # every case: first in the process, then repeats
    python benchmarks/plan_gpt175b.py --case slow-node # one of them
    python benchmarks/plan_gpt175b.py --top 5          # also show the runners-up
    python -m benchmarks.plan_gpt175b --case named --check-exhaustive   # the ten best against predicting all

Cases: `named`, the ranking and the mapping of the best; `searched`, with searched orders of the ten best
layouts; `slow-node`, `named` on a cluster file in which one node is 1.3 times slower; `partition`, `named`
with every pair of tensor partitions; and for models with experts the ranking by named schedules,
`deepseek-v3-1024` on 1,024 H100 and so on. The first time holds the loading of compiled kernels; the repeats
empty the cache of schedules each time. Last the whole command is run, imports and files included. CPU time is
shown beside wall time, because other work on the machine lengthens only the latter.

`--check-exhaustive` times nothing: it ranks a case with and without pruning, and fails unless the best ten
(`--top` of them where that is more) are the same plans in the same order, with the same seconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from quartet_plugin.cost.iteration import orders
from quartet_plugin.planner.job import parse_job
from quartet_plugin.planner.order_search import MAX_SEARCHED, planned_ranking
from quartet_plugin.planner.ranking import Ranked, Ranking, best_plans
from quartet_plugin.split.layers import even_split_with_ends

JOB: dict[str, Any] = {
    "model": {
        "num_layers": 96,
        "hidden_size": 12288,
        "num_attention_heads": 96,
        "seq_length": 2048,
        "vocab_size": 51200,
    },
    "cluster": {"device": "H100-SXM-80GB", "num_nodes": 128, "devices_per_node": 8},
    "batch": {"global_batch_size": 1536},
    "search": dict.fromkeys(
        (
            "tensor_parallel",
            "pipeline_parallel",
            "data_parallel",
            "context_parallel",
            "virtual_stages",
            "micro_batch_size",
            "recompute",
            "distributed_optimizer",
        ),
        "auto",
    ),
}


SLOW_NODE, SLOWDOWN = 17, 1.3
CLUSTER = {
    "schema_version": 1,
    "nodes": [
        {
            "name": f"node-{index:03d}",
            "devices": ["H100-SXM-80GB"] * 8,
            "slowdown": [SLOWDOWN if index == SLOW_NODE else 1.0] * 8,
        }
        for index in range(128)
    ],
    "links": {
        "scale_up": {"bandwidth_bytes_per_s": 4.5e11, "latency_s": 2e-6},
        "network": {"bandwidth_bytes_per_s": 5e10, "latency_s": 1e-5},
    },
}
# Model, device, nodes, devices a node, sequences of a batch.
EXPERTS = {
    "deepseek-v3-256": ({"name": "deepseek-v3"}, "H100-SXM-80GB", 32, 8, 2048),
    "deepseek-v3-256-gb200": ({"name": "deepseek-v3"}, "GB200", 64, 4, 2048),
    "deepseek-v3-1024": ({"name": "deepseek-v3"}, "H100-SXM-80GB", 128, 8, 8192),
    "qwen3-235b-256": ({"name": "qwen3-235b-a22b"}, "H100-SXM-80GB", 32, 8, 2048),
    "gpt-oss-120b-64-b200": ({"name": "gpt-oss-120b"}, "B200", 8, 8, 1024),
}
CASES = ("named", "searched", "slow-node", "partition", *EXPERTS)


def job_of(case: str) -> dict[str, Any]:
    """The data of a case's job."""
    if case in EXPERTS:
        model, device, nodes, per_node, batch = EXPERTS[case]
        return {
            "model": model,
            "cluster": {"device": device, "num_nodes": nodes, "devices_per_node": per_node},
            "batch": {"global_batch_size": batch},
        }
    changes: dict[str, dict[str, Any]] = {
        "slow-node": {"cluster": CLUSTER},
        "partition": {"search": {**JOB["search"], "tensor_partition": "auto"}},
    }
    return {**JOB, **changes.get(case, {})}


def planned(case: str, top: int) -> tuple[float, float, Ranking]:
    """Wall and CPU seconds from the job's data to the ranking, schedules not cached."""
    orders.clear_caches()
    even_split_with_ends.cache_clear()
    data = job_of(case)
    start, cpu = time.perf_counter(), time.process_time()
    job = parse_job(data, where="job")
    ranking = planned_ranking(job, top=top, has_search=case == "searched")
    return time.perf_counter() - start, time.process_time() - cpu, ranking


def whole_command_s() -> float:
    """Wall seconds of `quartet plan` from its start to its exit."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.yaml"
        job.write_text(json.dumps(JOB), encoding="utf-8")
        code = "from quartet_plugin.cli.main import entry; entry()"
        words = [sys.executable, "-c", code, "plan", str(job), "-o", str(job.with_name("plan.json"))]
        start = time.perf_counter()
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start


def show_case(case: str, *, top: int, repeats: int) -> None:
    """Print the times, the counts and the best layouts of one case."""
    first, cpu, ranking = planned(case, top)
    print(f"{case}: first in the process: wall {first:.2f} s, CPU {cpu:.2f} s")
    times = [planned(case, top)[:2] for _ in range(repeats)]
    for name, seconds in zip(("wall", "CPU"), zip(*times, strict=True), strict=True):
        print(
            f"after that, {repeats} times: {name} median {statistics.median(seconds):.2f} s, "
            f"from {min(seconds):.2f} to {max(seconds):.2f}"
        )
    print(
        f"{ranking.num_considered} layouts: {ranking.num_predicted} predicted, "
        f"{ranking.num_too_large} do not fit, {ranking.num_pruned} cannot be faster"
    )
    for ranked in ranking.best:
        gap = "" if ranked.gap is None else f", gap {100 * ranked.gap:.2f} %"
        words = f"{ranked.layout.label} {ranked.schedule_label}, recompute {ranked.layout.recompute}"
        print(f"{ranked.iteration_s:.3f} s: {words}{gap}")


def words_of(ranked: Ranked) -> str:
    """A plan in words, its seconds with all their digits."""
    layout = ranked.layout
    return f"{layout.label} {ranked.schedule_label} recompute {layout.recompute}: {ranked.equal_work_s!r} s"


def check_exhaustive(data: dict[str, Any], *, top: int) -> int:
    """Compare the best of the pruned ranking with those of predicting all; 1 where they differ."""
    job = parse_job(data, where="job")
    pruned, full = (best_plans(job, top=top, exhaustive=exhaustive) for exhaustive in (False, True))
    print(
        f"{pruned.num_predicted} predicted with pruning; {full.num_predicted} of {full.num_considered} "
        f"without, {full.num_too_large} do not fit"
    )
    is_same = len(pruned.best) == len(full.best)
    for quick, thorough in zip(pruned.best, full.best, strict=False):
        is_equal = (quick, words_of(quick)) == (thorough, words_of(thorough))
        is_same &= is_equal
        print(f"{words_of(thorough)}{'' if is_equal else f', but with pruning {words_of(quick)}'}")
    print(f"the best {len(full.best)} are {'the same' if is_same else 'not the same'}")
    return int(not is_same)


def main() -> int:
    """Print the times of the cases, then those of the whole command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--top", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--check-exhaustive", action="store_true")
    options = parser.parse_args()
    if options.check_exhaustive:
        return check_exhaustive(job_of(options.case or CASES[0]), top=max(options.top, MAX_SEARCHED))
    for case in CASES if options.case is None else (options.case,):
        show_case(case, top=options.top, repeats=options.repeats)
    if options.case is not None:
        return 0
    commands = [whole_command_s() for _ in range(options.repeats)]
    print(
        f"the whole command, {options.repeats} times: wall median {statistics.median(commands):.2f} s, "
        f"from {min(commands):.2f} to {max(commands):.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
