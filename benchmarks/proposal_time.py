"""How long a proposal takes in a large job: the first listing of its plans, and every later proposal.

Run from the repository root:

    python -m benchmarks.proposal_time [--nodes 128] [--devices-per-node 8] [--proposals 3] [--early]

A GPT of 96 layers on H100 nodes; the baseline and every proposal are "measured" by the iteration model under
other coefficients. One line for the space and its scorer, and one a proposal: wall and CPU seconds,
candidates, and what limits cut off. The first proposal holds the listing of the plans, the search of custom
schedules by FLOPs, and the loading of compiled kernels (before them their compilation, once after an
installation or a change of a kernel's file).

The first two lines are the user's wait between the end of trial 0 and the launch of trial 1. In a tuning run
a part of this work is done earlier: from the moment at which all ranks have reported, while their processes
end, the tuner makes the space and prepares candidates. `--early` prepares all candidates before the first
proposal, timed on a line of its own; the other lines then show the wait after a launch that ends slowly.
Orders of custom schedules are never searched early. Other work on the machine lengthens the wall time, and
the CPU time less.
"""

import argparse
import math
import time

import numpy as np

from quartet_plugin.calibration.machine_prior import KnownMachine, machine_model_of
from quartet_plugin.calibration.predictor import PlanPredictor
from quartet_plugin.cost.coefficients import INDEX, Coefficient
from quartet_plugin.cost.iteration.cache import IterationModelCache
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import NodeInfo, ScheduleChoice, Split
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord
from quartet_plugin.planner.plan_scorer import PlanScorer
from quartet_plugin.planner.space_request import request_of_space
from quartet_plugin.space.config import SearchConfig
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.split.layers import even_split

NUM_LAYERS = 96


def space_of(num_nodes: int, devices_per_node: int) -> Space:
    """The space of the job, with every axis free."""
    world = num_nodes * devices_per_node
    tensor, pipeline = min(8, devices_per_node), min(16, num_nodes)
    layout = Layout(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        data_parallel=world // (tensor * pipeline),
        context_parallel=1,
        expert_parallel=1,
        virtual_stages=1,
        micro_batch_size=1,
        sequence_parallel=tensor > 1,
        distributed_optimizer=True,
        recompute="none",
    )
    shape = ModelShape(
        num_layers=NUM_LAYERS,
        hidden_size=12288,
        ffn_hidden_size=49152,
        num_attention_heads=96,
        num_query_groups=96,
        kv_channels=128,
        vocab_size=51200,
        seq_length=2048,
        max_position_embeddings=2048,
        gated_ffn=False,
        tied_embeddings=True,
        position_embedding="learned_absolute",
    )
    job = TrainingJob(
        framework="megatron-core",
        framework_version="0.19.2",
        torch_version="2.11.0",
        shape=shape,
        layout=layout,
        split=Split(transformer_layers_per_stage=even_split(NUM_LAYERS, num_stages=pipeline)),
        schedule=ScheduleChoice(name="1f1b"),
        global_batch_size=1536,
        train_iters=100,
        precision="bf16",
        features=(),
        neutralised=(),
    )
    nodes = [
        NodeInfo(
            host=f"node-{index}",
            node_class=f"H100-SXM-80GB x{devices_per_node}",
            num_slots=devices_per_node,
        )
        for index in range(num_nodes)
    ]
    return build_space(job, nodes=nodes, search=SearchConfig(), run="benchmark", seed=0)


def main() -> None:
    """Time the proposals and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--devices-per-node", type=int, default=8)
    parser.add_argument("--proposals", type=int, default=3)
    parser.add_argument("--early", action="store_true", help="prepare candidates before the first proposal")
    options = parser.parse_args()
    begin, cpu = time.perf_counter(), time.process_time()
    space = space_of(options.nodes, options.devices_per_node)
    machine_model = machine_model_of(space.nodes, precision="bf16")
    truth = np.zeros(machine_model.num_coefficients)
    truth[INDEX[Coefficient.HEAD]] = math.log(2.0)
    truth[len(INDEX) :] = np.random.default_rng(0).normal(0.0, 0.05, len(truth) - len(INDEX))
    models = IterationModelCache(machine_model)
    scorer = PlanScorer(
        space,
        predictor=PlanPredictor(machine_model, num_iterations=10),
        objective="tokens_per_s",
        request=request_of_space(space, machine=KnownMachine()),
    )
    print(f"space: {_elapsed(begin, cpu)}", flush=True)
    if options.early:
        begin, cpu = time.perf_counter(), time.process_time()
        scorer.prepare_candidates(is_stopped=lambda: False)
        print(f"candidates, early: {_elapsed(begin, cpu)}", flush=True)
    trials: list[FinishedTrial] = []
    plan = space.baseline
    for number in range(options.proposals + 1):
        record = TrialRecord(
            verdict="measured",
            outcome="OK",
            reason="",
            attempt_id="",
            iteration_s=models.of(plan).evaluate(truth)[0],
        )
        trials.append(FinishedTrial(number=number, plan=plan, record=record))
        begin, cpu = time.perf_counter(), time.process_time()
        scorer.predictor.learn(trials)
        scored = scorer.scored_plans()
        elapsed = _elapsed(begin, cpu)
        tried = {trial.plan.key for trial in trials}
        plan = next(plan for best in scored if (plan := best.candidate.plan).key not in tried)
        print(
            f"proposal {number + 1}: {elapsed}, {len(scored)} candidates, "
            f"next {plan.layout.label} "
            f"{plan.schedule.label} {plan.split.label} mapping {plan.mapping.label}",
            flush=True,
        )
        for line in scorer.limits:
            print(f"  {line}")


def _elapsed(begin_s: float, cpu_s: float) -> str:
    """The seconds since these readings of the clock and of the process's CPU time."""
    return f"wall {time.perf_counter() - begin_s:.2f} s, CPU {time.process_time() - cpu_s:.2f} s"


if __name__ == "__main__":
    main()
