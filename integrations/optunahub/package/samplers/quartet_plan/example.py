"""Six plans of a described job; a real objective launches the plan and returns its seconds an iteration."""

import math
from pathlib import Path

import optuna
import optunahub

package = optunahub.load_module("samplers/quartet_plan")
Path("JOB.yaml").write_text("""
model: {num_layers: 8, hidden_size: 1024, num_attention_heads: 8, seq_length: 1024, vocab_size: 32000}
cluster: {device: H100-SXM-80GB, num_nodes: 1, devices_per_node: 4}
batch: {global_batch_size: 32}
search: {tensor_parallel: [1, 2], micro_batch_size: [1, 2], schedule: [1f1b, no-pipelining]}
""")
job = package.read_job(Path("JOB.yaml"))
space = package.space_of(job)


def iteration_s(trial: optuna.Trial) -> float:
    """Stands for a measurement: more seconds for each pipeline stage and each microbatch."""
    layout = package.suggest_plan(trial, space).layout
    return math.sqrt(layout.pipeline_parallel) / layout.micro_batch_size


study = optuna.create_study(sampler=package.PlanSampler(space, job=job))
study.optimize(iteration_s, n_trials=6)
print(study.best_value, study.best_params)
