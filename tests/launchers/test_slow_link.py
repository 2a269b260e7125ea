"""Real Megatron on hosts that are a network namespace each: tuned over all of them, then trained on them.

Of four hosts the second and the third are joined by a slow link. A pipeline of four stages in the stock order
crosses it; another order of ranks does not. The lines that `pytest -s` shows have the speedup.
"""

import json
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from quartet_plugin.model.plan import read_plan
from tests.launchers.linked_hosts import command_of, linked_hosts
from tests.megatron.entry_launch import MEGATRON_FLAGS

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


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_an_order_of_ranks_that_avoids_the_slow_link_wins_and_trains(tmp_path: Path) -> None:
    with linked_hosts(tmp_path, number=4, slow=[SLOW]) as hosts:
        config = CONFIG.format(
            site=hosts.site, number=4, trials=6, top_k=2, rounds=5, micro_batch_size=256, split="even"
        )
        best = hosts.tune(config, command_of(tmp_path, *FLAGS)) / "best" / "plan.json"
        nodes = [slot.node for slot in read_plan(best).mapping.slots]
        neighbours = {frozenset(pair) for pair in pairwise(nodes)}
        assert frozenset(SLOW) not in neighbours, nodes
        ran = hosts.train(best, command_of(tmp_path, *FLAGS, "--train-iters", "3"))
    assert [place.host for place in ran] == [hosts.names[node] for node in nodes]
    assert [place.stage for place in ran] == [0, 1, 2, 3]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_two_hosts_are_tuned_over_and_train(tmp_path: Path) -> None:
    with linked_hosts(tmp_path, number=2, slow=[(0, 1)]) as hosts:
        config = CONFIG.format(
            site=hosts.site, number=2, trials=2, top_k=1, rounds=3, micro_batch_size=2, split="[even, 4+2]"
        )
        flags = [*MEGATRON_FLAGS, "--pipeline-model-parallel-size", "2"]
        run = hosts.tune(config, command_of(tmp_path, *flags))
        # Whichever of the two is faster: this one differs from the user's command.
        (trial,) = run.glob("trials/000001/attempt-*")
        assert json.loads((trial / "result.json").read_text())["outcome"] == "OK"
        plan = read_plan(trial / "plan.json")
        assert [node.host for node in plan.made_for.nodes] == list(hosts.names)
        ran = hosts.train(trial / "plan.json", command_of(tmp_path, *flags, "--train-iters", "3"))
    assert [place.host for place in ran] == [hosts.names[slot.node] for slot in plan.mapping.slots]
    assert [place.stage for place in ran] == [0, 1]
