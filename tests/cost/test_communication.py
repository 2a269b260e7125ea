"""Collectives and transfers, on the links their ranks use."""

from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.cost import communication
from quartet_plugin.cost.cluster import with_hop
from quartet_plugin.cost.compute import LayerTimes
from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.iteration.overlap import hidden_terms
from quartet_plugin.cost.iteration.step import held_weights
from quartet_plugin.cost.memory import peak_memory
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import ON_CPU, PORT_SHARE, Software, TrainingRun
from quartet_plugin.cost.software import imbalance_of, with_features, with_settings
from quartet_plugin.cost.times import Times
from quartet_plugin.model.job_description import LatentAttention
from quartet_plugin.model.layout import SettingValue
from tests.cost.runs import EXPERTS, PIPELINE, ROW, run

CONSTANTS = Constants()
WITHOUT_LATENCY = with_hop(CONSTANTS, 1e-15)
NEMO: dict[str, Any] = ROW | {"gpu": "H100-SXM-80GB", "software": "NeMo", "zero": 1}


def group(size: int, stride: int, **changes: Any) -> communication.Group:
    return communication.group(run(**changes).cluster, CONSTANTS, size=size, stride=stride)


def test_inside_a_node_the_fast_links_count() -> None:
    inside = group(8, 1)
    assert inside.num_domains == 1
    assert inside.bytes_per_s == pytest.approx(300e9 * CONSTANTS.scale_up)


def test_ranks_of_a_node_share_its_network_ports() -> None:
    across = group(64, 1, gpus=64, dp=8)
    alone = group(8, 8, gpus=64, dp=8)
    assert (across.local, across.num_domains) == (8, 8)
    assert (alone.local, alone.num_domains) == (1, 8)
    port = 25e9 * CONSTANTS.scale_out
    assert alone.bytes_per_s == pytest.approx(port)
    assert across.bytes_per_s == pytest.approx(8 * port)


def test_a_larger_domain_keeps_a_group_inside() -> None:
    changes = {"gpus": 64, "dp": 8, "gpu": "GB200", "gpus_per_node": 4, "nvlink_domain": 72}
    assert group(8, 8, **changes).num_domains == 1


def test_gathers_cross_every_rank_and_reductions_are_trees() -> None:
    few, many = group(16, 8, gpus=128, dp=16), group(128, 8, gpus=1024, dp=128)
    assert many.gather_s(0.0) == pytest.approx(few.gather_s(0.0) * 127 / 15)
    assert many.reduce_s(0.0) < 3 * few.reduce_s(0.0)
    assert group(1, 1).gather_s(1e9) == group(1, 1).reduce_s(1e9) == 0


def test_a_ring_moves_the_textbook_volume() -> None:
    found = group(8, 1)
    assert found.gather_s(8e9, calls=0) == pytest.approx(7e9 / found.bytes_per_s)


def test_tensor_parallel_overlap() -> None:
    plain, again = communication.tensor_parallel(run(software="Megatron-LM 2021"), CONSTANTS)
    hidden, _ = communication.tensor_parallel(run(NEMO), CONSTANTS)
    assert plain.forward_s == again
    faster = run(NEMO).cluster.scale_up_bytes_per_s / run().cluster.scale_up_bytes_per_s
    assert hidden.forward_s * faster < 0.7 * plain.forward_s
    assert communication.tensor_parallel(run(tp=1, dp=8, gbs=32), CONSTANTS) == (Times(), 0.0)


def test_narrow_operands_are_gathered_in_their_own_format() -> None:
    """One byte is gathered in place of two, and two are scattered as before: 3/4 of the traffic."""

    def forward_s(**changes: Any) -> float:
        row = {"gpu": "H100-SXM-80GB", "software": "Megatron-Core", "seq_len": 65536, **changes}
        return communication.tensor_parallel(run(**row), CONSTANTS)[0].forward_s

    half, narrow = forward_s(precision="bf16"), forward_s(precision="fp8")
    assert narrow / half == pytest.approx(0.75, rel=0.01)
    assert forward_s(precision="fp8", sp=False) == forward_s(precision="bf16", sp=False)
    words = "torchtitan"
    assert forward_s(precision="fp8", software=words) == forward_s(precision="bf16", software=words)


def test_the_network_is_slower_than_the_node() -> None:
    inside = communication.transfer_s(run(PIPELINE), CONSTANTS, sender=0, receiver=1)
    across = communication.transfer_s(run(PIPELINE), CONSTANTS, sender=7, receiver=8)
    slow = communication.transfer_s(run(PIPELINE, inter_bw_Gbps_per_gpu=50), CONSTANTS, sender=7, receiver=8)
    assert inside < across < slow


def exposed(**changes: Any) -> float:
    return predict(run(NEMO, **changes), CONSTANTS).terms["dp_comm_s"]


def test_gradient_reduction_hides_behind_the_backward() -> None:
    many = {"gpus": 64, "dp": 8}
    hidden, alone = exposed(**many, gbs=320), exposed(**many, gbs=320, software="NeMo, no comm overlap")
    assert 0 < hidden < 0.6 * alone
    assert exposed() == 0


def test_stage_3_gathers_every_microbatch() -> None:
    changes = {"zero": 3, "fsdp": 64, "gpus": 64, "tp": 1, "dp": 64, "sp": False}
    terms = predict(run(NEMO, **changes, gbs=256), CONSTANTS).terms
    twice = predict(run(NEMO, **changes, gbs=512), CONSTANTS).terms
    assert terms["dp_comm_s"] == 0
    assert twice["fsdp_comm_s"] == pytest.approx(2 * terms["fsdp_comm_s"])


def test_megatron_fsdp_gathers_layers_every_microbatch_and_the_ends_once() -> None:
    base = run(NEMO, gpus=8, tp=1, dp=8, sp=False, gbs=64, zero=1)
    sharded = replace(
        base, zero_stage=3, shard_group=8, software=with_settings(base.software, {"use_megatron_fsdp": True})
    )
    assert sharded.software.shards_parameters
    held = held_weights(sharded, 0)
    ranks = communication.group(sharded.cluster, WITHOUT_LATENCY, size=8, stride=1)
    seconds = communication.sharded_parameters_s(
        sharded,
        WITHOUT_LATENCY,
        num_dense=held.num_dense,
        num_expert=0.0,
        forward_s=0.0,
        backward_s=0.0,
    )
    ends, gradient = sharded.end_parameters, sharded.software.gradient_bytes
    moved = 2 * 2.0 * (held.num_dense - ends) + gradient * held.num_dense
    moved += 2.0 * ends / sharded.num_microbatches
    assert seconds == pytest.approx(ranks.gather_s(moved), rel=1e-6)
    terms = predict(sharded, CONSTANTS).terms
    assert terms["dp_comm_s"] == 0.0
    hidden = hidden_terms(sharded, CONSTANTS)["fsdp_comm_s"]
    assert 0.0 < terms["fsdp_comm_s"] < hidden
    assert terms["optimizer_s"] < predict(base, CONSTANTS).terms["optimizer_s"]


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_experts_are_gathered_of_the_ranks_that_hold_the_same_ones(ep: int) -> None:
    base = run(EXPERTS, gpus=8, tp=1, pp=1, dp=8, ep=ep, sp=False, zero=1)
    software = with_settings(base.software, {"use_megatron_fsdp": True})
    sharded = replace(base, zero_stage=3, shard_group=8, software=software)
    held = held_weights(sharded, 0)
    both, dense = (
        communication.sharded_parameters_s(
            sharded,
            WITHOUT_LATENCY,
            num_dense=held.num_dense,
            num_expert=num_expert,
            forward_s=0.0,
            backward_s=0.0,
        )
        for num_expert in (held.num_expert, 0.0)
    )
    holders = communication.group(sharded.cluster, WITHOUT_LATENCY, size=8 // ep, stride=ep)
    moved = (2 * 2.0 + software.gradient_bytes) * held.num_expert
    assert both - dense == pytest.approx(holders.gather_s(moved), rel=1e-6)


def test_stage_3_gathers_what_a_rank_holds() -> None:
    """Of four pipeline ranks each, hidden and exposed, about a quarter of what a single one does."""
    sizes = {"zero": 3, "fsdp": 8, "tp": 1, "dp": 8, "sp": False, "gbs": 64}
    whole = run(NEMO, gpus=8, **sizes)
    staged = run(NEMO, gpus=32, pp=4, schedule="1F1B", **sizes)
    seconds = [
        hidden_terms(each, CONSTANTS)["fsdp_comm_s"] + predict(each, CONSTANTS).terms["fsdp_comm_s"]
        for each in (whole, staged)
    ]
    assert 0.2 * seconds[0] < seconds[1] < 0.35 * seconds[0]


def test_tied_ends_that_share_a_domain_sum_over_its_links() -> None:
    """Also the first and the last of many ranks, which lie nearly a domain apart."""
    tied = [run(NEMO, tp=1, dp=8 // pp, pp=pp, sp=False, gbs=64, schedule="1F1B") for pp in (2, 4, 8)]
    software = replace(tied[0].software, reduces_ends=True)
    shape = replace(tied[0].shape, tied_embeddings=True)
    seconds = {
        communication.tied_ends_s(replace(each, software=software, shape=shape), CONSTANTS) for each in tied
    }
    assert len(seconds) == 1
    assert min(seconds) > 0


def test_experts_exchange_tokens_only_where_they_are_spread() -> None:
    found = run(EXPERTS)
    assert found.experts is not None
    assert communication.expert_parallel(found, CONSTANTS, found.experts).forward_s > 0
    alone = run(EXPERTS, ep=1)
    assert communication.expert_parallel(alone, CONSTANTS, found.experts) == Times()


@pytest.mark.parametrize("features", [(), ("moe_deepep",)])
def test_exchanged_tokens_leave_a_node_at_the_rate_of_a_port(features: tuple[str, ...]) -> None:
    """Collectives keep their own rate; an exchange has it only where the links were measured."""
    across = run(EXPERTS, topk=8, ep=16, dp=16, gpus=16)
    across = replace(across, software=with_features(across.software, features))

    def forward_s(run: TrainingRun, share: float | None) -> float:
        assert run.experts is not None
        placed = replace(run, cluster=replace(run.cluster, port_share=share))
        return communication.expert_parallel(placed, WITHOUT_LATENCY, run.experts).forward_s

    assert across.cluster.port_share == PORT_SHARE
    whole_s, half_s = forward_s(across, 1.0), forward_s(across, 0.5)
    at_port_s = whole_s + (half_s - whole_s) * (1 / PORT_SHARE - 1)
    assert forward_s(across, PORT_SHARE) == pytest.approx(at_port_s)
    assert forward_s(across, None) == pytest.approx(forward_s(across, CONSTANTS.scale_out))
    inside = run(EXPERTS)
    assert forward_s(inside, 0.5) == forward_s(inside, None)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_ranks_on_processors_wait_for_each_other_in_every_exchange(dispatcher: str) -> None:
    base = run(EXPERTS, ep=8)
    assert base.experts is not None
    software = with_settings(base.software, {"moe_token_dispatcher": dispatcher})
    waiting = replace(software, exchange_start_s=ON_CPU.exchange_start_s)
    times = [
        communication.expert_parallel(replace(base, software=one), CONSTANTS, base.experts)
        for one in (software, waiting)
    ]
    assert software.exchange_start_s == 0
    assert times[1].forward_s == pytest.approx(times[0].forward_s + 2 * ON_CPU.exchange_start_s)
    assert times[1].input_grad_s == pytest.approx(times[0].input_grad_s + 2 * ON_CPU.exchange_start_s)


def test_gathered_tokens_are_all_tokens_whatever_the_routing() -> None:
    """Each device receives the tokens of all others; an all-to-all moves a token for each of its experts."""
    base = run(EXPERTS, topk=8, ep=8, forced_balance=True)
    assert base.experts is not None

    def exchange_s(dispatcher: str, experts_per_token: int) -> float:
        software = with_settings(base.software, {"moe_token_dispatcher": dispatcher})
        experts = replace(base.experts, experts_per_token=experts_per_token) if base.experts else None
        assert experts is not None
        return communication.expert_parallel(replace(base, software=software), CONSTANTS, experts).forward_s

    one, eight = exchange_s("alltoall", 1), exchange_s("alltoall", 8)
    assert exchange_s("allgather", 1) == exchange_s("allgather", 8)
    # Of eight devices an all-to-all with one expert a token moves an eighth of what a gather moves.
    assert one < eight < 1.3 * exchange_s("allgather", 8)
    assert exchange_s("allgather", 1) > 3 * one
    alone = replace(base, layout=replace(base.layout, expert_parallel=1))
    assert communication.expert_parallel(alone, CONSTANTS, base.experts) == Times()
    gathered = replace(base, software=replace(base.software, gathers_tokens=True))
    extra = peak_memory(gathered).temporary_bytes - peak_memory(base).temporary_bytes
    assert extra == pytest.approx(base.tokens_per_microbatch * 8 * base.shape.hidden_size * 2)


@pytest.mark.parametrize("features", [(), ("moe_deepep",), ("moe_hybridep",)])
def test_a_plans_dispatcher_decides_its_price_whatever_the_command_has(features: tuple[str, ...]) -> None:
    """Over nodes flex sends a token to a node once; inside one it sends as many, and permutes less."""

    def forward_s(dispatcher: str, *, ep: int) -> float:
        base = run(EXPERTS, topk=8, ep=ep, dp=16, gpus=16)
        assert base.experts is not None
        known: dict[str, SettingValue] = {"moe_token_dispatcher": dispatcher}
        planned = replace(base, software=with_settings(with_features(base.software, features), known))
        return communication.expert_parallel(planned, CONSTANTS, base.experts).forward_s

    for backend in ("flex-deepep", "flex-hybridep"):
        assert forward_s(backend, ep=16) < 0.7 * forward_s("alltoall", ep=16)
        assert forward_s(backend, ep=8) == forward_s("alltoall", ep=8)
        assert with_settings(ON_CPU, {"moe_token_dispatcher": backend}) == ON_CPU
    # A back end without a word is priced by the command's features.
    told = with_settings(with_features(Software(), features), {"moe_token_dispatcher": "flex"})
    assert told.sends_once_a_domain == bool(features)


def test_features_change_what_runs_beside_compute_on_accelerators_alone() -> None:
    features = ("overlap_moe", "moe_deepep", "graphed_attn", "graphed_moe_router", "moe_forced_balance")
    software = with_features(Software(), features)
    assert (software.expert_overlap, software.sends_once_a_domain) == (True, True)
    assert software.graphed_share == pytest.approx(0.45)
    assert not software.is_graphed
    assert with_features(Software(), ("graphed_iteration",)).is_graphed
    assert with_features(ON_CPU, features) == ON_CPU
    assert with_features(Software(), ("moe", "moe_flex_dispatcher")) == Software()
    assert (imbalance_of(features), imbalance_of(())) == (1.02, 1.1)


def test_devices_that_share_an_expert_gather_its_tokens() -> None:
    """In collectives of a dense FFN: a token for each of its experts, once where all are gathered."""
    base = run(EXPERTS, tp=2, dp=4, ep=4, sp=True, topk=6, forced_balance=True)
    assert base.experts is not None
    experts = replace(base.experts, shared_ffn_hidden_size=0)
    assert communication.ffn_pairs(base, experts) == (6 * base.imbalance, 0.0)
    alone = replace(base, layout=replace(base.layout, expert_parallel=1))
    assert communication.ffn_pairs(alone, replace(experts, shared_ffn_hidden_size=512)) == (6.0, 1.0)
    gathered = replace(base, software=replace(base.software, gathers_tokens=True))
    assert communication.ffn_pairs(gathered, experts) == (1.0, 0.0)
    whole = replace(base, has_whole_experts=True)
    assert communication.ffn_pairs(whole, experts) == (0.0, 0.0)
    times = [predict(found, CONSTANTS).terms["tp_comm_s"] for found in (whole, gathered, base)]
    assert times == sorted(times)
    assert times[2] > 3 * times[0] > 0


def test_experts_spread_over_tensor_parallel_ranks_have_fewer_weights_and_reduce_none() -> None:
    """Eight ranks, TP 2: with EP 4 each expert is on two of them, with EP 8 on one."""
    four, eight = (replace(run(EXPERTS, tp=2, dp=4, ep=ep, sp=True), has_whole_experts=True) for ep in (4, 8))
    assert not four.layout.needs_whole_experts
    assert eight.layout.needs_whole_experts
    few, many = held_weights(eight, 0), held_weights(four, 0)
    assert few.num_expert == pytest.approx(many.num_expert / 2)
    assert few.num_dense == many.num_dense
    less = many.num_expert - few.num_expert
    small, large = (peak_memory(each) for each in (eight, four))
    assert large.parameters_bytes - small.parameters_bytes == pytest.approx(2 * less)
    assert large.gradients_bytes - small.gradients_bytes == pytest.approx(4 * less)
    # Two copies share the states of twice the weights.
    assert large.optimizer_bytes == pytest.approx(small.optimizer_bytes)
    reduced = [
        communication.data_parallel_s(
            each,
            WITHOUT_LATENCY,
            num_dense=0.0,
            num_expert=1e9,
            forward_s=0.0,
            backward_s=0.0,
        )
        for each in (four, eight)
    ]
    assert reduced[1] < 1e-9 < reduced[0]


@pytest.mark.parametrize("gathers", [False, True])
def test_each_tensor_parallel_rank_exchanges_its_part_of_the_sequence(gathers: bool) -> None:
    """Whole experts: EP 8 over TP 2 x DP 4 moves half of what it moves over DP 8 (`token_dispatcher.py`)."""
    alone, spread = (
        replace(run(EXPERTS, tp=tp, dp=8 // tp, ep=8, sp=tp > 1), has_whole_experts=True) for tp in (1, 2)
    )
    assert spread.layout.needs_whole_experts
    software = replace(alone.software, gathers_tokens=gathers)
    experts = alone.experts
    assert experts is not None
    once, half = (
        communication.expert_parallel(replace(each, software=software), WITHOUT_LATENCY, experts)
        for each in (alone, spread)
    )
    assert half.forward_s == pytest.approx(once.forward_s / 2)
    assert half.input_grad_s == pytest.approx(once.input_grad_s / 2)


# A layer of 10, 12 and 8 ms; its routed experts take 4, 5 and 3 ms of these.
LAYER = LayerTimes(
    gemm=Times(0.010, 0.012, 0.008),
    attention=Times(),
    elementwise=Times(),
    launch=Times(),
    routed_experts=Times(0.004, 0.005, 0.003),
    shared_into=Times(0.002, 0.002, 0.002),
    shared_out=Times(0.001, 0.001, 0.001),
)


def exposed_s(once: float, settings: dict[str, SettingValue] | None = None, *, left: float = 0.2) -> Times:
    """What is exposed of four exchanges of `once` seconds, a share of `left` or more of what overlaps."""
    base = run(EXPERTS, ep=8)
    software = with_settings(base.software, settings or {})
    exchange = Times(2 * once, 2 * once, 0.0)
    constants = replace(CONSTANTS, data_exposed=left)
    return communication.beside_compute(replace(base, software=software), constants, exchange, LAYER)


def test_exchanges_hide_beside_another_microbatch_part_by_part() -> None:
    """Beside routed experts of 5 + 3 ms backward and 4 ms forward, the rest of 7 + 5 and 6 ms."""
    overlap: dict[str, SettingValue] = {"overlap_moe_expert_parallel_comm": True}
    assert sum(exposed_s(0.005)) == pytest.approx(0.020)
    # All of it fits, so that the constant part of overlapped traffic is left.
    assert sum(exposed_s(0.003, overlap)) == pytest.approx(0.2 * 0.012)
    # Each exchange is exposed where it is longer than what runs beside it: 9 over 8 and 4, 9 over 6.
    assert sum(exposed_s(0.009, overlap, left=0.02)) == pytest.approx(0.001 + 0.005 + 0.003)
    # With delayed weight gradients the backward's exchange begins as soon as the forward's ends: both take
    # 18 ms, beside 12 ms of routed experts and 18 ms of the rest.
    delayed = exposed_s(0.009, {**overlap, "delay_wgrad_compute": True}, left=0.02)
    assert sum(delayed) == pytest.approx(0.006)


def test_exchanges_hide_beside_the_shared_expert() -> None:
    """Products into its width run beside dispatch, those out of it beside combine, in each direction."""
    shared: dict[str, SettingValue] = {"moe_shared_expert_overlap": True}
    assert exposed_s(0.006, shared) == pytest.approx(Times(0.004 + 0.005, 0.002 + 0.004, 0.0))
    # A fifth of hidden traffic stays exposed.
    assert exposed_s(0.001, shared) == pytest.approx(Times(0.0004, 0.0004, 0.0))
    assert exposed_s(0.006, {**shared, "moe_token_dispatcher": "allgather"}) == exposed_s(0.006)
    # No stream of a processor runs beside another.
    on_cpu: dict[str, SettingValue] = {
        **shared,
        "overlap_moe_expert_parallel_comm": True,
        "delay_wgrad_compute": True,
    }
    assert with_settings(ON_CPU, on_cpu) == ON_CPU
    assert with_features(Software(), ("moe_shared_expert_overlap",)).shared_expert_overlap
    assert not with_settings(
        Software(shared_expert_overlap=True), {"moe_shared_expert_overlap": False}
    ).shared_expert_overlap


def test_an_overlap_of_microbatches_holds_one_forward_more() -> None:
    base = run(EXPERTS, ep=8)
    overlapped = replace(base, software=with_features(base.software, ("overlap_moe",)))
    assert peak_memory(overlapped).activations_bytes == pytest.approx(2 * peak_memory(base).activations_bytes)


def test_context_parallel_hides_behind_attention() -> None:
    found = run(NEMO, tp=1, cp=8, seq_len=16384, sp=False)
    idle = communication.context_parallel(found, CONSTANTS, Times())
    busy = communication.context_parallel(found, CONSTANTS, Times(1.0, 2.0, 0.0))
    assert 0 < busy.total_s < idle.total_s


def test_without_overlap_context_parallel_is_all_exposed() -> None:
    found = run(
        NEMO, tp=1, cp=8, seq_len=16384, sp=False, software="Megatron-LM, TE, no comm overlap, TP overlap off"
    )
    idle = communication.context_parallel(found, CONSTANTS, Times())
    assert idle == communication.context_parallel(found, CONSTANTS, Times(1.0, 2.0, 0.0))


def shared(settings: dict[str, SettingValue], *, per_node: int = 8, **changes: Any) -> TrainingRun:
    """Eight devices that share sequences, links of 200 GB/s inside a node and 20 GB/s between nodes."""
    row = {**NEMO, "hidden": 8192, "kv_heads": 8, "mbs": 1, "tp": 1, "cp": 8, "seq_len": 16384, "sp": False}
    found = run(row, **changes)
    cluster = replace(
        found.cluster, scale_up_devices=per_node, scale_up_bytes_per_s=400e9, scale_out_bytes_per_s=50e9
    )
    return replace(found, cluster=cluster, software=with_settings(found.software, settings))


ROUND = replace(CONSTANTS, scale_up=0.5, scale_out=0.4, hop_s=8e-6, tensor_exposed=0.4)
# On each device 2048 tokens of 64 heads, or of 8 for keys and for values, of 128 numbers of two bytes.
HEADS_BYTES, KEYS_BYTES = 33_554_432, 4_194_304


def test_keys_and_values_go_around_a_ring_as_they_did() -> None:
    """7/8 of 64 MiB at 200 GB/s, and seven steps of 2 microseconds; of the backward twice as much."""
    idle = communication.context_parallel(shared({}), ROUND, Times())
    assert idle == pytest.approx(Times(307.60128e-6, 615.20256e-6, 0.0))
    assert communication.context_parallel(shared({"cp_comm_type": "p2p"}), ROUND, Times()) == idle
    beside = communication.context_parallel(shared({}), ROUND, Times(1.0, 1.0, 0.0))
    assert beside == pytest.approx(idle.scaled(0.4))


def test_gathered_keys_and_values_are_exposed() -> None:
    """Keys, then values, in a gather each; the backward gathers both again and scatters as much."""
    forward = (2 * KEYS_BYTES * 7) / 200e9 + 2 * 7 * 2e-6
    assert forward == pytest.approx(321.60128e-6)
    gathered = shared({"cp_comm_type": "all_gather"})
    for attention in (Times(), Times(1.0, 1.0, 0.0)):
        found = communication.context_parallel(gathered, ROUND, attention)
        assert found == pytest.approx(Times(forward, 2 * forward, 0.0))


def test_exchanged_heads_are_exposed() -> None:
    """Four all-to-alls forward and five backward, each of 7/8 of a device's tensor."""
    queries, keys = (size * 7 / 8 / 200e9 + 7 * 2e-6 for size in (HEADS_BYTES, KEYS_BYTES))
    assert (queries, keys) == pytest.approx((160.80064e-6, 32.35008e-6))
    exchanged = shared({"cp_comm_type": "a2a"})
    for attention in (Times(), Times(1.0, 1.0, 0.0)):
        found = communication.context_parallel(exchanged, ROUND, attention)
        assert found == pytest.approx(Times(386.30144e-6, 547.10208e-6, 0.0))
        assert found == pytest.approx(Times(2 * queries + 2 * keys, 3 * queries + 2 * keys, 0.0))


def test_heads_that_cross_nodes_take_the_slow_links() -> None:
    """On two nodes of four a half crosses; one step between nodes and three inside one."""
    latency = 8e-6 + 3 * 2e-6
    queries, keys = (
        size * 3 / 8 / 200e9 + size * 4 / 8 / 20e9 + latency for size in (HEADS_BYTES, KEYS_BYTES)
    )
    found = communication.context_parallel(shared({"cp_comm_type": "a2a"}, per_node=4), ROUND, Times())
    assert found == pytest.approx(Times(2 * queries + 2 * keys, 3 * queries + 2 * keys, 0.0))


HIERARCHICAL: dict[str, SettingValue] = {
    "cp_comm_type": "a2a+p2p",
    "hierarchical_context_parallel_sizes": "4+2",
}


def test_neighbours_exchange_heads_and_rings_join_them() -> None:
    """Four devices of a node exchange heads: 3/4 of each tensor; a ring joins two nodes at 20 GB/s."""
    queries, keys = (size * 3 / 4 / 200e9 + 3 * 2e-6 for size in (HEADS_BYTES, KEYS_BYTES))
    ring = 2 * KEYS_BYTES / 20e9 + 8e-6
    assert ring == pytest.approx(427.4304e-6)
    two_nodes = shared(HIERARCHICAL, per_node=4)
    exchanged = Times(2 * queries + 2 * keys, 3 * queries + 2 * keys, 0.0)
    assert exchanged == pytest.approx(Times(307.11552e-6, 438.94464e-6, 0.0))
    idle = communication.context_parallel(two_nodes, ROUND, Times())
    assert idle == pytest.approx(exchanged.plus(Times(ring, 2 * ring, 0.0)))
    # Attention hides the ring alone.
    beside = communication.context_parallel(two_nodes, ROUND, Times(1.0, 1.0, 0.0))
    assert beside == pytest.approx(exchanged.plus(Times(0.4 * ring, 0.8 * ring, 0.0)))
    # A plain ring has eight devices' keys and values at the port of four.
    plain = communication.context_parallel(shared({}, per_node=4), ROUND, Times())
    assert plain.forward_s == pytest.approx(2 * KEYS_BYTES * 7 / 80e9 + 8e-6 + 6 * 2e-6)


@pytest.mark.parametrize("sizes", [None, "2+2", "3+4"])
def test_sizes_that_do_not_fit_are_priced_as_far_as_they_do(sizes: str | None) -> None:
    """Megatron refuses these: without neighbours that exchange heads there is a ring of all."""
    settings: dict[str, SettingValue] = {"cp_comm_type": "a2a+p2p"}
    if sizes is not None:
        settings["hierarchical_context_parallel_sizes"] = sizes
    found = communication.context_parallel(shared(settings), ROUND, Times())
    ring = communication.context_parallel(shared({}), ROUND, Times())
    assert (found == ring) == (sizes != "2+2")


def test_latent_attention_exchanges_heads_of_its_own_sizes() -> None:
    """Queries and keys of 192 numbers and values of 128, each of all 64 heads."""
    latent = LatentAttention(qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128)
    of_latent = replace(shared(HIERARCHICAL, per_node=4), latent=latent)
    wide, values = (2048 * 64 * size * 2 * 3 / 4 / 200e9 + 3 * 2e-6 for size in (192, 128))
    ring = 2 * 2048 * 64 * (192 + 128) / 20e9 + 8e-6
    found = communication.context_parallel(of_latent, ROUND, Times())
    assert found.forward_s == pytest.approx(2 * wide + 2 * values + ring)
    assert found.input_grad_s == pytest.approx(2 * wide + 3 * values + 2 * ring)


def test_every_communication_of_sequences_is_one_gather_on_processors() -> None:
    for name in ("p2p", "all_gather", "a2a", "a2a+p2p"):
        assert with_settings(ON_CPU, {**HIERARCHICAL, "cp_comm_type": name}) == ON_CPU
    assert with_settings(Software(), {"cp_comm_type": "p2p"}) == Software()
    alone = shared({"cp_comm_type": "a2a"}, cp=1, dp=8, gbs=8)
    assert communication.context_parallel(alone, ROUND, Times()) == Times()


def test_settings_price_what_overlaps_and_how_many_buckets() -> None:
    """Without overlap of a phase all its time is exposed; each bucket is a call with its latency."""

    def gradients_s(**settings: SettingValue) -> float:
        base = replace(run(gpus=64, dp=8), zero_stage=1)
        software = with_settings(Software(), settings)
        return communication.data_parallel_s(
            replace(base, software=software),
            CONSTANTS,
            num_dense=1e9,
            num_expert=0.0,
            forward_s=10.0,
            backward_s=10.0,
        )

    usual = gradients_s()
    assert gradients_s(overlap_grad_reduce=True, overlap_param_gather=True) == usual
    no_gather = gradients_s(overlap_param_gather=False)
    assert usual < no_gather < gradients_s(overlap_grad_reduce=False)
    assert gradients_s(overlap_grad_reduce=False, ddp_bucket_size=1_000_000) > gradients_s(
        overlap_grad_reduce=False
    )
    assert gradients_s(ddp_bucket_size=0) == usual
    # Where collectives stop the computation no setting makes them overlap.
    assert with_settings(ON_CPU, {"overlap_grad_reduce": True}) == ON_CPU
