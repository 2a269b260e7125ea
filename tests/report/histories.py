"""Runs for reports, told outright."""

from dataclasses import replace
from typing import Any

from quartet_plugin.model.history import (
    DriftMeasurement,
    Finalist,
    LeaseHolder,
    RankMemory,
    RunHistory,
    RunningLaunch,
    TrialRow,
)
from quartet_plugin.model.measurement import Comparison, Interval, Measurement, Prediction
from quartet_plugin.model.plan import Plan, ScheduleChoice, Split
from quartet_plugin.study.tune_study import labels_of
from tests.model.plans import PLAN, plan_with

GIB = 2**30


def interval(median: float, *, by: float = 0.1) -> Interval:
    return Interval(median=median, low=median * (1 - by), high=median * (1 + by))


def measurement(iteration_s: float) -> Measurement:
    return Measurement(
        iteration_s=interval(iteration_s),
        tokens_per_s=8192 / iteration_s,
        model_flops_per_s_per_device=4e10 / iteration_s,
        peak_memory_bytes=3 * GIB,
        num_launches=5,
        num_iterations=50,
    )


def comparison(speedup: float, *, ratios: tuple[float, ...] = ()) -> Comparison:
    return Comparison(
        objective="tokens_per_s",
        plan=measurement(0.5 / speedup),
        baseline=measurement(0.5),
        speedup=interval(speedup, by=0.05),
        round_ratios=ratios,
    )


def row(number: int, iteration_s: float | None, *, plan: Plan | None = None, **changes: Any) -> TrialRow:
    """A trial of `plan`, measured where there is a time."""
    plan = plan or replace(PLAN, provenance=replace(PLAN.provenance, trial=number))
    common = TrialRow(
        number=number,
        plan=plan,
        labels=labels_of(plan),
        outcome="OK",
        verdict="measured",
        reason="measured",
        phase="done",
        peak_memory_bytes=3 * GIB,
        ranks=(RankMemory(rank=0, peak_bytes=2 * GIB), RankMemory(rank=1, peak_bytes=3 * GIB)),
        wall_s=20.0,
        num_attempts=1,
        folder=f"trials/{number:06d}/attempt-1",
    )
    if iteration_s is not None:
        common = replace(
            common,
            value=8192 / iteration_s,
            iteration_s=iteration_s,
            iterations_s=(iteration_s,) * 3,
            tokens_per_s=8192 / iteration_s,
            model_flops_per_s_per_device=4e10 / iteration_s,
            predicted_iteration_s=1.1 * iteration_s if number else None,
        )
    return replace(common, **changes)


def refused(number: int, reason: str, **changes: Any) -> TrialRow:
    """A trial that does not fit."""
    return row(
        number, None, outcome="INFEASIBLE", verdict="infeasible", reason=reason, phase="init", **changes
    )


WINNER = replace(
    PLAN,
    provenance=replace(PLAN.provenance, trial=2),
    prediction=Prediction(iteration_s=0.4, relative_cost=0.8, peak_memory_bytes=2 * GIB),
    measurement=comparison(1.25),
)
INTERLEAVED = plan_with(
    layout=replace(PLAN.layout, virtual_stages=2),
    split=Split(transformer_layers_per_stage=(3, 2, 2, 1)),
    schedule=ScheduleChoice(name="interleaved", group=2),
)


def history(**changes: Any) -> RunHistory:
    """A run of seven trials that found something."""
    made = RunHistory(
        name="heavy-head",
        path="/runs/heavy-head",
        cwd="/home/me",
        command=("torchrun", "--nproc-per-node", "2", "pretrain_gpt.py"),
        config={"search": {"scaling": None}, "study": {"seed": 3, "trials": 7}},
        quartet_version="0.1.0",
        storage="sqlite:////runs/heavy-head/study.sqlite3",
        state="finished",
        holder=None,
        running=(),
        began_at=1_790_000_000.0,
        ended_at=1_790_000_600.0,
        elapsed_s=600.0,
        time_left_s=None,
        num_asked=7,
        num_spent=5,
        objective="tokens_per_s",
        nodes=PLAN.made_for.nodes,
        features=("moe", "fp8"),
        neutralised=("--save", "--tensorboard-dir"),
        locked={"mapping": "moe"},
        trials=(
            row(0, 0.5, plan=None),
            row(1, 0.55),
            row(2, 0.4, plan=WINNER),
            refused(3, "rank 1: torch.OutOfMemoryError", memory_excess_bytes=GIB),
            row(4, 0.6, plan=INTERLEAVED, outcome="UNSTABLE"),
            row(5, 0.4, repeats=2),
            refused(6, "no progress for 30 s"),
        ),
        finalists=(
            Finalist(number=2, comparison=comparison(1.25, ratios=(1.2, 1.25, 1.3))),
            Finalist(number=1, comparison=comparison(0.97, ratios=(0.95, 0.97, 1.01))),
        ),
        winner=WINNER,
        drift_checks=(DriftMeasurement(num_tried=4, ratio=0.96),),
    )
    return replace(made, **changes)


HOLDER = LeaseHolder(host="node-a", pid=4242, generation=1, is_alive=True, renewed_s=4.0)
RUNNING = RunningLaunch(
    number=7,
    stage="search",
    round_number=None,
    attempt=1,
    phase="measure",
    iteration=5,
    num_iterations=13,
    elapsed_s=12.0,
)
