"""Memory of runs in fp32: hand counts, what layers were measured to keep, and a run that is weighed."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.cost import communication
from quartet_plugin.cost.constants import NEUTRAL
from quartet_plugin.cost.memory import (
    bytes_per_weight,
    layer_activation_bytes,
    memory_by_device,
    peak_memory,
    weights_of_stages,
)
from quartet_plugin.cost.run import HalfPrecision, Software
from quartet_plugin.model.job_description import Experts
from tests.cost.live import cpu_run
from tests.megatron import support

NO_LATENCY = replace(NEUTRAL, hop_s=1e-15)
WEIGHING = "tests.cost.weighing_pretrain"


def test_an_fp32_weight_is_its_own_master_weight() -> None:
    """Weight, gradient, moments: 4 + 4 + 8 bytes; half precision 2 + 4 + 12 with the master weight."""
    found = peak_memory(cpu_run(layers=8, hidden=256, seq=128, vocab=4096, pp=1))
    layer = 12 * 256**2 + 4 * 256
    weights = 8 * layer + (4096 + 128) * 256
    assert found.parameters_bytes == 4 * weights
    assert found.gradients_bytes == 4 * weights
    assert found.optimizer_bytes == 8 * weights
    assert bytes_per_weight("bf16", Software()) == (2.0, 4.0, 12.0)
    assert sum(bytes_per_weight("fp32", Software())) == 16.0


def test_fp32_activations_take_twice_the_bytes() -> None:
    """But for the statistics of norms, which plain operations compute in fp32 whatever the rest is."""
    run = cpu_run()
    single = replace(run, software=replace(run.software, plain_operations=False))
    half = replace(single, half="bf16", matmul="bf16")
    assert layer_activation_bytes(single, experts=None) == 2 * layer_activation_bytes(half, experts=None)
    with_norms = [
        layer_activation_bytes(replace(each, software=run.software), experts=None) for each in (single, half)
    ]
    assert 2 * with_norms[1] - with_norms[0] == 2 * 2 * 4 * run.tokens_per_microbatch
    assert peak_memory(single).activations_bytes == pytest.approx(2 * peak_memory(half).activations_bytes)


@pytest.mark.parametrize(
    ("hidden", "seq", "tp", "measured"),
    [(256, 64, 1, 2_230_272), (256, 64, 2, 1_378_304), (128, 128, 1, 2_625_536)],
)
def test_a_layer_keeps_what_autograd_was_measured_to_save(
    hidden: int, seq: int, tp: int, measured: int
) -> None:
    """Megatron-Core 0.19.2 on processors, a micro-batch of 2."""
    run = cpu_run(hidden=hidden, seq=seq, pp=3 - tp, tp=tp, micro_batch=2)
    assert layer_activation_bytes(run, experts=None) == measured


def test_a_whole_gradient_of_the_vocabulary_is_held_for_a_while() -> None:
    small, large = (
        peak_memory(cpu_run(pp=1, vocab=vocab, seq=32)).temporary_bytes for vocab in (2048, 65536)
    )
    assert large - small >= 4 * (65536 - 2048) * 256


def test_expert_gradients_that_gloo_reduces_are_copied() -> None:
    """A sharded optimizer's, when no activations are left; the copy counts where it is larger than these."""
    dense = replace(cpu_run(pp=1, seq=32), zero_stage=1)
    few, many = (
        replace(dense, experts=Experts(num_experts=num, experts_per_token=2, ffn_hidden_size=256))
        for num in (2, 64)
    )
    for run in (dense, few, many):
        whole = peak_memory(run)
        (copied,) = (4.0 * weights.num_expert for weights in weights_of_stages(run))
        plain = peak_memory(replace(run, software=replace(run.software, copies_reductions=False)))
        # Activations and what lives beside them, or the copy.
        expected = max(plain.activations_bytes + plain.temporary_bytes, copied)
        assert whole.activations_bytes + whole.temporary_bytes == expected
        assert (whole == plain) == (run is not many)
    assert peak_memory(replace(many, zero_stage=0)).temporary_bytes < peak_memory(many).temporary_bytes
    assert not Software().copies_reductions


def test_the_ends_of_a_v_are_on_one_device() -> None:
    run = cpu_run(split=(1, 3, 3, 1), schedule="zb-v", vocab=32768)
    weights = weights_of_stages(run)
    first, second = (memory.parameters_bytes for memory in memory_by_device(run))
    assert first == 4 * (weights[0].num_total + weights[3].num_total)
    assert second == 4 * (weights[1].num_total + weights[2].num_total)


def test_updated_fp32_parameters_travel_whole() -> None:
    def exchanged_s(precision: HalfPrecision, zero_stage: int) -> float:
        software = Software(has_data_overlap=False)
        run = replace(cpu_run(pp=1), half=precision, zero_stage=zero_stage, software=software)
        return communication.data_parallel_s(
            run, NO_LATENCY, num_dense=1e9, num_expert=0.0, forward_s=0.0, backward_s=0.0
        )

    # Gradients travel in fp32 whatever the weights are: stage 1 halves their reduction and gathers weights.
    reduced = exchanged_s("bf16", 0) / 2
    assert exchanged_s("bf16", 1) == pytest.approx(reduced * 1.5)
    assert exchanged_s("fp32", 1) == pytest.approx(reduced * 2)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_real_run_holds_what_is_predicted(tmp_path: Path) -> None:
    """Weights, summed gradients and moments of both pipeline ranks of unmodified Megatron, to 1 %."""
    flags = shlex.split(
        "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 64 "
        "--max-position-embeddings 64 --tokenizer-type NullTokenizer --vocab-size 4095 --mock-data "
        "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 "
        "--train-iters 1 --eval-iters 0 --eval-interval 1000 --pipeline-model-parallel-size 2 "
        "--pipeline-model-parallel-layout Ettt|tL"
    )
    code, output = support.run_ranks(2, WEIGHING, str(tmp_path), *flags, timeout_s=150, log=tmp_path / "log")
    assert code == 0, output[-3000:]
    run = cpu_run(layers=4, hidden=256, seq=64, vocab=4096, split=(3, 1), num_microbatches=2)
    for rank, predicted in enumerate(memory_by_device(run)):
        measured = json.loads((tmp_path / f"bytes-{rank}.json").read_text())
        assert predicted.parameters_bytes == pytest.approx(measured["parameters"], rel=0.01)
        assert predicted.gradients_bytes == pytest.approx(measured["gradients"], rel=0.01)
        assert predicted.optimizer_bytes == pytest.approx(measured["optimizer"], rel=0.01)
