"""How good solved mappings are: against every permutation on small clusters, against stock orders on larger.

    python benchmarks/mapping_optimum.py

Random clusters of A100: some devices 1.5 or 3 times slower, links between nodes unequal by a factor of 12.5
in most. Times are those of the whole prediction (the pipeline simulated), not of the solver's closed form.
"""

import argparse
import itertools
import os
import random
import statistics
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.iteration.assigned import AssignedRun
from quartet_plugin.planner.assignment_search import AssignmentProblem, assign
from quartet_plugin.planner.job import PlanRequest, parse_job
from quartet_plugin.planner.layout_table import layout_table_of
from quartet_plugin.split.layers import even_split

SMALL = ((2, 3), (3, 2), (6, 1), (1, 6))
LARGE = ((4, 4), (8, 2), (2, 8), (4, 8))


def random_job(draw: random.Random, num_nodes: int, per_node: int) -> PlanRequest:
    """A model of 12 layers on a random cluster."""
    rates = [[draw.choice([2e9, 2.5e10]) for _ in range(num_nodes)] for _ in range(num_nodes)]
    nodes = [
        {
            "name": f"node-{index}",
            "devices": ["A100-SXM-80GB"] * per_node,
            "slowdown": [draw.choice([1.0, 1.0, 1.5, 3.0]) for _ in range(per_node)],
        }
        for index in range(num_nodes)
    ]
    links: dict[str, Any] = {
        "scale_up": {"bandwidth_bytes_per_s": 3e11, "latency_s": 2e-6},
        "network": {"bandwidth_bytes_per_s": 2.5e10, "latency_s": 1e-5},
    }
    if draw.random() < 0.6:
        links["matrix"] = {"bandwidth_bytes_per_s": rates}
    data = {
        "model": {
            "num_layers": 12,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "seq_length": 1024,
            "vocab_size": draw.choice([1000, 64000]),
        },
        "cluster": {"schema_version": 1, "nodes": nodes, "links": links},
        "batch": {"global_batch_size": 4 * num_nodes * per_node},
        "search": {"micro_batch_size": 1, "recompute": "none", "distributed_optimizer": False},
    }
    return parse_job(data, where="job")


def compared(seed: int, sizes: tuple[tuple[int, int], ...], *, every: bool) -> tuple[float, float]:
    """The solved mapping's time over the best permutation's (else 1), and over the better stock order's."""
    draw = random.Random(seed)
    job = random_job(draw, *draw.choice(sizes))
    table = layout_table_of(job, job.shape)
    layouts = [table.layout(row) for row in range(len(table))]
    layout = draw.choice([layout for layout in layouts if layout.pipeline_parallel > 1])
    split = even_split(job.shape.num_layers, num_stages=layout.num_stages)
    topology = job.topology(fitted())
    problem = AssignmentProblem(
        job=job,
        shape=job.shape,
        layout=layout,
        split=split,
        constants=fitted(),
        topology=topology,
        may_split=False,
    )
    assignment = assign(problem)
    assert assignment is not None
    time = best = assignment.prediction.iter_time_s
    if every:
        run = AssignedRun(job.run(job.shape, layout, split), fitted(), topology)
        size, domains = layout.tensor_parallel, topology.domain_of_slot
        for slots in itertools.permutations(range(len(topology.slots))):
            groups = itertools.batched(slots, size)
            together = all(len({int(domains[slot]) for slot in group}) == 1 for group in groups)
            if together and topology.slots[slots[0]].node == 0:
                best = min(best, run.predict(slots).iter_time_s)
    return time / best, time / min(assignment.stock_s.values())


def main() -> None:
    """Print both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clusters", type=int, default=40)
    options = parser.parse_args()
    small = [compared(seed, SMALL, every=True) for seed in range(options.clusters)]
    exact = sum(ratio < 1 + 1e-9 for ratio, _ in small)
    print(
        f"6 devices, {len(small)} clusters: best of all permutations in {exact}, worst "
        f"{100 * (max(ratio for ratio, _ in small) - 1):.2f} % above"
    )
    for name, ratios in (
        ("6 devices", [ratio for _, ratio in small]),
        ("16 and 32 devices", [compared(seed, LARGE, every=False)[1] for seed in range(options.clusters)]),
    ):
        print(
            f"{name}: time over the better stock order's: median {statistics.median(ratios):.3f}, "
            f"best {min(ratios):.3f}, worst {max(ratios):.3f}"
        )


if __name__ == "__main__":
    main()
