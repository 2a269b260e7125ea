"""The scenarios: a job, where its processes run, and what may be searched."""

import shlex
from dataclasses import dataclass, field
from typing import Any

from quartet_plugin.space.config import STOCK_NAMES
from quartet_plugin.space.knobs.registry import KNOBS as _ALL_KNOBS

SCRIPT = "benchmarks/scenarios/script.py"
_COMMON = (
    "--mock-data --tokenizer-type NullTokenizer --train-iters 100000 --lr 1e-4 --min-lr 1e-5 "
    "--lr-decay-style cosine --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0 "
    "--num-attention-heads 4 --log-interval 100000 --eval-interval 1000000 --eval-iters 0 "
    "--seq-length 64 --max-position-embeddings 64 "
)
# What stock flags offer: layouts, native uneven splits, group sizes, and Megatron's two orders of ranks.
STOCK_ORDERS = ["stock", "tp-pp-dp"]
# The axes that a search can keep at stock beside the shape, and the knobs of a layout that have that form.
AXES = ("schedule", "split", "mapping")
KNOBS = tuple(knob.name for knob in _ALL_KNOBS if knob.name not in AXES)
# Knobs that a search names by a number: the flag of the command's, which is 1 without it.
COUNT_FLAGS = {
    "tensor_parallel": "--tensor-model-parallel-size",
    "pipeline_parallel": "--pipeline-model-parallel-size",
    "context_parallel": "--context-parallel-size",
    "expert_parallel": "--expert-model-parallel-size",
    "virtual_stages": "--num-virtual-stages-per-pipeline-rank",
    "micro_batch_size": "--micro-batch-size",
}
# How docs/benchmarks.md calls what a scenario may fix, and what a search keeps unless it is asked.
WORDS = {
    "tensor_parallel": "TP",
    "pipeline_parallel": "PP",
    "data_parallel": "DP",
    "expert_parallel": "EP",
    "micro_batch_size": "micro-batch",
    "recompute": "recompute",
    "mapping": "order of ranks",
}
_ONLY_EXPERTS, _UNASKED, _IN_ALL = ("expert_parallel",), ("recompute",), ("mapping",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One comparison. `flags` are the user's own job: Megatron's defaults for it, its split even.

    `search` is the search section of both searches: what it leaves free is free in both, layouts too. The
    stock one keeps schedule and mapping to stock flags and the shape as it is. `cores`, `namespaces` and
    `cpu_shares` (of its core) have a value for each process of a host, `rates` one for each namespace, as tc
    writes them. A cluster file gives every device `memory_limit_bytes`.
    Of several hosts those at each two indices of `slow_pairs` are joined by `slow_rate`, and the plugin's
    search has the cluster file that `quartet probe` writes there.
    """

    about: str
    num_processes: int
    flags: str
    cores: str
    search: dict[str, Any] = field(default_factory=dict)
    namespaces: str = ""
    rates: tuple[str, ...] = ()
    cpu_shares: tuple[float, ...] = ()
    memory_limit_bytes: int | None = None
    num_hosts: int = 1
    slow_pairs: tuple[tuple[int, int], ...] = ()
    slow_rate: str = ""

    @property
    def processes_per_host(self) -> int:
        """The training processes on each host."""
        return self.num_processes // self.num_hosts

    @property
    def cluster(self) -> dict[str, Any] | None:
        """The content of a cluster file with the memory limit; None without one."""
        if self.memory_limit_bytes is None:
            return None
        link = {"bandwidth_bytes_per_s": 3e9, "latency_s": 4e-5}
        core = {
            "peak_flops": {"fp32": 9e10},
            "memory_bytes": self.memory_limit_bytes,
            "memory_bandwidth_bytes_per_s": 1e10,
            "compute_units": 1,
        }
        return {
            "schema_version": 1,
            "nodes": [{"name": "here", "devices": ["core"] * self.num_processes}],
            "devices": {"core": core},
            "links": {"scale_up": link},
        }

    def search_without(self, axis: str) -> dict[str, Any]:
        """The search with one axis kept at stock: schedule, split, mapping, scaling, or a layout's knob."""
        if axis == "scaling":
            return {key: value for key, value in self.search.items() if key != "scaling"}
        if axis not in (*AXES, *KNOBS):
            raise SystemExit(f"--without: {axis}; must be scaling, {', '.join(AXES)} or a knob")
        return {**self.search, axis: self._stock_value(axis)}

    def _stock_value(self, axis: str) -> Any:
        if axis == "schedule":
            return list(STOCK_NAMES)
        if axis not in COUNT_FLAGS:
            return "stock"
        words, flag = shlex.split(self.flags), COUNT_FLAGS[axis]
        return int(words[words.index(flag) + 1]) if flag in words else 1

    @property
    def fixed_words(self) -> str:
        """What neither search may change, as docs/benchmarks.md says it."""
        values = {WORDS[name]: self.search.get(name, "auto") for name in WORDS}
        fixed = {words: value for words, value in values.items() if value != "auto"}
        return ", ".join(words if value == "stock" else f"{words} {value}" for words, value in fixed.items())

    @property
    def free_words(self) -> str:
        """What both searches may change beside what is free in every row, as docs/benchmarks.md says it."""
        kept = () if "--num-experts" in self.flags else _ONLY_EXPERTS
        free = [
            words
            for name, words in WORDS.items()
            if name not in (*kept, *_IN_ALL)
            and self.search.get(name, "stock" if name in _UNASKED else "auto") == "auto"
        ]
        return ", ".join(free)

    @property
    def command(self) -> list[str]:
        """The training command."""
        words = ["torchrun", "--nproc-per-node", str(self.processes_per_host), SCRIPT]
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
        rates=("200mbit", "200mbit"),
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
        about="everything free, shapes too, PP2 even as the start",
        num_processes=2,
        cores="0,1",
        flags="--num-layers 8 --hidden-size 192 --vocab-size 8192 --pipeline-model-parallel-size 2 "
        "--micro-batch-size 2 --global-batch-size 16",
        search={"scaling": {"budget": "parameters", "tolerance": 0.03}},
    ),
    "g-slow-middle": Scenario(
        about="a slow device in the middle of PP4, the mapping fixed: the third has half the others' speed",
        num_processes=4,
        cores="0,1,0,1",
        # Two processes share a core, and each has its part of it whatever the other does.
        cpu_shares=(0.4, 0.4, 0.2, 0.4),
        flags="--num-layers 12 --hidden-size 192 --vocab-size 8192 --pipeline-model-parallel-size 4 "
        "--micro-batch-size 2 --global-batch-size 16",
        search={**_ONE_PIPELINE, "pipeline_parallel": 4, "micro_batch_size": 2, "mapping": "stock"},
    ),
    "h-memory-limit": Scenario(
        about="recompute or micro-batch under a memory limit that the default exceeds, PP2",
        num_processes=2,
        cores="0,1",
        memory_limit_bytes=1000 * 2**20,
        flags="--num-layers 8 --hidden-size 256 --vocab-size 4096 --pipeline-model-parallel-size 2 "
        "--micro-batch-size 16 --global-batch-size 64",
        search={**_ONE_PIPELINE, "pipeline_parallel": 2, "micro_batch_size": "auto", "recompute": "auto"},
    ),
    "i-unequal-links": Scenario(
        about="8 processes on 4 hosts, PP4 x DP2; the launcher's order has each host joined to the next by "
        "100 Mbit/s, and no order of ranks with a name avoids these links",
        num_processes=8,
        num_hosts=4,
        slow_pairs=((0, 1), (1, 2), (2, 3)),
        slow_rate="100mbit",
        cores="0,1",
        # Many short sequences through narrow layers: slow links have a microbatch for longer than the cores.
        flags="--num-layers 4 --hidden-size 64 --ffn-hidden-size 32 --num-attention-heads 1 "
        "--seq-length 16 --max-position-embeddings 16 --vocab-size 15 --make-vocab-size-divisible-by 16 "
        "--pipeline-model-parallel-size 4 --micro-batch-size 256 --global-batch-size 2048 "
        # The first rank indexes all samples of the training.
        "--train-iters 1000",
        search={"tensor_parallel": 1, "pipeline_parallel": 4, "data_parallel": 2, "micro_batch_size": 256},
    ),
    "j-experts-slow-link": Scenario(
        about="8 narrow experts over two namespaces joined by 200 Mbit/s, 4 processes; the default is EP 4",
        num_processes=4,
        cores="0,0,1,1",
        namespaces="quartet-a,quartet-a,quartet-b,quartet-b",
        rates=("200mbit", "200mbit"),
        flags="--num-layers 4 --hidden-size 64 --ffn-hidden-size 64 --num-attention-heads 1 "
        "--seq-length 16 --max-position-embeddings 16 --vocab-size 15 --make-vocab-size-divisible-by 16 "
        "--disable-bias-linear --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 "
        "--moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall "
        "--expert-model-parallel-size 4 --micro-batch-size 64 --global-batch-size 1024 "
        # The first rank indexes all samples of the training: of 100,000 iterations, for over a minute.
        "--train-iters 2000",
        search={"tensor_parallel": 1, "micro_batch_size": 64},
    ),
}  # fmt: skip
