"""Orders of ranks that the features of a command limit: plans have none that its training would refuse."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.launchers.command import parse_command
from quartet_plugin.mapping.orders import is_legal, slots_of
from quartet_plugin.planner.command_job import CommandJob, job_of_command
from quartet_plugin.planner.described_rules import rules_of
from quartet_plugin.planner.ranking import Ranked, best_plans
from tests.model.clusters import make_cluster

FLAGS = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 32768 "
    "--max-position-embeddings 1024 --bf16 --micro-batch-size 1 --global-batch-size 16 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --sequence-parallel "
    "--use-distributed-optimizer"
)
FLEX = (
    "--num-experts 4 --moe-ffn-hidden-size 512 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type flex --untie-embeddings-and-output-weights --disable-bias-linear"
)
# Two slow devices, and a slow link between the first two nodes.
SLOW = {(1, 2): 1.5, (2, 0): 1.2}
RATES = [[2e9 if {first, second} == {0, 1} else 2.5e10 for second in range(4)] for first in range(4)]
LINKS = {"matrix": {"bandwidth_bytes_per_s": RATES}}


def job(folder: Path, more: str, **search: Any) -> CommandJob:
    cluster = make_cluster(num_nodes=4, per_node=4, device="H100", slowdown=SLOW, links=LINKS)
    (folder / "cluster.json").write_text(json.dumps(cluster))
    words = shlex.split(f"torchrun --nnodes 4 --nproc-per-node 4 pretrain_gpt.py {FLAGS} {more}")
    asked = {"schedule": "stock", "recompute": "none", **search}
    sections = {"cluster": {"file": "cluster.json"}, "search": asked}
    return job_of_command(parse_command(words), sections=sections, folder=folder)


def plans(made: CommandJob) -> list[Ranked]:
    return list(best_plans(made.request, top=12).best)


@pytest.mark.parametrize("more", ["--tp-comm-overlap", "--num-distributed-optimizer-instances 2", FLEX])
def test_no_plan_breaks_the_rules_of_its_orders(tmp_path: Path, more: str) -> None:
    made = job(tmp_path, more)
    rules, every = rules_of(made.request).order_rules, slots_of(made.request.nodes)
    assert rules.limits_orders
    moved = 0
    for plan in plans(made):
        slots = plan.slots or tuple(range(16))
        moved += plan.slots is not None
        order = [every[slot] for slot in slots]
        assert is_legal(order, layout=plan.layout, rules=rules), plan.layout.label
    assert moved


def test_a_slow_link_is_left_by_moving_whole_nodes(tmp_path: Path) -> None:
    limited = plans(job(tmp_path, "--tp-comm-overlap", tensor_parallel=2, pipeline_parallel=4))[0]
    assert limited.slots is not None
    assert limited.stock_s is not None
    assert limited.iteration_s < min(limited.stock_s.values())


@pytest.mark.parametrize("command", ["alltoall", "flex"])
def test_a_plans_own_dispatcher_limits_its_orders(tmp_path: Path, command: str) -> None:
    more = FLEX.replace("flex", command)
    asked = {"moe_token_dispatcher": ["alltoall", "flex-hybridep"]}
    made = job(tmp_path, more, tensor_parallel=2, pipeline_parallel=2, expert_parallel=2, **asked)
    rules, every = rules_of(made.request), slots_of(made.request.nodes)
    limits = set()
    for plan in best_plans(made.request, top=40).best:
        own = rules.order_rules_of(plan.layout)
        order = [every[slot] for slot in plan.slots or range(16)]
        assert is_legal(order, layout=plan.layout, rules=own), plan.layout.label
        limits.add((plan.layout.setting("moe_token_dispatcher"), own.keeps_experts))
    plain = None if command == "alltoall" else "alltoall"
    assert limits == {(plain, False), ("flex-hybridep", True)}
