"""The spaces whose best plan is known: the recorded one, and larger ones that are synthetic."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.search_cost.oracles import Constants, RecordedOracle, SyntheticOracle
from benchmarks.search_cost.record import EMBEDDING, HEAD, SCENARIO, plans_of
from benchmarks.search_cost.recording import read_recording
from benchmarks.search_cost.replay import Ground
from benchmarks.search_cost.walk import every_plan
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import NodeInfo, Plan, ScheduleChoice, Split
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.space.plan_space import baseline_plan

# Layers of the ends that the exhaustive evaluation of the large space takes, in parts of all layers.
LARGE_EMBEDDING = (-0.125, 0.0, 0.125)
LARGE_HEAD = tuple(step / 32 for step in range(-4, 17, 2))


# A replica that holds the whole model is one choice of eight, and on cores that share a memory it may be the
# fastest at once: without it the best plan takes a split, a schedule and a micro-batch to find.
ONE_REPLICA = {"data_parallel": 1}


def recorded(path: Path, *, narrowed: Mapping[str, Any] | None = None) -> Ground:
    """The space that was measured, or the part of it that `narrowed` leaves."""
    recording = read_recording(path)
    plans_of(recording)
    missing = [
        key for key, entry in recording.entries.items() if not entry.launches and entry.refused is None
    ]
    if missing:
        raise SystemExit(f"{path}: {len(missing)} plans have no launch yet; `record` goes on")
    search = {**recording.search, **(narrowed or {})}
    words = "".join(f", {name} {value}" for name, value in (narrowed or {}).items())
    ground = Ground(
        name=f"recorded on real Megatron{words}",
        job=recording.job,
        nodes=recording.nodes,
        search=search,
        oracle=RecordedOracle(recording),
        best_s=0.0,
        num_plans=0,
    )
    inside = every_plan(ground.space, embedding=EMBEDDING, head=HEAD)
    times = [entry.iteration_s for key, entry in recording.entries.items() if key in inside]
    best_s = min(time_s for time_s in times if time_s is not None)
    return replace(ground, best_s=best_s, num_plans=len(times))


SMALL_NODES = (NodeInfo(host="node-0", node_class="cpu x2", num_slots=2),)


def small() -> Ground:
    """The recorded space as a simulator has it, for where nothing was recorded."""
    oracle = SyntheticOracle(
        constants=Constants(
            flops_per_s=3e10,
            half_speed_tokens=60.0,
            action_s=2e-4,
            inside_bytes_per_s=1e9,
            latency_s=3e-4,
            optimizer_s=0.02,
        )
    )
    search = {**SCENARIO.search, **ONE_REPLICA}
    return _synthetic("synthetic, two devices", _small_job(), SMALL_NODES, search, oracle, EMBEDDING, HEAD)


def small_baseline() -> Plan:
    """The plan of the command of `small`, without the walk over all others."""
    return baseline_plan(_small_job(), nodes=SMALL_NODES, run="benchmark", seed=0)


def _small_job() -> TrainingJob:
    return _job(
        _shape(num_layers=8, hidden_size=128, heads=4, seq_length=64, vocab_size=8192),
        pipeline_parallel=2,
        micro_batch_size=1,
        global_batch_size=8,
    )


def large() -> Ground:
    """Eight devices on two nodes, everything free but the shape and searched orders: thousands of plans."""
    job = _job(
        _shape(num_layers=24, hidden_size=2048, heads=16, seq_length=1024, vocab_size=65536),
        pipeline_parallel=4,
        data_parallel=2,
        micro_batch_size=1,
        global_batch_size=32,
    )
    nodes = tuple(NodeInfo(host=f"node-{index}", node_class="device x4", num_slots=4) for index in range(2))
    search = {"schedule": ["stock", "no-pipelining", "1f1b", "interleaved", "zb-h1", "zb-v"]}
    return _synthetic(
        "synthetic, eight devices", job, nodes, search, SyntheticOracle(), LARGE_EMBEDDING, LARGE_HEAD
    )


def _synthetic(
    name: str,
    job: TrainingJob,
    nodes: tuple[NodeInfo, ...],
    search: dict[str, Any],
    oracle: SyntheticOracle,
    embedding: tuple[float, ...],
    head: tuple[float, ...],
) -> Ground:
    ground = Ground(name=name, job=job, nodes=nodes, search=search, oracle=oracle, best_s=0.0, num_plans=0)
    plans = every_plan(ground.space, embedding=embedding, head=head)
    best_s = min(oracle.truth_s(plan) or float("inf") for plan in plans.values())
    return replace(ground, best_s=best_s, num_plans=len(plans))


def _shape(*, num_layers: int, hidden_size: int, heads: int, seq_length: int, vocab_size: int) -> ModelShape:
    return ModelShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=4 * hidden_size,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden_size // heads,
        seq_length=seq_length,
        vocab_size=vocab_size,
        max_position_embeddings=seq_length,
        gated_ffn=False,
        tied_embeddings=False,
        position_embedding="learned_absolute",
    )


def _job(
    shape: ModelShape,
    *,
    pipeline_parallel: int,
    micro_batch_size: int,
    global_batch_size: int,
    data_parallel: int = 1,
) -> TrainingJob:
    layers = shape.num_layers // pipeline_parallel
    return TrainingJob(
        framework="megatron-core",
        framework_version="0.19.2",
        torch_version="2.11.0",
        shape=shape,
        layout=Layout(
            tensor_parallel=1,
            pipeline_parallel=pipeline_parallel,
            data_parallel=data_parallel,
            virtual_stages=1,
            context_parallel=1,
            expert_parallel=1,
            micro_batch_size=micro_batch_size,
            sequence_parallel=False,
            distributed_optimizer=False,
            recompute="none",
        ),
        split=Split(transformer_layers_per_stage=(layers,) * pipeline_parallel),
        schedule=ScheduleChoice(name="1f1b"),
        global_batch_size=global_batch_size,
        train_iters=100,
        precision="fp32",
        features=(),
        neutralised=(),
    )
