"""The host's operations of a layer with experts, and what of them the device waits for."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_plugin.cost.compute import Rates, layer_times
from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.host_operations import Counts, exposed_times, kernels_alone, operations
from quartet_plugin.cost.run import ON_CPU
from quartet_plugin.cost.software import with_settings
from quartet_plugin.cost.times import Times
from tests.cost.runs import EXPERTS, run

FREE = Constants(host_operation_s=2e-6)
SLOW = Constants(host_operation_s=3e-5)
SECONDS = st.floats(0.0, 1.0)
PASSES = st.builds(Times, SECONDS, SECONDS, SECONDS)


def counted(**changes: Any) -> Counts:
    described = run(EXPERTS, **changes)
    assert described.experts is not None
    return operations(described, described.experts)


def layer(constants: Constants, **changes: Any) -> Times:
    described = run(EXPERTS, **changes)
    return layer_times(described, constants, Rates(described, constants), experts=described.experts).total


def test_operations_are_those_of_the_layer_and_of_each_local_expert_and_product() -> None:
    # Eight experts on a device, two products each: 2, 2 and 4 operations in half precision.
    assert counted(experts=64, ep=8, precision="bf16") == Counts(75 + 32, 60 + 32, 15 + 64)
    assert counted(experts=64, ep=4, precision="bf16") == Counts(75 + 64, 60 + 64, 15 + 128)
    assert counted(experts=64, ep=8, precision="fp8") == Counts(75 + 96, 60 + 96, 15 + 64)
    assert counted(experts=64, ep=8, precision="mxfp8") == Counts(75 + 96, 60 + 96, 15 + 96)
    beside = counted(experts=64, ep=8, precision="bf16", knobs={"moe_a2a_overlap": True})
    assert beside == Counts(75 + 32 + 32, 60 + 40 + 32, 15 + 64)


def test_an_expert_alone_starts_its_activation_and_its_kernels_by_itself() -> None:
    grouped = run(EXPERTS, experts=64, ep=8, precision="bf16", seq_len=512)
    assert grouped.experts is not None
    alone = replace(grouped, software=with_settings(grouped.software, {"moe_grouped_gemm": False}))
    assert operations(alone, grouped.experts) == Counts(75 + 8 * 8, 60 + 8 * 12, 15 + 64)
    assert kernels_alone(alone, grouped.experts) == Counts(21, 21, 14)
    assert kernels_alone(grouped, grouped.experts) == Counts()
    constants = Constants()
    grouped_s, alone_s = (
        layer_times(each, constants, Rates(each, constants), experts=each.experts).launch.total_s
        for each in (grouped, alone)
    )
    assert alone_s > 1.2 * grouped_s
    # A processor computes one expert after the other either way.
    assert with_settings(ON_CPU, {"moe_grouped_gemm": False}) == ON_CPU


def test_graphs_replay_the_operations_of_a_layer_but_not_those_of_its_experts() -> None:
    plain = run(EXPERTS, experts=64, ep=8, precision="bf16")
    assert plain.experts is not None
    graphed = replace(plain, software=replace(plain.software, graphed_share=1.0))
    assert operations(graphed, plain.experts) == Counts(32, 32, 64)
    whole = replace(plain, software=replace(plain.software, is_graphed=True))
    assert operations(whole, plain.experts) == Counts()


@given(PASSES, PASSES)
def test_a_pass_takes_the_longer_of_the_devices_time_and_the_hosts(host: Times, device: Times) -> None:
    whole = device.plus(exposed_times(host, device))
    assert whole.forward_s == pytest.approx(max(host.forward_s, device.forward_s))
    backward = [each.input_grad_s + each.weight_grad_s for each in (host, device)]
    assert whole.input_grad_s + whole.weight_grad_s == pytest.approx(max(backward))


def test_few_tokens_wait_for_the_host_and_many_do_not() -> None:
    few = [layer(constants, seq_len=512, mbs=1, ep=1) for constants in (FREE, SLOW)]
    assert few[1].total_s > 2 * few[0].total_s
    many = [layer(constants, seq_len=8192, mbs=16, ep=1) for constants in (FREE, SLOW)]
    assert many[0] == many[1]


def test_dense_layers_wait_for_no_host() -> None:
    described = run(EXPERTS, seq_len=512, mbs=1)
    dense = [layer_times(described, c, Rates(described, c), experts=None) for c in (FREE, SLOW)]
    assert dense[0] == dense[1]
