"""Slots to RANKs: a permutation of the processes, replayed only where it was made."""

from argparse import Namespace
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import PlanError
from quartet_plugin.model.job_description import EqualDevices, JobDescription
from quartet_plugin.rank.mapping import Process, assign, table_of
from tests.megatron.entry_launch import make_plan

NO_FEATURES = Namespace()


def started(*hosts: str, per_node: int) -> list[Process]:
    """Processes as torchrun numbers them: node after node."""
    return [
        Process(host=host, group_rank=node, local_rank=local, local_world_size=per_node)
        for node, host in enumerate(hosts)
        for local in range(per_node)
    ]


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_each_rank_is_at_its_slot(data: st.DataObject) -> None:
    """Whatever the launcher's order of the later hosts, rank r plays at slot r's host and local index."""
    per_node = data.draw(st.sampled_from([1, 2, 4]))
    hosts = ["a", "b", "c"][: data.draw(st.integers(1, 3))]
    world = per_node * len(hosts)
    order = [data.draw(st.integers(0, per_node - 1))]
    order += data.draw(st.permutations([slot for slot in range(world) if slot != order[0]]))
    plan = make_plan(split=(6,), data=world, global_batch_size=world, micro_batch=1, order=order, hosts=hosts)
    present = [hosts[0], *data.draw(st.permutations(hosts[1:]))]
    processes = started(*present, per_node=per_node)
    assignment = assign(plan, processes, args=NO_FEATURES)
    assert sorted(assignment.rank_of) == list(range(world))
    assert assignment.note is None
    if plan.mapping.is_stock:
        assert assignment.is_stock
        return
    for number, rank in enumerate(assignment.rank_of):
        slot = plan.mapping.slots[rank]
        assert (processes[number].host, processes[number].local_rank) == (hosts[slot.node], slot.local)
    assert processes[assignment.rank_of.index(0)].group_rank == 0


@pytest.mark.parametrize(
    ("processes", "part"),
    [
        (started("a", "x", per_node=2), "made on a, b, now on a, x"),
        (started("b", "a", per_node=2), "the launcher's first host is b"),
        (started("a", per_node=4), "made on a, b, now on a"),
    ],
)
def test_other_hosts_keep_the_launchers_order_and_say_so(processes: list[Process], part: str) -> None:
    plan = make_plan(split=(6,), data=4, order=(1, 2, 3, 0), hosts=("a", "b"))
    assignment = assign(plan, processes, args=NO_FEATURES)
    assert assignment.is_stock
    assert assignment.note is not None
    assert part in assignment.note


@pytest.mark.parametrize("hosts", [("a", "x"), ("b", "a"), ("x", "y")])
def test_in_a_trial_the_nodes_stand_for_those_that_a_queue_chose(hosts: tuple[str, ...]) -> None:
    plan = make_plan(split=(6,), data=4, order=(1, 2, 3, 0), hosts=("a", "b"))
    assignment = assign(plan, started(*hosts, per_node=2), args=NO_FEATURES, is_trial=True)
    assert assignment.note is None
    assert assignment.rank_of == (3, 0, 1, 2)
    fewer = assign(plan, started("a", per_node=4), args=NO_FEATURES, is_trial=True)
    assert fewer.note is not None


def test_in_a_trial_hosts_that_the_plan_names_play_its_nodes() -> None:
    plan = make_plan(
        split=(6,), data=6, global_batch_size=12, order=(0, 2, 4, 1, 3, 5), hosts=("a", "b", "c")
    )
    processes = started("a", "c", "b", per_node=2)
    assert assign(plan, processes, args=NO_FEATURES, is_trial=True) == assign(
        plan, processes, args=NO_FEATURES
    )


def test_nodes_of_equal_devices_by_name_are_the_launchers_in_order() -> None:
    devices = EqualDevices(
        device="H100-SXM-80GB",
        num_nodes=2,
        devices_per_node=2,
        scale_up_bandwidth_bytes_per_s=4.5e11,
        scale_out_bandwidth_bytes_per_s=5e10,
        memory_bytes=80 * 2**30,
    )
    plan = make_plan(split=(6,), data=4, order=(0, 2, 1, 3), hosts=("node-0000", "node-0001"))
    job = JobDescription(precision="bf16", search={}, devices=devices)
    planned = replace(plan, made_for=replace(plan.made_for, job=job))
    assignment = assign(planned, started("gpu-17", "gpu-3", per_node=2), args=NO_FEATURES)
    assert assignment.rank_of == (0, 2, 1, 3)
    assert assignment.note is None
    assert assign(planned, started("gpu-17", per_node=4), args=NO_FEATURES).note is not None


def test_two_launchers_on_one_host_are_two_nodes() -> None:
    plan = make_plan(split=(6,), data=4, order=(0, 2, 1, 3), hosts=("a", "a"))
    assert assign(plan, started("a", "a", per_node=2), args=NO_FEATURES).rank_of == (0, 2, 1, 3)


def without_torchrun(*hosts: str, per_node: int) -> list[Process]:
    """Processes of a launcher that sets LOCAL_RANK and LOCAL_WORLD_SIZE and counts no nodes."""
    return [replace(process, group_rank=0) for process in started(*hosts, per_node=per_node)]


def test_hosts_tell_nodes_apart_where_the_launcher_counts_none() -> None:
    plan = make_plan(split=(6,), data=4, order=(1, 2, 3, 0), hosts=("b", "a"))
    moved = assign(plan, without_torchrun("a", "b", per_node=2), args=NO_FEATURES)
    assert moved.is_stock
    assert moved.note is not None
    assert "the launcher's first host is a" in moved.note
    pairs = make_plan(split=(6,), tensor=2, data=2, order=(0, 2, 1, 3), hosts=("a", "b"))
    with pytest.raises(PlanError, match="tensor-parallel group"):
        assign(pairs, without_torchrun("a", "b", per_node=2), args=NO_FEATURES)
    mixed = make_plan(split=(6,), data=4, order=(0, 2, 1, 3), hosts=("a", "b"))
    with pytest.raises(PlanError, match="--use-sharp"):
        assign(mixed, without_torchrun("a", "b", per_node=2), args=Namespace(use_sharp=True))


def test_the_launchers_nodes_are_in_its_order_where_it_counts_none() -> None:
    plan = make_plan(split=(6,), data=4, order=(1, 2, 3, 0), hosts=("x", "y"))
    processes = without_torchrun("b", "a", per_node=2)
    assignment = assign(plan, processes, args=NO_FEATURES, is_trial=True)
    assert assignment.note is None
    assert assignment.rank_of == (3, 0, 1, 2)


def test_direction_of_the_permutation() -> None:
    plan = make_plan(split=(6,), data=4, order=(0, 2, 3, 1), hosts=("a",))
    assignment = assign(plan, started("a", per_node=4), args=NO_FEATURES)
    assert assignment.rank_of == (0, 3, 1, 2)
    table = table_of(started("a", per_node=4), assignment)
    assert table == "mapping: rank 0 on a:0, 1 on a:2, 2 on a:3, 3 on a:1"


@pytest.mark.parametrize(
    ("processes", "part"),
    [
        ([Process(host="a", group_rank=0, local_rank=None, local_world_size=None)] * 4, "LOCAL_RANK"),
        (
            [*started("a", per_node=3), Process(host="b", group_rank=1, local_rank=0, local_world_size=1)],
            "same",
        ),
    ],
)
def test_starts_that_cannot_take_a_mapping(processes: list[Process], part: str) -> None:
    with pytest.raises(PlanError, match=part):
        assign(make_plan(split=(6,), data=4, order=(1, 0, 2, 3)), processes, args=NO_FEATURES)


def test_tensor_parallel_groups_stay_inside_a_node() -> None:
    plan = make_plan(split=(6,), tensor=2, data=2, order=(0, 2, 1, 3), hosts=("a", "b"))
    with pytest.raises(PlanError, match="tensor-parallel group"):
        assign(plan, started("a", "b", per_node=2), args=NO_FEATURES)


@pytest.mark.parametrize(
    "features",
    [
        Namespace(non_persistent_ckpt_type="local", replication=True),
        Namespace(inprocess_restart=True),
        Namespace(async_save=True, use_persistent_ckpt_worker=True),
        Namespace(use_sharp=True),
        Namespace(num_distributed_optimizer_instances=2),
    ],
)
def test_features_that_count_ranks_refuse_a_mapping(features: Namespace) -> None:
    plan = make_plan(split=(6,), data=4, order=(1, 2, 0, 3), hosts=("a", "b"))
    with pytest.raises(PlanError, match=r"mapping: .*--"):
        assign(plan, started("a", "b", per_node=2), args=features)


@pytest.mark.parametrize(("order", "is_refused"), [((0, 2, 1, 3), True), ((1, 0, 3, 2), False)])
def test_ranks_that_share_experts_through_fast_links_stay_on_their_nodes(
    order: tuple[int, ...], is_refused: bool
) -> None:
    plan = make_plan(split=(6,), data=4, order=order, hosts=("a", "b"))
    plan = replace(plan, layout=replace(plan.layout, expert_parallel=2))
    flex, processes = Namespace(moe_token_dispatcher_type="flex"), started("a", "b", per_node=2)
    if not is_refused:
        assert assign(plan, processes, args=flex).rank_of == order
        return
    with pytest.raises(PlanError, match="mapping: with --moe-token-dispatcher-type flex an order must keep"):
        assign(plan, processes, args=flex)


def test_many_ranks_are_shown_short() -> None:
    order = [1, 0, *range(2, 64)]
    plan = make_plan(split=(6,), data=64, global_batch_size=64, micro_batch=1, order=order, hosts=("a",))
    processes = started("a", per_node=64)
    table = table_of(processes, assign(plan, processes, args=NO_FEATURES))
    assert table == "mapping: rank 0 on a:1, 1 on a:0"
