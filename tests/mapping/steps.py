"""Random step costs and topology for the mapping's tests."""

import random

import numpy as np

from quartet_plugin.mapping.topology import Topology
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Slot
from quartet_plugin.planner.closed_form import StepCosts
from quartet_plugin.planner.collectives import Collective


def make_costs(layout: Layout, *, seed: int) -> StepCosts:
    """Costs of a step of about a second a microbatch and rank."""
    draw = random.Random(seed)
    ranks = layout.pipeline_parallel

    def collective(most_bytes: float) -> Collective:
        volume = np.array([draw.uniform(0, most_bytes) for _ in range(ranks)])
        return Collective(volume_bytes=volume, rounds=np.ones(ranks))

    return StepCosts(
        layout=layout,
        num_microbatches=draw.choice([1, 4, 16]),
        compute_s=np.array([draw.uniform(0.5, 1.5) for _ in range(ranks)]),
        tensor=collective(1e9),
        context=collective(1e9),
        expert=collective(1e9),
        gradients=collective(1e10),
        boundary_bytes=draw.choice([1e6, 1e8, 1e9]),
        hidden_s=np.full(ranks, 0.1),
        exposed_share=0.3,
        peer_share=0.5,
        is_blocking=draw.random() < 0.5,
    )


def make_topology(*, num_nodes: int, per_node: int, seed: int, unequal: bool = True) -> Topology:
    """Nodes that are a domain each, with unequal devices and links between nodes."""
    draw = random.Random(seed)
    num_slots = num_nodes * per_node
    speeds = [1.0, 1.0, 1.5, 2.0] if unequal else [1.0]
    rates = [1e9, 2e9, 5e9] if unequal else [2e9]
    return Topology(
        slots=tuple(Slot(node=at // per_node, local=at % per_node) for at in range(num_slots)),
        domain_of_slot=np.arange(num_slots, dtype=np.int64) // per_node,
        slowdown=np.array([draw.choice(speeds) for _ in range(num_slots)]),
        inside_bytes_per_s=2e10,
        inside_latency_s=1e-6,
        between_bytes_per_s=np.array(
            [[draw.choice(rates) for _ in range(num_nodes)] for _ in range(num_nodes)]
        ),
        between_latency_s=np.full((num_nodes, num_nodes), 1e-5),
    )
