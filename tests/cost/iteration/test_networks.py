"""Ranks of one host in several network namespaces: links between these are those between nodes."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from quartet_plugin.calibration.full_size import enlarged_machine
from quartet_plugin.calibration.machine_prior import machine_model_of
from quartet_plugin.cost.coefficients import INDEX, Coefficient
from quartet_plugin.cost.iteration.cache import IterationModelCache
from quartet_plugin.cost.iteration.model import IterationModel
from quartet_plugin.cost.iteration.split_model import CalibratedSplits
from quartet_plugin.mapping.orders import order_named, slot_indices
from quartet_plugin.model.job_description import Experts
from quartet_plugin.model.layout import Setting
from quartet_plugin.model.plan import NodeInfo, Plan
from quartet_plugin.planner.split_search import Pipeline
from quartet_plugin.space.plan_space import baseline_plan
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape

Networks = tuple[tuple[int, ...], ...]
HALVES, IN_TURNS = ((0, 1), (2, 3)), ((0, 2), (1, 3))
# Of few activations beside its weights.
SHAPE = make_shape(seq_length=16, max_position_embeddings=16, tied_embeddings=False)


def host(networks: Networks | None, *, num_slots: int = 4) -> tuple[NodeInfo, ...]:
    return (replace(make_nodes(num_slots)[0], network_namespaces=networks),)


def plan_on(nodes: tuple[NodeInfo, ...], mapping: str = "stock", /, **degrees: int) -> Plan:
    layout = make_layout(**{"pipeline_parallel": 1, **degrees})
    plan = baseline_plan(make_job(layout=layout, shape=SHAPE), nodes=nodes, run="r", seed=0)
    return replace(plan, mapping=order_named(mapping, layout=layout, nodes=nodes).mapping)


def model_of(plan: Plan) -> IterationModel:
    return IterationModelCache(machine_model_of(plan.made_for.nodes, precision="fp32")).of(plan)


def evaluated(networks: Networks | None, mapping: str, **degrees: int) -> tuple[float, np.ndarray]:
    """The seconds of a plan, and their slopes by the named coefficients."""
    plan = plan_on(host(networks), mapping, **degrees)
    machine_model = machine_model_of(plan.made_for.nodes, precision="fp32")
    seconds, slopes = model_of(plan).evaluate(np.zeros(machine_model.num_coefficients))
    return seconds, slopes[: len(INDEX)]


def test_the_slots_of_a_network_are_a_domain() -> None:
    def domains(*nodes: NodeInfo) -> object:
        return machine_model_of(nodes, precision="fp32").domain_of_slot.tolist()

    assert domains(*host(None)) == [0, 0, 0, 0]
    assert domains(*host(HALVES)) == [0, 0, 1, 1]
    assert domains(*host(IN_TURNS)) == [0, 1, 0, 1]
    assert domains(*make_nodes(2), *host(HALVES)) == [0, 0, 1, 1, 2, 2]
    assert domains(*host(((0,), (1, 2)))) == [1, 2, 2, 0]
    machine_model = machine_model_of(host(IN_TURNS), precision="fp32")
    assert enlarged_machine(machine_model, factor=2).domain_of_slot.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]


@pytest.mark.parametrize(
    ("networks", "inside", "across"), [(HALVES, "stock", "0,2,1,3"), (IN_TURNS, "0,2,1,3", "stock")]
)
def test_replicas_in_several_networks_reduce_gradients_between_nodes(
    networks: Networks, inside: str, across: str
) -> None:
    degrees = {"pipeline_parallel": 2, "data_parallel": 2}
    seconds, slopes = evaluated(networks, inside, **degrees)
    slow_s, slow_slopes = evaluated(networks, across, **degrees)
    assert slow_s > 1.1 * seconds
    # The pipeline crosses the networks in one order, the gradients in the other.
    assert slopes[INDEX[Coefficient.GRADIENTS]] > 0
    assert slopes[INDEX[Coefficient.NETWORK]] > 0
    assert slopes[INDEX[Coefficient.TRANSFER]] == 0
    assert slow_slopes[INDEX[Coefficient.GRADIENTS]] == 0
    assert slow_slopes[INDEX[Coefficient.NETWORK]] > slopes[INDEX[Coefficient.NETWORK]]
    assert slow_slopes[INDEX[Coefficient.TRANSFER]] > 0
    assert evaluated(None, inside, **degrees)[0] == evaluated(None, across, **degrees)[0]


@pytest.mark.parametrize(
    "degrees",
    [
        {"pipeline_parallel": 2},
        {"data_parallel": 2},
        {"context_parallel": 2},
        {"pipeline_parallel": 2, "data_parallel": 2},
    ],
    ids=str,
)
def test_networks_of_a_host_are_like_nodes(degrees: dict[str, int]) -> None:
    """The terms of a host with two networks are those of two nodes."""
    size = math.prod(degrees.values())
    slots = tuple(range(size))
    networks = (slots[: size // 2], slots[size // 2 :])
    of_host = plan_on(host(networks, num_slots=size), **degrees)
    of_nodes = plan_on(make_nodes(size // 2, size // 2), **degrees)
    ones = np.zeros(len(INDEX) + size)
    terms, expected = (dict(model_of(plan).predict(ones).terms) for plan in (of_host, of_nodes))
    # Of what is no link, only the wait for the slowest counts nodes.
    for different in (terms, expected):
        different.pop("straggler_s", None)
    assert terms == pytest.approx(expected)


@pytest.mark.parametrize("degrees", [{"tensor_parallel": 4}, {"pipeline_parallel": 2, "tensor_parallel": 2}])
def test_a_tensor_parallel_group_may_be_in_several_networks(degrees: dict[str, int]) -> None:
    """No node is left: the group works, and every layer takes longer."""
    mapping = "0,2,1,3" if "pipeline_parallel" in degrees else "stock"
    (apart_s, apart), (joined_s, joined) = (
        evaluated(networks, mapping, **degrees) for networks in (HALVES, None)
    )
    tensor = INDEX[Coefficient.TENSOR]
    assert apart_s > joined_s
    assert apart[tensor] > 2 * joined[tensor] > 0
    if "pipeline_parallel" in degrees:
        assert evaluated(HALVES, "stock", **degrees)[1][tensor] == joined[tensor]


def test_experts_shared_by_tensor_parallel_ranks_exchange_tokens_where_these_are() -> None:
    experts = Experts(num_experts=8, experts_per_token=2, ffn_hidden_size=512)
    whole = (Setting(name="expert_tensor_parallel", value=1),)
    layout = make_layout(pipeline_parallel=1, tensor_parallel=4, expert_parallel=4)
    job = make_job(layout=layout, shape=SHAPE, features=("moe",), experts=experts)

    def exchange_s(networks: Networks | None) -> float:
        nodes = host(networks)
        machine_model = machine_model_of(nodes, precision="fp32", experts=experts, settings=whole)
        plan = baseline_plan(job, nodes=nodes, run="r", seed=0)
        model = IterationModelCache(machine_model).of(plan)
        return model.predict(np.zeros(machine_model.num_coefficients)).terms["ep_comm_s"]

    assert exchange_s(HALVES) > exchange_s(None)


@pytest.mark.parametrize(
    "degrees", [{"data_parallel": 2}, {"tensor_parallel": 2}, {"context_parallel": 2}], ids=str
)
def test_a_plans_times_for_any_order_are_those_of_its_model(degrees: dict[str, int]) -> None:
    """Also where orders that take the same time count once."""
    nodes = host(HALVES)
    machine_model = machine_model_of(nodes, precision="fp32")
    point = np.random.default_rng(0).normal(0.0, 0.3, machine_model.num_coefficients)
    cache = IterationModelCache(machine_model)
    plan = plan_on(nodes, pipeline_parallel=2, **degrees)
    split = plan.split.transformer_layers_per_stage
    calibrated = CalibratedSplits(model=cache.split_model(plan), point=point)
    orders = np.array(list(itertools.permutations(range(4))))
    seconds: list[float] = []
    of_signature: dict[object, float] = {}
    for order in orders.tolist():
        mapping = order_named(",".join(map(str, order)), layout=plan.layout, nodes=nodes).mapping
        slots = slot_indices(nodes, mapping)
        expected = Pipeline(calibrated.times(slots, mapping)).seconds(split)
        seconds.append(cache.of(replace(plan, mapping=mapping)).evaluate(point)[0])
        assert seconds[-1] == pytest.approx(expected)
        assert seconds[-1] == pytest.approx(of_signature.setdefault(calibrated.signature(slots), expected))
    kept = [seconds[index] for index in calibrated.distinct(orders)]
    assert 1 < len(kept) <= len(orders)
    assert all(np.isclose(kept, each, rtol=1e-9).any() for each in seconds)
