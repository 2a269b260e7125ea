"""Tokens/s, model FLOP/s, MFU, days and money from an iteration's seconds."""

from dataclasses import replace

import pytest

from quartet_plugin.model.cluster import Precision
from quartet_plugin.model.job_description import EqualDevices, Experts, JobDescription
from quartet_plugin.model.measurement import Prediction
from quartet_plugin.model.packed_lengths import PackedLengths
from quartet_plugin.model.plan import NodeInfo
from quartet_plugin.model.trial_record import score
from quartet_plugin.report.page import Extras, page
from quartet_plugin.report.tables import plan_lines
from quartet_plugin.report.throughput import Peak, cost_of, job_cost, peak_of, throughput, throughput_of
from tests.model.plans import PLAN
from tests.report.histories import history
from tests.space.jobs import make_shape


def test_the_rates_of_an_iteration() -> None:
    shape = make_shape()
    peak = Peak(flops_per_s=1e12, precision="fp8")
    rates = throughput(2.0, shape=shape, global_batch_size=32, num_devices=4, peak=peak)
    assert rates.tokens_per_s == 32 * shape.seq_length / 2.0
    assert rates.tokens_per_s_per_device == rates.tokens_per_s / 4
    assert rates.model_flops_per_s_per_device == 32 * shape.model_flops_per_sequence / 2.0 / 4
    assert rates.mfu == rates.model_flops_per_s_per_device / 1e12
    assert rates.words.endswith(f"MFU {100 * rates.mfu:.1f} % of the fp8 peak")
    assert rates.as_data()["peak_precision"] == "fp8"
    unknown = throughput(2.0, shape=shape, global_batch_size=32, num_devices=4, peak=None)
    assert (unknown.mfu, unknown.peak_precision) == (None, None)
    assert "MFU" not in unknown.words


def test_the_cost_of_a_job() -> None:
    cost = job_cost(1000.0, num_devices=8, num_tokens=1000.0 * 86400 * 3, price_per_device_hour=2.5)
    assert cost is not None
    assert cost.days == pytest.approx(3.0)
    assert cost.device_hours == pytest.approx(3 * 24 * 8)
    assert cost.price == pytest.approx(3 * 24 * 8 * 2.5)
    assert job_cost(1000.0, num_devices=8, num_tokens=None, price_per_device_hour=2.5) is None


def test_a_plan_names_its_peak() -> None:
    assert throughput_of(PLAN, 1.0).mfu is None  # processors
    devices = EqualDevices(
        device="H100-SXM-80GB",
        num_nodes=1,
        devices_per_node=2,
        scale_up_bandwidth_bytes_per_s=4.5e11,
        scale_out_bandwidth_bytes_per_s=5e10,
        memory_bytes=2**36,
    )
    job = JobDescription(
        precision="bf16", search={}, devices=devices, num_tokens=1e9, price_per_device_hour=3.0
    )
    nodes = (NodeInfo(host="a", node_class="H100-SXM-80GB x2", num_slots=2),)
    plan = replace(PLAN, made_for=replace(PLAN.made_for, nodes=nodes, job=job))
    rates = throughput_of(plan, 1.0)
    assert rates.peak_precision == "bf16"
    assert rates.mfu == rates.model_flops_per_s_per_device / 989e12
    cost = cost_of(plan, rates)
    assert cost is not None
    assert cost.price == pytest.approx(3.0 * cost.device_hours)
    predicted = Prediction(iteration_s=1.0, relative_cost=1.0, peak_memory_bytes=None)
    shown = "\n".join(plan_lines(replace(plan, prediction=predicted)))
    assert f"1 s per iteration, {rates.words}" in shown
    assert cost.words in shown


def test_a_plan_of_a_run_counts_the_experts_that_a_token_uses() -> None:
    """In its trials' scores as in its rates: eight of these are far more than the shape's one FFN."""
    experts = Experts(num_experts=64, experts_per_token=8, ffn_hidden_size=PLAN.shape.ffn_hidden_size)
    plan = replace(PLAN, made_for=replace(PLAN.made_for, experts=experts))
    rates = throughput_of(plan, 2.0)
    scored = score(plan, iteration_s=[2.0])
    assert scored.model_flops_per_s_per_device == rates.model_flops_per_s_per_device
    assert rates.model_flops_per_s_per_device > 2 * throughput_of(PLAN, 2.0).model_flops_per_s_per_device
    assert scored.tokens_per_s == rates.tokens_per_s


def test_the_report_names_the_mfu_where_the_devices_are_known() -> None:
    nodes = (NodeInfo(host="a", node_class="NVIDIA H100 80GB HBM3 x2", num_slots=2),)
    assert peak_of(nodes) == Peak(flops_per_s=989e12, precision="bf16")
    assert peak_of((*nodes, NodeInfo(host="b", node_class="cpu x2", num_slots=2))) is None
    assert "MFU" not in page(history(), Extras())
    assert "<dt>MFU</dt>" in page(history(nodes=nodes), Extras())


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "fp8", "fp8"),
        ("NVIDIA H100 80GB HBM3", "bf16", "bf16"),
        ("NVIDIA A100-SXM4-80GB", "fp8", "bf16"),
    ],
)
def test_the_report_takes_the_peak_of_the_runs_precision(
    device: str, precision: Precision, peak: Precision
) -> None:
    nodes = (NodeInfo(host="a", node_class=f"{device} x2", num_slots=2),)
    run = history(nodes=nodes, precision=precision)
    known = peak_of(nodes, precision)
    assert known is not None
    assert run.winner is not None
    assert run.winner.measurement is not None
    mfu = run.winner.measurement.plan.model_flops_per_s_per_device / known.flops_per_s
    shown = page(run, Extras())
    assert f"<dd>{100 * mfu:.1f} %<small>" in shown
    assert f"of the devices&#x27; {peak} peak" in shown


def test_a_card_has_no_peak_of_a_module() -> None:
    assert peak_of((NodeInfo(host="a", node_class="NVIDIA H100 PCIe x8", num_slots=8),)) is None


def test_the_rates_of_packed_sequences_leave_padding_out() -> None:
    """In a plan's rates as in its trials' scores."""
    packed = PackedLengths(tokens_per_sequence=PLAN.shape.seq_length / 2, squares_per_sequence=100.0)
    plan = replace(PLAN, made_for=replace(PLAN.made_for, packed=packed))
    rates, usual = throughput_of(plan, 2.0), throughput_of(PLAN, 2.0)
    assert rates.tokens_per_s == usual.tokens_per_s / 2
    assert rates.model_flops_per_s_per_device < usual.model_flops_per_s_per_device / 2
    length = PLAN.shape.seq_length / 2
    words = f"packed sequences: {length:,.0f} tokens of documents each, in documents of"
    assert f"          {words} {100 / length:,.0f} tokens (mean over tokens)" in plan_lines(plan)
    scored = score(plan, iteration_s=[2.0])
    assert (scored.tokens_per_s, scored.model_flops_per_s_per_device) == (
        rates.tokens_per_s,
        rates.model_flops_per_s_per_device,
    )
