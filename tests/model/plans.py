"""Plans for tests."""

from dataclasses import replace
from typing import Any

from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import (
    Baseline,
    MadeFor,
    Mapping,
    NodeInfo,
    Plan,
    Provenance,
    ScheduleChoice,
    Slot,
    Split,
)
from quartet_plugin.model.shape import ModelShape

SHAPE = ModelShape(
    num_layers=8,
    hidden_size=256,
    ffn_hidden_size=1024,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=64,
    seq_length=256,
    vocab_size=16384,
    max_position_embeddings=256,
    gated_ffn=False,
    tied_embeddings=True,
    position_embedding="learned_absolute",
)
LAYOUT = Layout(
    tensor_parallel=1,
    pipeline_parallel=2,
    data_parallel=1,
    virtual_stages=1,
    context_parallel=1,
    expert_parallel=1,
    micro_batch_size=4,
    sequence_parallel=False,
    distributed_optimizer=False,
    recompute="none",
)
MADE_FOR = MadeFor(
    framework="megatron-core",
    framework_version="0.19.2",
    shape=SHAPE,
    global_batch_size=32,
    baseline=Baseline(
        layout=LAYOUT,
        split=Split(transformer_layers_per_stage=(4, 4)),
        schedule=ScheduleChoice(name="1f1b"),
    ),
    world_size=2,
    nodes=(NodeInfo(host="node-a", node_class="cpu x2", num_slots=2),),
)
PLAN = Plan(
    made_for=MADE_FOR,
    shape=SHAPE,
    layout=LAYOUT,
    split=Split(transformer_layers_per_stage=(6, 2)),
    schedule=ScheduleChoice(name="1f1b"),
    mapping=Mapping(slots=(Slot(node=0, local=1), Slot(node=0, local=0))),
    provenance=Provenance(run="heavy-head", trial=12, seed=0, quartet_version="0.1.0"),
)


def plan_with(**changes: Any) -> Plan:
    """PLAN with some parts replaced."""
    return replace(PLAN, **changes)
