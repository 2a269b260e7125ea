"""What a run on processors takes beside what accelerators do."""

from dataclasses import replace

import pytest

from quartet_plugin.cost import communication
from quartet_plugin.cost.compute import (
    LayerTimes,
    Rates,
    embedding_times,
    head_times,
    layer_times,
    waves,
)
from quartet_plugin.cost.constants import NEUTRAL, ClusterConstants, Constants, fitted
from quartet_plugin.cost.iteration.step import clearing_s, contention_gain, held_weights, optimizer_s
from quartet_plugin.cost.iteration.terms import stage_parts
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import Software
from quartet_plugin.cost.times import Times
from quartet_plugin.errors import ConfigError
from tests.cost.live import cpu_run


def test_a_core_has_no_waves_of_tiles() -> None:
    assert waves(100, 100, 1) == 1.0
    assert waves(100, 100, 108) > 1.0


def test_a_core_packs_operands_before_it_multiplies() -> None:
    """Weights are packed for every microbatch, however few its tokens."""
    run = cpu_run()
    rates = Rates(run, NEUTRAL)
    one, two = rates.gemm_s(64, 1024, 256), rates.gemm_s(128, 1024, 256)
    assert 0 < two - one < one
    packed = one - 2 * 64 * 1024 * 256 / rates.matmul
    assert packed == pytest.approx(4 * (64 * 256 + 256 * 1024 + 64 * 1024) * rates.traffic)


def test_fp32_moves_twice_the_bytes_of_halves() -> None:
    single = cpu_run(pp=1, tp=2)
    half = replace(single, half="bf16")
    moved = [communication.tensor_parallel(run, NEUTRAL)[0].forward_s for run in (single, half)]
    latency = communication.tensor_parallel(replace(single, half="bf16"), replace(NEUTRAL, scale_up=1e9))[
        0
    ].forward_s
    assert moved[0] - latency == pytest.approx(2 * (moved[1] - latency), rel=1e-6)


def test_eager_gradients_cost_the_whole_vocabulary() -> None:
    run = cpu_run(vocab=32768)
    rates = Rates(run, NEUTRAL)
    small = cpu_run(vocab=2048)
    grown = embedding_times(run, rates).elementwise.weight_grad_s
    assert grown > 5 * embedding_times(small, Rates(small, NEUTRAL)).elementwise.weight_grad_s
    without = replace(run, software=replace(run.software, eager_gradients=False))
    assert head_times(without, NEUTRAL, rates).elementwise.weight_grad_s == 0.0


def test_the_ends_of_a_pipeline_sum_tied_gradients() -> None:
    run = cpu_run()
    assert predict(run, NEUTRAL).terms["ends_comm_s"] > 0
    assert "ends_comm_s" not in predict(cpu_run(pp=1), NEUTRAL).terms
    turned = cpu_run(split=(2, 2, 2, 2), schedule="zb-v")
    assert communication.tied_ends_s(turned, NEUTRAL) == 0.0
    untied = replace(run, shape=replace(run.shape, tied_embeddings=False))
    assert communication.tied_ends_s(untied, NEUTRAL) == 0.0


def test_the_ends_of_a_tensor_parallel_model_reduce() -> None:
    run = cpu_run(pp=1, tp=2)
    embedding, head = communication.tensor_parallel_ends(run, NEUTRAL)
    assert embedding.forward_s == head.input_grad_s > 0
    assert 0 < head.forward_s < head.input_grad_s * 3
    elsewhere = replace(run, software=Software())
    assert communication.tensor_parallel_ends(elsewhere, NEUTRAL) == (Times(), Times())
    layers = replace(run, software=replace(run.software, reduces_ends=False))
    of_ends = (
        stage_parts(run, NEUTRAL)[0]["tp_comm"].total_s - stage_parts(layers, NEUTRAL)[0]["tp_comm"].total_s
    )
    assert of_ends == pytest.approx(embedding.total_s + head.total_s)


def test_ratios_change_their_part_alone() -> None:
    run = cpu_run()
    base = layer_times(run, NEUTRAL, Rates(run, NEUTRAL), experts=None)

    def changed(**ratios: float) -> LayerTimes:
        constants = replace(NEUTRAL, **ratios)
        return layer_times(run, constants, Rates(run, constants), experts=None)

    assert changed() == base
    weights = changed(weight_product=2.0)
    assert weights == replace(base, gemm=base.gemm._replace(weight_grad_s=2 * base.gemm.weight_grad_s))
    starts = changed(launch_weight=0.25)
    assert starts == replace(base, launch=base.launch._replace(weight_grad_s=base.launch.weight_grad_s / 4))


def test_neutral_constants_predict_as_shared_ones() -> None:
    shared = {name: getattr(fitted(), name) for name in Constants.__dataclass_fields__}
    run = cpu_run()
    assert predict(run, ClusterConstants(**shared)).iter_time_s == pytest.approx(
        predict(run, fitted()).iter_time_s
    )


@pytest.mark.parametrize(
    "change", [{"gemm_rate": 0.0}, {"residual": -1.0}, {"action_s": -1.0}, {"accumulation": 0.0}]
)
def test_impossible_constants_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        ClusterConstants(**change)


def test_a_transfers_latency_is_not_a_collectives() -> None:
    run = cpu_run()
    slow = replace(NEUTRAL, peer_hop=100.0)
    more = communication.transfer_s(run, slow, sender=0, receiver=1)
    less = communication.transfer_s(run, NEUTRAL, sender=0, receiver=1)
    assert more - less == pytest.approx(99 * NEUTRAL.hop_s)
    assert communication.transfer_latency_s(fitted()) == fitted().hop_s
    tensor = cpu_run(pp=1, tp=2)
    assert predict(tensor, slow).iter_time_s == predict(tensor, NEUTRAL).iter_time_s


def test_tensor_parallel_ranks_wait_for_the_slowest() -> None:
    run = cpu_run(pp=1, tp=2)
    uneven = replace(NEUTRAL, skew=0.1)
    base, found = (stage_parts(run, constants)[0] for constants in (NEUTRAL, uneven))
    computed = layer_times(run, NEUTRAL, Rates(run, NEUTRAL), experts=None).total.forward_s
    waited = found["tp_comm"].forward_s - base["tp_comm"].forward_s
    assert waited == pytest.approx(0.1 * computed * run.shape.num_layers)
    assert {name: found[name] for name in found if name != "tp_comm"} == {
        name: base[name] for name in base if name != "tp_comm"
    }
    alone = cpu_run()
    assert predict(alone, uneven) == predict(alone, NEUTRAL)
    hidden = replace(run, software=Software())
    assert predict(hidden, uneven) == predict(hidden, NEUTRAL)


def test_every_weight_tensor_is_stepped_by_itself() -> None:
    run = cpu_run(layers=8, pp=1)
    held = held_weights(run, 0)
    few, many = (optimizer_s(run, NEUTRAL, held, counts=(count,)) for count in (4, 8))
    assert many - few == pytest.approx(4 * 12 * NEUTRAL.launch_s)
    slow = replace(NEUTRAL, optimizer_start=3.0)
    assert optimizer_s(run, slow, held, counts=(8,)) - many == pytest.approx(
        2 * (8 * 12 + 4) * NEUTRAL.launch_s
    )
    assert 0 < clearing_s(run, NEUTRAL, held) < many
    fused = replace(run, software=replace(run.software, eager_gradients=False))
    slower, usual = (optimizer_s(fused, constants, held, counts=(8,)) for constants in (slow, NEUTRAL))
    assert slower == usual


def test_a_rank_computes_faster_while_the_other_waits() -> None:
    shared = replace(NEUTRAL, contention=0.25)
    few, many = (cpu_run(num_microbatches=count) for count in (2, 32))
    gains = [1 - predict(run, shared).iter_time_s / predict(run, NEUTRAL).iter_time_s for run in (few, many)]
    assert gains[0] > 2 * gains[1] > 0
    found = predict(few, shared)
    assert found.terms["pp_alone_s"] < 0
    assert sum(found.terms.values()) == pytest.approx(found.iter_time_s)
    # One microbatch: never more than one rank computes.
    alone = cpu_run(num_microbatches=1)
    terms = predict(alone, NEUTRAL).terms
    span = sum(terms[name] for name in ("compute_s", "recompute_s", "action_s", "pp_bubble_s", "pp_comm_s"))
    free = replace(shared, hop_s=1e-15, peer=1e12)
    assert contention_gain(alone.software, alone.cluster, shared) == pytest.approx(0.2)
    assert predict(alone, free).terms["pp_alone_s"] == pytest.approx(-0.2 * span, rel=0.02)
    for other in (cpu_run(pp=1), cpu_run(pp=1, tp=2), replace(few, software=Software())):
        assert predict(other, shared) == predict(other, NEUTRAL)


def test_actions_of_a_runtime_of_ours_take_more() -> None:
    slow = replace(NEUTRAL, action_s=1e-3, runtime_s=1e-4)
    stock, split, whole = (
        stage_parts(run, slow)[0]["action"]
        for run in (cpu_run(), cpu_run(schedule="zb-h1"), cpu_run(schedule="gpipe"))
    )
    assert stock == pytest.approx(Times(1e-3, 1e-3, 0.0))
    assert split == pytest.approx(Times(1.1e-3, 1.1e-3, 1e-4))
    assert whole == pytest.approx(Times(1.1e-3, 1.1e-3, 0.0))
