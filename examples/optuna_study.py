"""Tunes a Megatron command with PlanSampler and TPE: `python optuna_study.py JOB.yaml TRIALS -- COMMAND`.

JOB.yaml describes the command's model, cluster and batch. A trial trains the command with a plan by `quartet
train` on the CPU device and reads the last iteration's time from Megatron's log.
"""

import re
import subprocess
import sys
from pathlib import Path

import optuna

from quartet_plugin.model.plan import write_plan
from quartet_plugin.planner.described_space import space_of
from quartet_plugin.planner.job import read_job
from quartet_plugin.study.plan_sampler import PlanSampler, suggest_plan

JOB, TRIALS, _, *COMMAND = sys.argv[1:]
TRAIN = ("quartet", "train", "--device", "cpu", "--skip-parity-check", "--plan", "plan.json", "--")
job = read_job(Path(JOB))
space = space_of(job)


def iteration_s(trial: optuna.Trial) -> float:
    """The seconds of an iteration of the trial's plan; a plan that does not train is pruned."""
    write_plan(suggest_plan(trial, space), path=Path("plan.json"))
    run = subprocess.run([*TRAIN, *COMMAND], capture_output=True, text=True)
    times = re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", run.stdout)
    if run.returncode != 0 or not times:
        raise optuna.TrialPruned(run.stderr[-500:])
    return float(times[-1]) / 1000.0


sampler = PlanSampler(space, explorer=optuna.samplers.TPESampler(seed=0), job=job)
study = optuna.create_study(storage="sqlite:///plans.sqlite3", study_name="plans", sampler=sampler)
study.optimize(iteration_s, n_trials=int(TRIALS))
print(study.best_value, suggest_plan(study.best_trial, space).layout.label)
