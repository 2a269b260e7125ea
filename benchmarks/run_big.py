"""Tune small, run big: times at full size predicted from trials with fewer replicas, against measured ones.

    python -m benchmarks.run_big RESULTS.json [--rate 200mbit] [--plans 20] [--again]

Every process is a node: a network namespace behind a link of limited bandwidth. It runs the plan's order by
the runtime's own executor and transport; compute sleeps, as in `quartet rehearse`, while boundary tensors and
the reduction of gradients are real traffic over gloo. Half of the plans have DP 4 x PP 2 and half PP 4 x DP 2
on 8 processes. The trials are of 4 processes (half of the replicas) and of 2 processes: of DP 4 x PP 2 a
quarter of the replicas, of PP 4 x DP 2, whose replica is larger than that, half of its stages, with half of
the layers spread evenly. A study of each size learns its own trials and predicts the full size as
`quartet tune --nodes` does.

RESULTS.json keeps what was measured; without --again only what is missing in it is measured. Needs root, `ip`
and `tc`.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.scenarios.network import interface, joined_namespaces, namespace
from quartet_plugin.calibration.full_size import FullSizePredictor, MeasuredPlan
from quartet_plugin.calibration.machine_prior import machine_model_of
from quartet_plugin.calibration.observations import spread_of
from quartet_plugin.calibration.predictor import PlanPredictor
from quartet_plugin.mapping.orders import slots_of
from quartet_plugin.model.costs import StageCosts
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Baseline, MadeFor, NodeInfo, Plan, Provenance, ScheduleChoice, Split
from quartet_plugin.model.plan import Mapping as RankMapping
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord, score_of_median
from quartet_plugin.runtime.executor import Executor
from quartet_plugin.runtime.process_groups import Channels
from quartet_plugin.runtime.programs import lower_schedule
from quartet_plugin.runtime.records import NullRecorder
from quartet_plugin.runtime.rehearsal.emulated_device import SleepingCompute, sleep_until, wake_on_time
from quartet_plugin.runtime.transport import Boundary, PairTransport
from quartet_plugin.schedule.choice import generated
from quartet_plugin.schedule.instruction import Transfer
from quartet_plugin.space.full_size import full_nodes, with_all_replicas
from quartet_plugin.split.layers import even_split

PREFIX = "big"
NUM_PROCESSES, GLOBAL_BATCH = 8, 64
WARMUP, MEASURED = 2, 7
GOAL = 0.06
_STARTUP_S, _HEAD_START_S = 120.0, 0.02

SHAPE = ModelShape(
    num_layers=8,
    hidden_size=128,
    ffn_hidden_size=512,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=32,
    vocab_size=2048,
    seq_length=64,
    max_position_embeddings=64,
    gated_ffn=False,
    tied_embeddings=False,
    position_embedding="learned_absolute",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedDevice:
    """Seconds of compute: of a layer's forward pass for a microbatch, and of the optimizer for a parameter.

    Input and weight gradients take as long as the forward pass each. The embedding and the head take
    `embedding` and `head` layers' time. None of it is known to the cost model.
    """

    layer_start_s: float = 1e-3
    layer_sample_s: float = 2e-3
    embedding: float = 0.3
    head: float = 1.6
    parameter_s: float = 4e-8

    def stage_costs(self, plan: Plan) -> StageCosts:
        """The costs of the plan's stages without transfers: these are real."""
        layers = np.array(plan.split.transformer_layers_per_stage, dtype=np.float64)
        layers[0] += self.embedding
        layers[-1] += self.head
        forward_s = layers * (self.layer_start_s + self.layer_sample_s * plan.layout.micro_batch_size)
        zero = np.zeros(len(layers))
        return StageCosts(
            device_of_stage=np.arange(len(layers), dtype=np.int64) % plan.layout.pipeline_parallel,
            forward_s=forward_s,
            input_grad_s=forward_s,
            weight_grad_s=forward_s,
            backward_s=2 * forward_s,
            activation_bytes=np.ones(len(layers)),
            forward_transfer_s=zero,
            backward_transfer_s=zero,
            held_fraction=1.0,
        )


def num_parameters(plan: Plan, device: int) -> int:
    """Parameters of the stages of one pipeline rank."""
    hidden, num_stages = SHAPE.hidden_size, plan.layout.num_stages
    ends = SHAPE.vocab_size * hidden
    count = 0
    for stage in range(device, num_stages, plan.layout.pipeline_parallel):
        count += plan.split.transformer_layers_per_stage[stage] * (12 * hidden + 13) * hidden
        count += ends * ((stage == 0) + (stage == num_stages - 1))
    return count


# Plans


def full_plans(count: int, *, seed: int = 0) -> list[Plan]:
    """Different plans for NUM_PROCESSES nodes of one slot, PP 2 and PP 4 in turns."""
    generator = random.Random(seed)
    plans: dict[object, Plan] = {}
    while len(plans) < count:
        plan = _full_plan(generator, pipeline_parallel=(2, 4)[len(plans) % 2])
        plans.setdefault((plan.layout, plan.split), plan)
    return list(plans.values())


def _full_plan(generator: random.Random, *, pipeline_parallel: int) -> Plan:
    virtual = generator.choice((1, 1, 2))
    layout = Layout(
        tensor_parallel=1,
        pipeline_parallel=pipeline_parallel,
        data_parallel=NUM_PROCESSES // pipeline_parallel,
        virtual_stages=virtual,
        context_parallel=1,
        expert_parallel=1,
        micro_batch_size=generator.choice((1, 2, 4)),
        sequence_parallel=False,
        distributed_optimizer=False,
        recompute="none",
    )
    split = _split(generator, layout.num_stages)
    return _plan(layout, split, global_batch_size=GLOBAL_BATCH)


def _split(generator: random.Random, num_stages: int) -> Split:
    """The even split with up to two layers elsewhere, none of its stages empty."""
    counts = [SHAPE.num_layers // num_stages] * num_stages
    for _ in range(generator.randrange(3)):
        source, target = generator.sample(range(num_stages), 2)
        if counts[source] > 1:
            counts[source] -= 1
            counts[target] += 1
    return Split(transformer_layers_per_stage=tuple(counts))


def _plan(layout: Layout, split: Split, *, global_batch_size: int, shape: ModelShape = SHAPE) -> Plan:
    schedule = ScheduleChoice(name="1f1b")
    if layout.pipeline_parallel == 1:
        schedule = ScheduleChoice(name="no-pipelining")
    if layout.virtual_stages > 1:
        schedule = ScheduleChoice(name="interleaved", group=layout.pipeline_parallel)
    nodes = nodes_of(layout.world_size)
    return Plan(
        made_for=MadeFor(
            framework="megatron-core",
            framework_version="0.19.2",
            shape=shape,
            global_batch_size=global_batch_size,
            baseline=Baseline(layout=layout, split=split, schedule=schedule),
            world_size=layout.world_size,
            nodes=nodes,
        ),
        shape=shape,
        layout=layout,
        split=split,
        schedule=schedule,
        mapping=RankMapping(slots=slots_of(nodes)),
        provenance=Provenance(run="run-big", trial=0, seed=0, quartet_version="0"),
    )


def nodes_of(count: int) -> tuple[NodeInfo, ...]:
    """Nodes of one slot."""
    return tuple(NodeInfo(host=f"node-{index}", node_class="cpu x1", num_slots=1) for index in range(count))


def trial_plan(full: Plan, *, num_processes: int) -> Plan:
    """The plan of a trial on fewer nodes: with fewer replicas, each as in `full`, or with a part of one."""
    factor, split, shape = full.layout.world_size // num_processes, full.split, full.shape
    stage_factor = max(1, full.layout.pipeline_parallel // num_processes)
    layout = replace(
        full.layout,
        pipeline_parallel=full.layout.pipeline_parallel // stage_factor,
        data_parallel=full.layout.data_parallel * stage_factor // factor,
    )
    if stage_factor > 1:
        shape = replace(shape, num_layers=shape.num_layers // stage_factor)
        counts = even_split(shape.num_layers, num_stages=layout.num_stages)
        split = Split(transformer_layers_per_stage=counts)
    batch = full.made_for.global_batch_size * stage_factor // factor
    return _plan(layout, split, shape=shape, global_batch_size=batch)


def network_plans(num_processes: int) -> list[Plan]:
    """Plans without a pipeline, as a study tries them: they teach it what reducing gradients takes."""
    layout = replace(
        _full_plan(random.Random(0), pipeline_parallel=2).layout,
        pipeline_parallel=1,
        data_parallel=num_processes,
        virtual_stages=1,
    )
    batch = GLOBAL_BATCH * num_processes // NUM_PROCESSES
    split = Split(transformer_layers_per_stage=(SHAPE.num_layers,))
    return [_plan(replace(layout, micro_batch_size=size), split, global_batch_size=batch) for size in (1, 4)]


# Measurement


class _Compute(SleepingCompute):
    """Sends a boundary tensor of the model's size."""

    def __init__(self, costs: StageCosts, tensor: torch.Tensor) -> None:
        super().__init__(costs, show=lambda _: None)
        self._tensor = tensor

    def _act(self, text: str, duration_s: float, received: Any, *, sent: bool) -> Any:
        ended = super()._act(text, duration_s, received, sent=sent)
        return None if ended is None else self._tensor


class _Transport(PairTransport):
    """Hands out when a tensor arrived, as the emulated device wants it."""

    def wait(self, transfer: Transfer) -> torch.Tensor | None:
        tensor = super().wait(transfer)
        return None if tensor is None else torch.full((1,), time.monotonic(), dtype=torch.float64)


def measure(plan: Plan, *, device: EmulatedDevice) -> list[float]:
    """Seconds of every measured iteration of a plan, each process in a namespace of its own."""
    with tempfile.TemporaryDirectory(prefix="run-big-") as folder:
        pids = [_fork(plan, device, rank=rank, folder=Path(folder)) for rank in range(plan.layout.world_size)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            raise SystemExit(f"processes ended with {codes}")
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(len(pids))]
    return [max(seconds) for seconds in zip(*ranks, strict=True)][WARMUP:]


def _fork(plan: Plan, device: EmulatedDevice, *, rank: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with Path("/run/netns", namespace(rank, prefix=PREFIX)).open("rb") as place:
            os.setns(place.fileno(), os.CLONE_NEWNET)
        os.environ["GLOO_SOCKET_IFNAME"] = interface(rank, prefix=PREFIX)
        (folder / f"{rank}.json").write_text(json.dumps(_iterations(plan, device, rank=rank, folder=folder)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _iterations(plan: Plan, device: EmulatedDevice, *, rank: int, folder: Path) -> list[float]:
    """Seconds of this process's iterations, from a start that all have in common."""
    layout, timeout = plan.layout, timedelta(seconds=_STARTUP_S)
    store = dist.FileStore(str(folder / "store"), layout.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world_size, timeout=timeout)
    # Megatron numbers pipeline ranks slowest.
    pipeline_rank, replica = divmod(rank, layout.data_parallel)
    replicas = [
        dist.new_group([stage * layout.data_parallel + copy for copy in range(layout.data_parallel)])
        for stage in range(layout.pipeline_parallel)
    ][pipeline_rank]
    costs = device.stage_costs(plan)
    # 1F1B of one stage is a forward and a backward for each microbatch.
    choice = plan.schedule if layout.pipeline_parallel > 1 else ScheduleChoice(name="1f1b")
    schedule = generated(choice, layout=layout, num_microbatches=plan.num_microbatches)
    schedule = replace(schedule, layers_per_stage=plan.split.transformer_layers_per_stage)
    program = lower_schedule(schedule, costs)
    ranks = range(replica, layout.world_size, layout.data_parallel)
    channels = Channels.open(program.placement, ranks=ranks, timeout=timeout)
    size = layout.micro_batch_size * SHAPE.seq_length * SHAPE.hidden_size
    boundary = Boundary(shape=(size,), dtype=torch.float32, device=torch.device("cpu"))
    compute, transport = _Compute(costs, torch.zeros(size)), _Transport(channels, boundary)
    executor, recorder = Executor(program, device=pipeline_rank), NullRecorder()
    parameters = num_parameters(plan, pipeline_rank)
    gradients = torch.zeros(parameters)
    wake_on_time()
    times = []
    for _ in range(WARMUP + MEASURED):
        begin_s = _common_start()
        compute.begin(begin_s)
        sleep_until(begin_s)
        executor.run(compute, transport, recorder)
        if layout.data_parallel > 1:
            dist.all_reduce(gradients, group=replicas)
        sleep_until(time.monotonic() + parameters * device.parameter_s)
        times.append(time.monotonic() - begin_s)
    dist.barrier()
    return times


def _common_start() -> float:
    """The moment, on the clock that all namespaces share, at which an iteration begins."""
    dist.barrier()
    begin = torch.full((1,), time.monotonic() + _HEAD_START_S, dtype=torch.float64)
    dist.broadcast(begin, 0)
    return float(begin[0])


# Predictions


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSizeRow:
    """A plan's seconds per iteration at full size: predicted from its trial, and measured."""

    label: str
    trial_processes: int
    trial_s: float
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.predicted_s / self.measured_s - 1.0


def predicted_rows(
    fulls: Sequence[Plan], times: Mapping[str, Sequence[float]], *, num_processes: int
) -> list[FullSizeRow]:
    """The plans, each predicted from its trial of `num_processes` by a study of all these trials."""
    trials = [trial_plan(plan, num_processes=num_processes) for plan in fulls]
    factor = NUM_PROCESSES // num_processes
    nodes = nodes_of(num_processes)
    machine_model = machine_model_of(nodes, precision="fp32")
    predictor = PlanPredictor(machine_model, num_iterations=MEASURED)
    learned = [*trials, *network_plans(num_processes)]
    predictor.learn([_finished(number, plan, times) for number, plan in enumerate(learned)])
    full_size = FullSizePredictor(
        machine_model,
        predictor.posterior_samples(),
        covariance=predictor.coefficient_covariance(),
        factor=factor,
    )
    rows = []
    for full, trial in zip(fulls, trials, strict=True):
        larger = full
        if full.shape == trial.shape:
            larger = with_all_replicas(trial, factor=factor, nodes=full_nodes(nodes, factor=factor))
        measured = times[_name(trial)]
        predicted = full_size.predict(
            MeasuredPlan(
                plan=trial,
                full=larger,
                iteration_s=statistics.median(measured),
                spread=spread_of(measured),
            )
        )
        rows.append(
            FullSizeRow(
                label=f"{full.layout.label} {full.split.label} {full.schedule.name}",
                trial_processes=num_processes,
                trial_s=statistics.median(measured),
                predicted_s=predicted.iteration_s,
                low_s=predicted.interval.low,
                high_s=predicted.interval.high,
                measured_s=statistics.median(times[_name(full)]),
            )
        )
    return rows


def _finished(number: int, plan: Plan, times: Mapping[str, Sequence[float]]) -> FinishedTrial:
    measured = times[_name(plan)]
    record = TrialRecord(
        verdict="measured",
        outcome="OK",
        reason="",
        attempt_id=f"{number:032x}",
        num_iterations=len(measured),
        spread=spread_of(measured),
    )
    score = score_of_median(plan, iteration_s=statistics.median(measured))
    return FinishedTrial(number=number, plan=plan, record=record.scored(score, objective="tokens_per_s"))


def _name(plan: Plan) -> str:
    split = "+".join(map(str, plan.split.transformer_layers_per_stage))
    layout = plan.layout
    return (
        f"dp{layout.data_parallel} pp{layout.pipeline_parallel} v{layout.virtual_stages} "
        f"mb{layout.micro_batch_size} {split}"
    )


def summary_lines(rows: Sequence[FullSizeRow]) -> Iterator[str]:
    """The mean error by kind, and where the best measured plan is among the predicted ones."""
    for kind in sorted({(row.trial_processes, row.label.split()[0][:3]) for row in rows}):
        some = [row for row in rows if (row.trial_processes, row.label.split()[0][:3]) == kind]
        yield f"trials of {kind[0]} processes, {kind[1]}: {_error_words(some)}"
    for size in sorted({row.trial_processes for row in rows}):
        some = [row for row in rows if row.trial_processes == size]
        yield (
            f"trials of {size} processes: {_error_words(some)}; the best measured plan is number "
            f"{rank_of_best(some)} of the predicted ones"
        )
    same = statistics.fmean(abs(row.trial_s / row.measured_s - 1.0) for row in rows)
    yield f'all: {_error_words(rows)} (goal {100 * GOAL:g} %); by the rule "same time" {100 * same:.1f} %'


def _error_words(rows: Sequence[FullSizeRow]) -> str:
    errors = [abs(row.error) for row in rows]
    inside = sum(row.low_s <= row.measured_s <= row.high_s for row in rows)
    return (
        f"{len(rows)} plans, mean error {100 * statistics.fmean(errors):.1f} %, largest "
        f"{100 * max(errors):.1f} %, {inside} inside their 95 % interval"
    )


def rank_of_best(rows: Sequence[FullSizeRow]) -> int:
    """The place, from 1, of the best measured plan when they are ordered by their predicted times."""
    best = min(rows, key=lambda row: row.measured_s)
    return 1 + sorted(rows, key=lambda row: row.predicted_s).index(best)


def main() -> None:
    """Measure what is missing, and print a row for each prediction."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, metavar="RESULTS.json")
    parser.add_argument("--rate", default="200mbit", help="Bandwidth of every node's link, as tc writes it.")
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--again", action="store_true", help="Measure everything anew.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fulls = full_plans(options.plans)
    # The sizes of one plan one after the other: the machine changes from one minute to the next.
    plans = [
        plan
        for full in fulls
        for plan in (
            full,
            *(trial_plan(full, num_processes=size) for size in (4, 2)),
        )
    ] + [plan for size in (4, 2) for plan in network_plans(size)]
    is_kept = options.results.exists() and not options.again
    times: dict[str, list[float]] = json.loads(options.results.read_text()) if is_kept else {}
    missing = [plan for plan in plans if _name(plan) not in times]
    if missing:
        with joined_namespaces([options.rate] * NUM_PROCESSES, prefix=PREFIX):
            for number, plan in enumerate(missing, start=1):
                times[_name(plan)] = measure(plan, device=EmulatedDevice())
                write_json_atomic(options.results, times)
                middle = statistics.median(times[_name(plan)])
                print(f"{number} of {len(missing)}: {_name(plan)}: {middle:.3f} s", flush=True)
    rows = [row for size in (4, 2) for row in predicted_rows(fulls, times, num_processes=size)]
    for row in rows:
        print(
            f"{row.label:<44} {row.trial_processes} processes {row.trial_s:.3f} s, full size "
            f"predicted {row.predicted_s:.3f} s ({row.low_s:.3f} to {row.high_s:.3f}), measured "
            f"{row.measured_s:.3f} s, {100 * row.error:+.1f} %"
        )
    print("\n".join(summary_lines(rows)))


if __name__ == "__main__":
    main()
