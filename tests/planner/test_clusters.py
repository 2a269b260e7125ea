"""Planning on clusters that are described in full: mappings, unequal devices, bounds."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.mapping_optimum import compared
from quartet_plugin.cost.cluster import (
    best_case_cluster,
    topology_of,
    uniform_cluster_of,
    uniform_topology_of,
)
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.iteration.assigned import AssignedRun
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.probed import Findings, ProbedLinks, ProbedRank, cluster_of
from quartet_plugin.cost.run import PORT_SHARE, port_share
from quartet_plugin.errors import ConfigError, InfeasibleError, PlanError
from quartet_plugin.mapping.orders import order_named, slot_indices
from quartet_plugin.model.cluster import Link, write_cluster
from quartet_plugin.model.plan import read_plan, write_plan
from quartet_plugin.planner.assignment_search import QUICK, THOROUGH, AssignmentProblem, assign
from quartet_plugin.planner.bounds import bounds_of
from quartet_plugin.planner.job import PlanRequest, parse_job, read_job
from quartet_plugin.planner.layout_table import layout_table_of
from quartet_plugin.planner.plans import plain_layout, plan_of
from quartet_plugin.planner.ranking import REFINED, Ranked, best_plans, rank, refine, slowdown_of
from quartet_plugin.split.layers import is_legal_split
from tests.model.clusters import make_cluster
from tests.planner.planning import cluster_job, job_data, random_cluster_job, runs_of

DEVICES = ("A100-SXM-80GB", "H100-SXM-80GB", "MI300X", "GB200")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("experts", [None, 8])
def test_equal_devices_in_the_stock_order_are_predicted_as_ever(device: str, experts: int | None) -> None:
    search: dict[str, Any] = {
        "context_parallel": "auto",
        "micro_batch_size": [1, 2],
        "recompute": ["none", "full"],
    }
    model = {"num_experts": experts} if experts else {}
    cluster = {"device": device, "num_nodes": 4, "devices_per_node": 4}
    job = parse_job(job_data(cluster=cluster, search=search, model=model), where="job")
    candidates = layout_table_of(job, job.shape)
    bounds = bounds_of(job, job.shape, candidates, constants=fitted())
    places = uniform_topology_of(job.machines, fitted())
    step = max(1, len(candidates) // 20)
    for row in range(0, len(candidates), step):
        split = bounds.split(job, job.shape, candidates, row)
        run = next(runs_of(job, candidates, row, split))
        placed = AssignedRun(run, fitted(), places).predict(tuple(range(16)))
        stock = predict(run, fitted())
        assert placed.iter_time_s == pytest.approx(stock.iter_time_s, rel=1e-9), (run.layout, run.schedule)
        assert set(placed.terms) == set(stock.terms)
        assert sum(placed.terms.values()) == pytest.approx(placed.iter_time_s)


@pytest.mark.parametrize("seed", range(6))
def test_pruning_keeps_the_optimum_on_unequal_clusters(seed: int) -> None:
    job = random_cluster_job(seed)
    try:
        every = rank(job, top=2, exhaustive=True)
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            rank(job, top=2)
        return
    quick = rank(job, top=2)
    assert [(b.layout, b.schedule, b.group, b.split, b.slots) for b in quick.best] == [
        (b.layout, b.schedule, b.group, b.split, b.slots) for b in every.best
    ]
    assert quick.num_predicted <= every.num_predicted
    assert quick.num_considered == every.num_considered


@pytest.mark.parametrize("seed", range(3))
def test_pruning_keeps_the_optimum_on_racks_and_segments(seed: int) -> None:
    draw = random.Random(seed)
    links: dict[str, Any] = {}
    if seed:
        links["segment"] = {"bandwidth_bytes_per_s": 1e11, "latency_s": 5e-6}
    cluster = make_cluster(num_nodes=4, per_node=2, links=links)
    for node in cluster["nodes"]:
        node |= {"topology": f"{draw.choice('xy')}.{node['name']}", "topology_pattern": "switch.node"}
        if draw.random() < 0.7:
            node["fabric"] = f"f:{draw.choice('012')}"
    search = {"micro_batch_size": [1, 2], "expert_parallel": [1, 2, 4], "virtual_stages": 1}
    job = cluster_job(cluster, model={"num_layers": 4, "num_experts": 4}, search=search)
    quick, every = rank(job, top=2), rank(job, top=2, exhaustive=True)
    assert [(plan.layout, plan.split, plan.slots) for plan in quick.best] == [
        (plan.layout, plan.split, plan.slots) for plan in every.best
    ]


@pytest.mark.parametrize("seed", range(20, 28))
def test_no_placed_prediction_is_under_its_bounds(seed: int) -> None:
    job = random_cluster_job(seed)
    assert job.cluster is not None
    candidates = layout_table_of(job, job.shape)
    machines, constants = best_case_cluster(job.cluster, fitted())
    bounded = PlanRequest(
        shape=job.shape,
        machines=machines,
        global_batch_size=job.global_batch_size,
        precision=job.precision,
        search=job.search,
    )
    bounds = bounds_of(bounded, job.shape, candidates, constants=constants, slowdown=slowdown_of(job))
    topology = job.topology(fitted())
    for row in range(0, len(candidates), max(1, len(candidates) // 12)):
        split = bounds.split(job, job.shape, candidates, row)
        layout = candidates.layout(row)
        problem = AssignmentProblem(
            job=job,
            shape=job.shape,
            layout=layout,
            split=split,
            constants=fitted(),
            topology=topology,
            schedule=candidates.schedule(row),
            group=candidates.groups(row)[0],
        )
        assignment = assign(problem, effort=QUICK)
        if assignment is not None:
            assert bounds.time_s[row] <= assignment.prediction.iter_time_s, layout
            assert bounds.memory_bytes[row] <= assignment.memory.total_bytes, layout


@pytest.mark.parametrize("seed", range(40, 48))
def test_a_placement_is_never_worse_than_the_stock_orders(seed: int) -> None:
    job = random_cluster_job(seed)
    topology = job.topology(fitted())
    candidates = layout_table_of(job, job.shape)
    checked = 0
    for row in range(0, len(candidates), max(1, len(candidates) // 6)):
        layout = candidates.layout(row)
        counts = [job.shape.num_layers // layout.num_stages] * layout.num_stages
        counts[0] += job.shape.num_layers - sum(counts)
        problem = AssignmentProblem(
            job=job,
            shape=job.shape,
            layout=layout,
            split=tuple(counts),
            constants=fitted(),
            topology=topology,
            may_split=False,
        )
        assignment = assign(problem, effort=QUICK)
        if assignment is None:
            continue
        checked += 1
        assert len(assignment.stock_s) == 2
        assert assignment.prediction.iter_time_s <= min(assignment.stock_s.values()) * (1 + 1e-9)
        assert sorted(assignment.slots) == list(range(job.machines.num_devices))
    assert checked


def test_a_slow_node_gets_fewer_layers() -> None:
    slow = {(1, local): 3.0 for local in range(4)}
    job = cluster_job(
        make_cluster(slowdown=slow),
        model={"num_layers": 12, "vocab_size": 1000},
        search={"pipeline_parallel": 2, "data_parallel": 4, "virtual_stages": 1, "micro_batch_size": 1},
    )
    best = refine(job, rank(job)).best[0]
    topology = job.topology(fitted())
    slots = list(range(8)) if best.slots is None else list(best.slots)
    by_rank = topology.slowdown[slots].reshape(2, 4).max(axis=1)
    assert sorted(by_rank.tolist()) == [1.0, 3.0]
    counts = dict(zip(by_rank.tolist(), best.split, strict=True))
    assert counts[1.0] > counts[3.0]
    assert best.stock_s is not None
    assert best.iteration_s <= min(best.stock_s.values()) * (1 + 1e-9)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_head_alone_keeps_its_stage_on_unequal_devices(chunks: int) -> None:
    """A slow node gets fewer layers, and the last stage none."""
    job = cluster_job(
        make_cluster(slowdown={(1, local): 3.0 for local in range(4)}),
        model={
            "num_layers": 12,
            "vocab_size": 1000,
            "mtp_layers": 1,
            "tied_embeddings": False,
            "position_embedding": "rope",
        },
        search={
            "pipeline_parallel": 4,
            "data_parallel": 2,
            "virtual_stages": chunks,
            "micro_batch_size": 1,
            "mtp_stage": "before_last",
        },
    )
    every = rank(job, top=3, exhaustive=True).best
    assert rank(job, top=3).best == every
    best = refine(job, rank(job)).best[0]
    assert best.is_mtp_before_last
    assert is_legal_split(best.split, num_layers=12, num_stages=4 * chunks, is_mtp_before_last=True)
    assert best.iteration_s <= every[0].iteration_s * (1 + 1e-9)
    topology = job.topology(fitted())
    slots = list(range(8)) if best.slots is None else list(best.slots)
    slowdown = topology.slowdown[slots].reshape(4, 2).max(axis=1)
    layers = np.array(best.split).reshape(chunks, 4).sum(axis=0)
    assert layers[slowdown == 1.0].sum() > layers[slowdown == 3.0].sum()


def test_refining_never_makes_a_layout_slower() -> None:
    job = random_cluster_job(3)
    found = rank(job, top=3)
    better = refine(job, found, effort=THOROUGH)
    before = {(one.layout, one.schedule): one.equal_work_s for one in found.best}
    assert {(one.layout, one.schedule) for one in better.best} == set(before)
    for one in better.best:
        assert one.equal_work_s <= before[one.layout, one.schedule] * (1 + 1e-9)
    times = [one.equal_work_s for one in better.best]
    assert times == sorted(times)


def test_the_best_plans_are_ranked_by_their_solved_mappings() -> None:
    job = random_cluster_job(3)
    found = best_plans(job, top=2)
    assert len(found.best) == 2
    assert found.best[0].equal_work_s <= found.best[1].equal_work_s
    assert found.best[0].equal_work_s <= rank(job).best[0].equal_work_s * (1 + 1e-9)


def test_a_line_says_for_how_many_layouts_mappings_are_solved_one_by_one() -> None:
    job = random_cluster_job(3)
    ranking = best_plans(job, top=2)
    num_fitting = ranking.num_considered - ranking.num_too_large
    assert num_fitting > REFINED
    (line,) = ranking.limits
    assert line.startswith(
        f"mappings: solved one by one only for the best {REFINED} of {num_fitting} layouts; "
    )
    assert best_plans(job, top=num_fitting).limits == ()


def test_the_stock_order_stays_where_it_is_asked_for() -> None:
    job = cluster_job(
        make_cluster(slowdown={(0, 1): 2.0}), search={"mapping": "stock", "micro_batch_size": 1}
    )
    found = refine(job, rank(job, top=3))
    assert all(one.slots is None for one in found.best)


NAMED = ("tp-pp-dp", "0,1,4,5,2,3,6,7", "0,1,6,7,4,5,2,3")


def slots_named(name: str, plan: Ranked, job: PlanRequest) -> tuple[int, ...] | None:
    """The slots of an order, by their numbers; None where the plan's layout cannot have it."""
    try:
        order = order_named(name, layout=plan.layout, nodes=job.nodes)
    except PlanError:
        return None
    return tuple(slot_indices(job.nodes, order.mapping).tolist())


def test_plans_have_the_best_of_the_orders_that_are_named() -> None:
    cluster = make_cluster(num_nodes=4, per_node=2, slowdown={(0, 1): 2.0, (2, 0): 1.4})
    stages = {"pipeline_parallel": [2, 4], "micro_batch_size": 1, "schedule": "stock", "split": "even"}
    job = cluster_job(cluster, search={"mapping": [*NAMED, "pipeline-reversed"], **stages})
    found = rank(job, top=400)
    assert found.best
    for plan in found.best:
        orders = {name: slots_named(name, plan, job) for name in NAMED}
        assert (plan.slots or tuple(range(8))) in orders.values()
    assert len({plan.slots for plan in found.best}) > 1
    assert found.best == rank(job, top=400, exhaustive=True).best
    # RANK 0 stays on the first node, so none of these layouts can have a reversed pipeline.
    # Each order by itself: the best of them is the best of all, and stock is another choice beside them.
    alone = [cluster_job(cluster, search={"mapping": name, **stages}) for name in NAMED]
    assert found.best[0].equal_work_s == min(rank(one).best[0].equal_work_s for one in alone)
    stock = rank(cluster_job(cluster, search={"mapping": "stock", **stages})).best[0].equal_work_s
    both = rank(cluster_job(cluster, search={"mapping": ["stock", *NAMED], **stages})).best[0].equal_work_s
    assert both == min(stock, found.best[0].equal_work_s)


def test_an_order_that_takes_a_tensor_parallel_group_out_of_its_domain_is_left_out() -> None:
    links = {"scale_up_devices": 2, "node": {"bandwidth_bytes_per_s": 6e10, "latency_s": 3e-6}}
    search = {"mapping": "0,2,1,3,4,5,6,7", "tensor_parallel": [1, 2], "micro_batch_size": 1}
    found = rank(cluster_job(make_cluster(links=links), search=search), top=400)
    assert {plan.layout.tensor_parallel for plan in found.best} == {1}


def test_an_order_that_no_layout_can_have_is_refused() -> None:
    job = cluster_job(make_cluster(), search={"mapping": "4,5,6,7,0,1,2,3"})
    with pytest.raises(InfeasibleError, match=r"search\.mapping: 4,5,6,7,0,1,2,3; none of \d+ layouts"):
        rank(job)


def test_nodes_of_unequal_size_keep_the_launchers_order() -> None:
    cluster = make_cluster(slowdown={(0, 0): 2.0})
    cluster["nodes"][1] = {"name": "small", "devices": ["A100-SXM-80GB"] * 2}
    job = cluster_job(cluster, batch={"global_batch_size": 12}, search={"micro_batch_size": 1})
    found = refine(job, rank(job, top=5))
    assert all(one.slots is None for one in found.best)
    assert {one.layout.tensor_parallel for one in found.best} <= {1, 2}


def test_measured_links_are_taken_as_they_are() -> None:
    nominal = cluster_job(make_cluster())
    measured = cluster_job(make_cluster(links={"measured": True}))
    assert nominal.cluster is not None
    assert measured.cluster is not None
    ratio = (
        topology_of(nominal.cluster, fitted()).inside_bytes_per_s
        / topology_of(measured.cluster, fitted()).inside_bytes_per_s
    )
    assert ratio == pytest.approx(fitted().scale_up)
    assert measured.machines.scale_up_bytes_per_s * fitted().scale_up == pytest.approx(3e11)


def test_measured_links_say_themselves_what_exchanges_of_tokens_reach() -> None:
    nominal, measured = (cluster_job(make_cluster(links={"measured": value})) for value in (False, True))
    assert (nominal.machines.port_share, measured.machines.port_share) == (PORT_SHARE, None)
    processor = replace(nominal.machines.device, compute_units=1)
    assert port_share(processor) is None


def test_what_a_calibration_learned_of_measured_links_counts() -> None:
    measured = cluster_job(make_cluster(links={"measured": True}))
    assert measured.cluster is not None
    learned = replace(fitted(), scale_up=fitted().scale_up / 2, scale_out=fitted().scale_out / 1.5)
    plain, corrected = topology_of(measured.cluster, fitted()), topology_of(measured.cluster, learned)
    assert corrected.inside_bytes_per_s == pytest.approx(plain.inside_bytes_per_s / 2)
    assert corrected.between_bytes_per_s == pytest.approx(plain.between_bytes_per_s / 1.5)
    # The cost model's links are the same as those that `calibrate` takes, and the constant acts on them.
    machines = [uniform_cluster_of(measured.cluster, constants) for constants in (fitted(), learned)]
    for bandwidth in ("scale_up_bytes_per_s", "scale_out_bytes_per_s"):
        assert getattr(machines[0], bandwidth) == pytest.approx(getattr(machines[1], bandwidth))


def test_levels_of_links_join_domains() -> None:
    links = {"scale_up_devices": 2, "node": {"bandwidth_bytes_per_s": 6e10, "latency_s": 3e-6}}
    job = cluster_job(make_cluster(links=links))
    assert job.cluster is not None
    places = topology_of(job.cluster, fitted())
    assert places.domain_of_slot.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    reached = places.between_bytes_per_s / fitted().scale_out
    assert reached[0, 1] == pytest.approx(6e10)
    assert reached[1, 2] == pytest.approx(2.5e10)
    assert places.between_latency_s[0, 1] == 3e-6
    assert job.largest_tensor_parallel == 2


def test_a_slower_kind_of_device_is_a_slowdown() -> None:
    cluster = make_cluster(device="H100-SXM-80GB", slowdown={(0, 3): 1.2})
    cluster["nodes"][1]["devices"] = ["A100-SXM-80GB"] * 4
    job = cluster_job(cluster)
    assert job.cluster is not None
    assert job.machines.device.name == "H100-SXM-80GB"
    assert job.cluster.slowdown[:4].tolist() == [1.0, 1.0, 1.0, 1.2]
    assert job.cluster.slowdown[4] == pytest.approx(0.804 * 989 / (0.87 * 312), rel=0.05)


def test_a_plan_names_the_clusters_own_nodes(tmp_path: Path) -> None:
    job = cluster_job(make_cluster(slowdown={(0, 2): 2.0}), search={"micro_batch_size": 2})
    best = refine(job, rank(job)).best[0]
    plan = plan_of(job, best, plain=plain_layout(job, best=best), name="job", place=1)
    assert [node.host for node in plan.made_for.nodes] == ["node-0", "node-1"]
    assert plan.made_for.nodes[0].node_class == "A100-SXM-80GB x4"
    assert plan.prediction is not None
    assert plan.prediction.relative_cost is not None
    assert plan.prediction.relative_cost <= 1.0
    write_plan(plan, path=tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan


def test_a_job_names_a_cluster_file(tmp_path: Path) -> None:
    import json

    data = job_data()
    del data["cluster"]
    (tmp_path / "cluster.json").write_text(json.dumps(make_cluster()), encoding="utf-8")
    lines = [f"{name}: {json.dumps(value)}" for name, value in data.items()]
    (tmp_path / "job.yaml").write_text("\n".join([*lines, "cluster: {file: cluster.json}"]), encoding="utf-8")
    assert read_job(tmp_path / "job.yaml").machines.num_devices == 8


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"file": "missing.json"}, "missing.json"),
        ({"file": "x.json", "num_nodes": 2}, "num_nodes"),
        ({**make_cluster(), "nodes": [{"name": "a", "devices": ["H9000"]}]}, "'H9000': unknown"),
        (make_cluster(links={"network": {"bandwidth_bytes_per_s": -1.0, "latency_s": 0.0}}), "network"),
        ("H100", "cluster"),
    ],
)
def test_a_wrong_cluster_is_one_line(cluster: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_job({**job_data(), "cluster": cluster}, where="job.yaml")
    assert "\n" not in str(caught.value)


def test_an_unknown_device_can_be_described() -> None:
    cluster = make_cluster(device="a core")
    values = {"peak_flops": {"fp32": 5e10}, "memory_bytes": 8 * 10**9, "memory_bandwidth_bytes_per_s": 1e10}
    cluster["devices"] = {"a core": values}
    job = cluster_job(cluster, model={"precision": "fp32", "hidden_size": 256, "num_attention_heads": 4})
    assert job.machines.memory_bytes == 8 * 10**9
    assert job.software.name == "Megatron-Core on CPU"
    assert rank(job).best[0].iteration_s > 0
    del cluster["devices"]["a core"]["memory_bytes"]
    with pytest.raises(ConfigError, match=r"give its peak_flops, memory_bytes"):
        cluster_job(cluster)


@pytest.mark.parametrize("name", ["gpt-175b", "mixed"])
def test_the_examples_are_jobs(name: str) -> None:
    job = read_job(Path(__file__).parents[2] / "examples" / "plan" / f"{name}.yaml")
    assert len(layout_table_of(job, job.shape)) > 100


@pytest.mark.parametrize("mapping", ["auto", "stock"])
def test_groups_that_fit_in_no_domain_are_said(mapping: str) -> None:
    job = cluster_job(
        make_cluster(num_nodes=4, per_node=2),
        model={"num_experts": 8},
        search={"expert_parallel": 4, "inside": "expert", "micro_batch_size": 1, "mapping": mapping},
    )
    with pytest.raises(InfeasibleError, match="expert parallel groups inside a scale-up domain"):
        rank(job)


@pytest.mark.parametrize("seed", range(6))
def test_a_small_placement_is_the_best_of_all_by_the_whole_prediction(seed: int) -> None:
    over_best, _ = compared(seed, ((2, 3), (3, 2), (1, 6)), every=True)
    assert over_best <= 1.01


def test_what_a_probe_found_can_be_planned_for(tmp_path: Path) -> None:
    ranks = tuple(
        ProbedRank(
            host=f"host-{at // 2}",
            local_rank=at % 2,
            name="some processor",
            memory_bytes=8 * 10**9,
            compute_units=1,
            power_watts=None,
            matmul_flops={"fp32": 4e10 if at else 2e10},
            copy_bytes_per_s=8e9,
        )
        for at in range(4)
    )
    link = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-4)
    links = ProbedLinks(scale_up=link, network=replace(link, bandwidth_bytes_per_s=1e8), pairs=None)
    found = cluster_of(Findings(schema_version=1, device="cpu", ranks=ranks, links=links))
    write_cluster(found, path=tmp_path / "cluster.json")
    data = job_data(model={"precision": "fp32", "hidden_size": 256, "num_attention_heads": 4})
    job = parse_job({**data, "cluster": {"file": str(tmp_path / "cluster.json")}}, where="job")
    assert job.cluster is not None
    assert job.cluster.slowdown.tolist() == [2.0, 1.0, 1.0, 1.0]
    assert job.machines.device.ceiling_flops("fp32") == 4e10
    assert best_plans(job).best[0].iteration_s > 0


@pytest.mark.parametrize("nodes", ["equal", "unequal"])
def test_groups_of_whole_experts_fit_in_a_node(nodes: str) -> None:
    """Eight consecutive ranks are a node; of experts that are cut as layers, groups have twice as many."""
    slow = {(1, local): 1.3 for local in range(8)} if nodes == "unequal" else {}
    cluster = make_cluster(num_nodes=2, per_node=8, device="H100-SXM-80GB", slowdown=slow)
    search = {
        "tensor_parallel": 2,
        "pipeline_parallel": 1,
        "expert_parallel": 8,
        "inside": "expert",
        "micro_batch_size": 1,
        "recompute": "none",
    }
    model = {"num_experts": 8, "gated_ffn": True}
    job = cluster_job(cluster, model=model, search={**search, "expert_tensor_parallel": 1})
    best = refine(job, rank(job)).best[0]
    assert best.layout.setting("expert_tensor_parallel") == 1
    assert best.slots in (None, tuple(range(16)))
    with pytest.raises(InfeasibleError, match="expert parallel groups inside a scale-up domain"):
        rank(cluster_job(cluster, model=model, search={**search, "expert_tensor_parallel": 0}))


@pytest.mark.parametrize("vocab_size", [32_000, 64_000, 128_000])
def test_pruning_keeps_the_optimum_on_equal_devices(vocab_size: int) -> None:
    """The bounds of equal devices are those of one split: no other one is planned."""
    job = cluster_job(
        make_cluster(num_nodes=1, per_node=4),
        model={"num_layers": 15, "vocab_size": vocab_size, "hidden_size": 512, "num_attention_heads": 8},
        search={"tensor_parallel": 1, "micro_batch_size": [1, 2], "recompute": "none"},
    )
    assert not job.has_unequal_devices
    every, few = rank(job, top=3, exhaustive=True), rank(job, top=3)
    assert [ranked.equal_work_s for ranked in few.best] == [ranked.equal_work_s for ranked in every.best]
    assert [ranked.split for ranked in few.best] == [ranked.split for ranked in every.best]
