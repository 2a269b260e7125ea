"""The scenarios: a job, where its processes run, and what may be searched."""

import shlex
from dataclasses import dataclass, field
from typing import Any

from quartet_plugin.space.config import STOCK_NAMES

SCRIPT = "benchmarks/scenarios/script.py"
_COMMON = (
    "--mock-data --tokenizer-type NullTokenizer --train-iters 100000 --lr 1e-4 --min-lr 1e-5 "
    "--lr-decay-style cosine --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0 "
    "--num-attention-heads 4 --log-interval 100000 --eval-interval 1000000 --eval-iters 0 "
    "--seq-length 64 --max-position-embeddings 64 "
)
# What stock flags offer: layouts, native uneven splits, group sizes, and Megatron's two orders of ranks.
STOCK_ORDERS = ["stock", "tp-pp-dp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One comparison. `flags` are the user's own job: Megatron's defaults for it, its split even.

    `search` is the search section of both searches; the stock one keeps schedule and mapping to stock flags
    and the shape as it is. `cores` and `namespaces` are a process each.
    """

    about: str
    num_processes: int
    flags: str
    cores: str
    search: dict[str, Any] = field(default_factory=dict)
    namespaces: str = ""
    rate: str | None = None

    @property
    def command(self) -> list[str]:
        """The training command."""
        words = ["torchrun", "--nproc-per-node", str(self.num_processes), SCRIPT]
        return [*words, *shlex.split(_COMMON + self.flags)]

    @property
    def stock_search(self) -> dict[str, Any]:
        """The search over stock flags."""
        kept = {key: value for key, value in self.search.items() if key != "scaling"}
        if self.search.get("schedule", "auto") == "auto":
            kept["schedule"] = list(STOCK_NAMES)
        if self.search.get("mapping", "auto") == "auto":
            kept["mapping"] = STOCK_ORDERS
        return kept


_ONE_PIPELINE = {"tensor_parallel": 1, "data_parallel": 1}

SCENARIOS: dict[str, Scenario] = {
    "a-heavy-head": Scenario(
        about="a heavy head: vocabulary 16k on width 192, PP2",
        num_processes=2,
        cores="0,1",
        flags="--num-layers 8 --hidden-size 192 --vocab-size 16384 --pipeline-model-parallel-size 2 "
        "--micro-batch-size 1 --global-batch-size 8",
        search={**_ONE_PIPELINE, "pipeline_parallel": 2, "micro_batch_size": 1},
    ),
    "b-unequal-pp3": Scenario(
        about="unequal devices, PP3: the first alone on a core, two share the other",
        num_processes=3,
        cores="0,1,1",
        flags="--num-layers 12 --hidden-size 128 --vocab-size 8192 --pipeline-model-parallel-size 3 "
        "--micro-batch-size 2 --global-batch-size 12",
        search={**_ONE_PIPELINE, "pipeline_parallel": 3, "micro_batch_size": 2},
    ),
    "b-unequal-pp4": Scenario(
        about="unequal devices, PP4: the first alone on a core, three share the other",
        num_processes=4,
        cores="0,1,1,1",
        flags="--num-layers 12 --hidden-size 128 --vocab-size 8192 --pipeline-model-parallel-size 4 "
        "--micro-batch-size 2 --global-batch-size 16",
        search={**_ONE_PIPELINE, "pipeline_parallel": 4, "micro_batch_size": 2},
    ),
    "c-slow-link": Scenario(
        about="two network namespaces joined by 200 Mbit/s, 4 processes; the default is Megatron's own, DP4",
        num_processes=4,
        cores="0,0,1,1",
        namespaces="quartet-a,quartet-a,quartet-b,quartet-b",
        rate="200mbit",
        flags="--num-layers 8 --hidden-size 128 --vocab-size 4096 "
        "--micro-batch-size 2 --global-batch-size 16",
    ),
    "d-shape": Scenario(
        about="shape free at equal parameters, by model FLOP/s; PP2",
        num_processes=2,
        cores="0,1",
        flags="--num-layers 16 --hidden-size 192 --num-attention-heads 6 --vocab-size 1024 "
        "--pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 16",
        search={**_ONE_PIPELINE, "pipeline_parallel": 2, "micro_batch_size": 2,
                "scaling": {"budget": "parameters", "tolerance": 0.03}},
    ),
    "e-few-microbatches": Scenario(
        about="two microbatches, PP2: split backward pays",
        num_processes=2,
        cores="0,1",
        flags="--num-layers 8 --hidden-size 256 --vocab-size 4096 --pipeline-model-parallel-size 2 "
        "--micro-batch-size 4 --global-batch-size 8",
        search={**_ONE_PIPELINE, "pipeline_parallel": 2, "micro_batch_size": 4},
    ),
    "f-everything": Scenario(
        about="everything free, PP2 even as the start",
        num_processes=2,
        cores="0,1",
        flags="--num-layers 8 --hidden-size 192 --vocab-size 8192 --pipeline-model-parallel-size 2 "
        "--micro-batch-size 2 --global-batch-size 16",
    ),
}  # fmt: skip
