"""Real Megatron on four hosts, each a network namespace, of which two are joined by a slow link.

A pipeline of four stages in the stock order crosses that link; another order of ranks does not.
"""

import json
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.scenarios.network import address, interface, joined_namespaces, namespace
from tests.cli.tuning import environment, living
from tests.launchers import namespaces
from tests.launchers.ssh_hosts import ssh_hosts
from tests.megatron.entry_launch import SCRIPT

ENTRY = "from quartet_plugin.cli.main import entry; entry()"
PREFIX, RATE = "node", "200mbit"
SLOW = (1, 2)
CONFIG = """\
run: linked
device: cpu
launcher: ssh
site: {site}
trial: {{nodes: 4, warmup: 1, measure: 4}}
study: {{trials: 6, top_k: 2, rounds: 5, control: 0}}
search: {{pipeline_parallel: 4, virtual_stages: 1, micro_batch_size: 64, schedule: 1f1b, split: even}}
"""
# Many tokens of a narrow model: what a stage sends takes about as long as what it computes.
FLAGS = shlex.split("""
    --num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 128 --max-position-embeddings 128
    --pipeline-model-parallel-size 4 --micro-batch-size 64 --global-batch-size 512 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 127 --train-iters 1000 --lr 1e-4 --min-lr 1e-5
    --lr-decay-style cosine --clip-grad 1.0 --log-interval 1 --eval-interval 10000 --eval-iters 1
    --attention-dropout 0 --hidden-dropout 0
""")


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


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_an_order_of_ranks_that_avoids_the_slow_link_wins(tmp_path: Path) -> None:
    namespaces.require()
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    (tmp_path / "hosts").mkdir()
    networks = [(namespace(index, prefix=PREFIX), address(index)) for index in range(4)]
    with joined_namespaces(["4gbit"] * 4, prefix=PREFIX, burst="2mb"):
        slow_down(*SLOW)
        with ssh_hosts(tmp_path / "hosts", number=4, networks=networks) as hosts:
            assert hosts.site.ssh is not None
            site = {"ssh": {"hosts": list(hosts.names), "config": hosts.site.ssh.config}}
            (tmp_path / "site.yaml").write_text(json.dumps(site))
            (tmp_path / "q.yaml").write_text(CONFIG.format(site=tmp_path / "site.yaml"))
            options = ["--config", str(tmp_path / "q.yaml"), "--run-dir", str(tmp_path / "runs")]
            command = [torchrun, "--nproc-per-node", "1", str(SCRIPT), *FLAGS]
            done = subprocess.run(
                [sys.executable, "-c", ENTRY, "tune", *options, "--", *command],
                capture_output=True,
                text=True,
                cwd=tmp_path,
                env={**environment(), "OMP_NUM_THREADS": "1"},
                check=False,
            )
    print(done.stdout)
    assert done.returncode == 0, (done.stdout, done.stderr)
    run = tmp_path / "runs" / "linked"
    plan = json.loads((run / "best" / "plan.json").read_text())
    nodes = [slot["node"] for slot in plan["mapping"]["slots"]]
    neighbours = {frozenset(pair) for pair in pairwise(nodes)}
    assert frozenset(SLOW) not in neighbours, nodes
    assert not living(run)
