"""Real Megatron on hosts that are a network namespace each: tuned over all of them, then trained on them.

Of four hosts the second and the third are joined by a slow link. A pipeline of four stages in the stock order
crosses it; another order of ranks does not. The lines that `pytest -s` shows have the speedup.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.scenarios.network import address, interface, joined_namespaces, namespace
from quartet_plugin.model.plan import read_plan
from tests.cli.tuning import environment, living
from tests.launchers import namespaces
from tests.launchers.ssh_hosts import ssh_hosts
from tests.megatron.entry_launch import MEGATRON_FLAGS, SCRIPT

ENTRY = "from quartet_plugin.cli.main import entry; entry()"
PREFIX, RATE = "node", "200mbit"
SLOW = (1, 2)
CONFIG = """\
run: linked
device: cpu
launcher: ssh
site: {site}
trial: {{nodes: {number}, warmup: 1, measure: 4}}
study: {{trials: {trials}, top_k: {top_k}, rounds: {rounds}, control: 0}}
search: {{pipeline_parallel: {number}, virtual_stages: 1, micro_batch_size: {micro_batch_size},
  schedule: 1f1b, split: {split}}}
"""
# Many short sequences through narrow layers and a vocabulary of 16: the slow link has a microbatch for longer
# than two cores compute it on all four stages, and 16 microbatches hide how the pipeline fills.
FLAGS = shlex.split("""
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 32 --num-attention-heads 1
    --seq-length 16 --max-position-embeddings 16 --micro-batch-size 256 --global-batch-size 4096
    --vocab-size 15 --make-vocab-size-divisible-by 16 --tokenizer-type NullTokenizer --mock-data
    --pipeline-model-parallel-size 4 --train-iters 1000 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine
    --clip-grad 1.0 --log-interval 1 --eval-interval 10000 --eval-iters 1
    --attention-dropout 0 --hidden-dropout 0
""")
# At the end of a training each process says on which host it was which stage.
STAGE = """
    import os, pathlib, socket
    name = f"stage-{mpu.get_pipeline_model_parallel_rank()}-of-{os.environ['RANK']}"
    pathlib.Path(os.environ["STAGES"], name).write_text(socket.gethostname())
"""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts that ssh reaches by `site`, and the folder of their runs."""

    folder: Path
    site: Path
    names: tuple[str, ...]

    def quartet(self, *words: str) -> str:
        """What a command of the plugin prints, which must succeed."""
        done = subprocess.run(
            [sys.executable, "-c", ENTRY, *words],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env={**environment(), "OMP_NUM_THREADS": "1", "STAGES": str(self.folder)},
            check=False,
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        return done.stdout

    def tune(self, config: str, command: Sequence[str]) -> Path:
        """The folder of a study over all hosts."""
        path = self.folder / "q.yaml"
        path.write_text(config)
        words = ["tune", "--config", str(path), "--run-dir", str(self.folder / "runs")]
        print(self.quartet(*words, "--", *command))
        return self.folder / "runs" / "linked"

    def train(self, plan: Path, command: Sequence[str]) -> list[str]:
        """The host of each stage of a training with a plan on all hosts."""
        words = ["train", "--launcher", "ssh", "--site", str(self.site), "--plan", str(plan)]
        output = self.quartet(*words, "--device", "cpu", "--", *command)
        assert "iteration        3/       3" in output
        return [(self.folder / f"stage-{stage}-of-{stage}").read_text() for stage in range(len(self.names))]


@contextmanager
def joined_hosts(folder: Path, *, number: int, slow: tuple[int, int]) -> Iterator[Hosts]:
    """Hosts in network namespaces, of which those at the two indices `slow` are joined by `RATE`."""
    namespaces.require()
    (folder / "hosts").mkdir()
    networks = [(namespace(index, prefix=PREFIX), address(index)) for index in range(number)]
    with joined_namespaces(["4gbit"] * number, prefix=PREFIX, burst="2mb"):
        slow_down(*slow)
        with ssh_hosts(folder / "hosts", number=number, networks=networks) as hosts:
            site = folder / "site.yaml"
            site.write_text(hosts.site.model_dump_json(exclude_defaults=True))
            yield Hosts(folder=folder, site=site, names=hosts.names)
            # The hosts live, and would show what still runs on them.
            assert not living(folder / "pretrain.py")
            assert not living(folder / "runs")


def slow_down(first: int, second: int) -> None:
    """Let only `RATE` through from one host to the other, each way; the other links stay as they are."""
    for here, there in ((first, second), (second, first)):
        device = interface(here, prefix=PREFIX)
        tc = ["ip", "netns", "exec", namespace(here, prefix=PREFIX), "tc"]
        for words in (
            f"qdisc replace dev {device} root handle 1: htb default 10",
            f"class add dev {device} parent 1: classid 1:10 htb rate 4gbit",
            f"class add dev {device} parent 1: classid 1:20 htb rate {RATE} burst 128kb",
            f"filter add dev {device} parent 1: protocol ip u32 match ip dst {address(there)}/32 flowid 1:20",
        ):
            subprocess.run([*tc, *words.split()], check=True)


def command_of(folder: Path, *flags: str) -> list[str]:
    """The example script, whose processes say at the end which stage they were; one process a host."""
    script = folder / "pretrain.py"
    script.write_text(SCRIPT.read_text(encoding="utf-8") + STAGE)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    return [torchrun, "--nproc-per-node", "1", str(script), *flags]


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_an_order_of_ranks_that_avoids_the_slow_link_wins_and_trains(tmp_path: Path) -> None:
    with joined_hosts(tmp_path, number=4, slow=SLOW) as hosts:
        config = CONFIG.format(
            site=hosts.site, number=4, trials=6, top_k=2, rounds=5, micro_batch_size=256, split="even"
        )
        best = hosts.tune(config, command_of(tmp_path, *FLAGS)) / "best" / "plan.json"
        nodes = [slot.node for slot in read_plan(best).mapping.slots]
        neighbours = {frozenset(pair) for pair in pairwise(nodes)}
        assert frozenset(SLOW) not in neighbours, nodes
        ran = hosts.train(best, command_of(tmp_path, *FLAGS, "--train-iters", "3"))
    assert ran == [hosts.names[node] for node in nodes]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_two_hosts_are_tuned_over_and_train(tmp_path: Path) -> None:
    with joined_hosts(tmp_path, number=2, slow=(0, 1)) as hosts:
        config = CONFIG.format(
            site=hosts.site, number=2, trials=2, top_k=1, rounds=3, micro_batch_size=2, split="[even, 4+2]"
        )
        flags = [*MEGATRON_FLAGS, "--pipeline-model-parallel-size", "2"]
        run = hosts.tune(config, command_of(tmp_path, *flags))
        # Whichever of the two is faster: this one differs from the user's own command.
        (trial,) = run.glob("trials/000001/attempt-*")
        assert json.loads((trial / "result.json").read_text())["outcome"] == "OK"
        plan = read_plan(trial / "plan.json")
        assert [node.host for node in plan.made_for.nodes] == list(hosts.names)
        ran = hosts.train(trial / "plan.json", command_of(tmp_path, *flags, "--train-iters", "3"))
    assert ran == [hosts.names[slot.node] for slot in plan.mapping.slots]
