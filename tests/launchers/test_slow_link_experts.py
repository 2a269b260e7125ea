"""Experts over a slow link, real Megatron: the study keeps their exchange on fast links, and trains so.

Two hosts of two processes: the command spreads the experts over all four, so that every exchange crosses the
slow link; plans that keep it inside of a host are among the degrees. Four hosts of one process, fast in two
pairs, whose ranks are not in the order of these pairs: with all else kept, only an order of ranks helps. The
lines that `pytest -s` shows have the speedups.
"""

import shlex
from itertools import batched
from pathlib import Path

import pytest

from quartet_plugin.model.plan import read_plan
from tests.launchers.linked_hosts import command_of, linked_hosts

CONFIG = """\
run: linked
device: cpu
launcher: ssh
site: {site}
trial: {{nodes: {nodes}, warmup: 1, measure: 4}}
study: {{trials: {trials}, top_k: 2, rounds: 5, control: 0}}
search: {search}
"""
# Many tokens through narrow experts: what crosses the link is the tokens, far more than the gradients.
FLAGS = shlex.split("""
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 64 --num-attention-heads 1 --disable-bias-linear
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-load-balancing-type none
    --moe-token-dispatcher-type alltoall
    --seq-length 16 --max-position-embeddings 16 --micro-batch-size 64 --global-batch-size 1024
    --vocab-size 15 --make-vocab-size-divisible-by 16 --tokenizer-type NullTokenizer --mock-data
    --train-iters 1000 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine
    --clip-grad 1.0 --log-interval 1 --eval-interval 10000 --eval-iters 1
    --attention-dropout 0 --hidden-dropout 0
""")


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_experts_stay_inside_of_hosts_that_a_slow_link_joins(tmp_path: Path) -> None:
    flags = [*FLAGS, "--expert-model-parallel-size", "4"]
    with linked_hosts(tmp_path, number=2, slow=[(0, 1)]) as hosts:
        config = CONFIG.format(
            site=hosts.site, nodes=2, trials=6, search="{tensor_parallel: 1, micro_batch_size: 64}"
        )
        best = hosts.tune(config, command_of(tmp_path, *flags, processes=2)) / "best" / "plan.json"
        assert read_plan(best).layout.expert_parallel < 4
        hosts.train(best, command_of(tmp_path, *flags, "--train-iters", "3", processes=2))


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_an_order_of_ranks_keeps_the_experts_exchange_on_fast_links(tmp_path: Path) -> None:
    flags = [*FLAGS, "--expert-model-parallel-size", "2"]
    pairs = [{"h1", "h3"}, {"h2", "h4"}]
    with linked_hosts(tmp_path, number=4, slow=[(0, 1), (0, 3), (2, 1), (2, 3)]) as hosts:
        config = CONFIG.format(
            site=hosts.site,
            nodes=4,
            trials=6,
            search="{tensor_parallel: 1, pipeline_parallel: 1, data_parallel: 4, expert_parallel: 2, "
            "micro_batch_size: 64}",
        )
        best = hosts.tune(config, command_of(tmp_path, *flags)) / "best" / "plan.json"
        ran = hosts.train(best, command_of(tmp_path, *flags, "--train-iters", "3"))
    # Ranks that follow one another share the experts.
    assert [place.experts for place in ran] == [0, 1, 0, 1]
    groups = [{place.host for place in group} for group in batched(ran, 2)]
    assert sorted(groups, key=min) == pairs
