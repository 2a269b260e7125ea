"""A run on given slots: what its groups get of each level's links."""

from dataclasses import replace

import pytest

from quartet_plugin.cost.cluster import uniform_topology_of
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.iteration.assigned import AssignedRun
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.mapping.topology import group_link
from quartet_plugin.planner.job import parse_job
from tests.planner.planning import job_data
from tests.space.jobs import make_layout


def experts_run(
    *, num_nodes: int, domain: int, tp: int, ep: int, pp: int = 1, is_whole: bool = False
) -> TrainingRun:
    """A mixture of 64 experts on nodes of eight H100, in domains of some devices."""
    num_devices = 8 * num_nodes
    job = parse_job(
        job_data(
            model={"num_experts": 64, "gated_ffn": True},
            cluster={"device": "H100-SXM-80GB", "num_nodes": num_nodes},
            batch={"global_batch_size": 2 * num_devices},
        ),
        where="job",
    )
    machines = replace(job.machines, scale_up_devices=domain)
    layout = make_layout(
        tensor_parallel=tp,
        pipeline_parallel=pp,
        data_parallel=num_devices // (tp * pp),
        expert_parallel=ep,
        micro_batch_size=1,
        sequence_parallel=tp > 1,
    )
    run = replace(job, machines=machines).run(job.shape, layout, (8 // pp,) * pp)
    return replace(run, has_whole_experts=is_whole)


@pytest.mark.parametrize("domain", [8, 32])
def test_each_port_of_a_domain_sends_at_its_own_rate(domain: int) -> None:
    """The ports of 32 devices together are faster than the links inside; a rank sends through its own."""
    run = experts_run(num_nodes=2 * domain // 8, domain=domain, tp=1, ep=2 * domain)
    topology = uniform_topology_of(run.cluster, fitted())
    link = group_link(topology, topology.domain_of_slot.tolist())
    assert link.port_bytes_per_s == topology.between_bytes_per_s[0, 1]
    assert link.bytes_per_s <= topology.inside_bytes_per_s
    placed = AssignedRun(run, fitted(), topology).predict(tuple(range(2 * domain)))
    expected = predict(run, fitted())
    assert placed.terms == pytest.approx(dict(expected.terms), rel=1e-9)
    assert placed.terms["ep_comm_s"] > 0


@pytest.mark.parametrize(
    ("tp", "ep", "pp"), [(2, 8, 1), (2, 8, 2), (2, 2, 1), (2, 16, 1), (4, 2, 2), (4, 8, 1), (8, 4, 2)]
)
def test_whole_experts_are_exchanged_by_consecutive_ranks(tp: int, ep: int, pp: int) -> None:
    """Also where a tensor-parallel group holds all experts between its ranks, or several times."""
    run = experts_run(num_nodes=2, domain=8, tp=tp, ep=ep, pp=pp, is_whole=True)
    topology = uniform_topology_of(run.cluster, fitted())
    slots = tuple(range(16))
    placed = AssignedRun(run, fitted(), topology).predict(slots)
    assert placed.terms == pytest.approx(dict(predict(run, fitted()).terms), rel=1e-9)
    assert placed.terms["ep_comm_s"] > 0
    slow = replace(topology, slowdown=2 * topology.slowdown)
    slowed = AssignedRun(run, fitted(), slow).predict(slots)
    assert slowed.terms["ep_comm_s"] == pytest.approx(placed.terms["ep_comm_s"])
    assert slowed.terms["compute_s"] == pytest.approx(2 * placed.terms["compute_s"])
