"""Run folders as real trials leave them, from the machine made of arithmetic."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.plan import Plan, write_plan
from quartet_plugin.model.schema import dump
from quartet_plugin.protocol.attempt_files import CommandRecord, ResultRecord, TrialSpec
from quartet_plugin.protocol.rank_files import Iteration, RankReport
from quartet_plugin.trial.attempt import PREFIX
from quartet_plugin.trial.request import Outcome, TrialRequest, TrialResult
from quartet_plugin.tuner.run_folder import TuningRun
from quartet_plugin.tuner.trial_backend import LocalBackend
from quartet_plugin.tuner.tune_result import TuneResult, write_best
from tests.trial.executions import executed
from tests.tuner.fakes import FakeMachine, begin, tune


@dataclass
class WritingMachine(FakeMachine):
    """Leaves the files of every attempt as the runner and the ranks would."""

    reason: str = "rank 0: torch.OutOfMemoryError"

    def _result(self, request: TrialRequest) -> TrialResult:
        result = super()._result(request)
        return result if result.is_measured else replace(result, reason=self.reason)

    def supersede(self, folder: Path) -> bool:
        LocalBackend().supersede(folder)
        return super().supersede(folder)

    def run(self, request: TrialRequest, **options: Any) -> TrialResult:
        result = super().run(request, **options)
        folder = request.folder / f"{PREFIX}{1 + len(list(request.folder.glob(f'{PREFIX}*')))}"
        folder.mkdir(parents=True)
        write_attempt(folder, request, result)
        write_reports(folder, self, result, request.plan)
        if request.plan is not None:
            write_plan(request.plan, path=folder / "plan.json")
        return result


def write_attempt(folder: Path, request: TrialRequest, result: TrialResult) -> None:
    """trial.json, command.json and result.json."""
    sheet = TrialSpec(
        attempt_id=result.attempt_id,
        folder=str(folder),
        warmup=request.warmup,
        measure=request.measure,
        plan_key=request.plan_key,
    )
    command = CommandRecord(
        attempt_id=result.attempt_id,
        argv=("torchrun", "pretrain_gpt.py"),
        cwd="/",
        environment={},
        starter="torchrun",
        num_processes=2,
        time=1_790_000_000.0,
        deadline_s=600.0,
        predicted_iteration_s=None,
        timeouts={},
        max_spread=0.25,
    )
    found = ResultRecord(
        attempt_id=result.attempt_id,
        plan_key=result.plan_key,
        outcome=result.outcome.value,
        reason=result.reason,
        phase=result.phase,
        memory_excess_bytes=result.memory_excess_bytes,
        iteration_s=result.iteration_s,
        loss=(),
        grad_norm=(),
        peak_memory_bytes=result.peak_memory_bytes,
        wall_s=result.wall_s,
    )
    for name, content in (("trial", sheet), ("command", command), ("result", found)):
        write_json_atomic(folder / f"{name}.json", dump(content))


def write_reports(folder: Path, machine: FakeMachine, result: TrialResult, plan: Plan | None = None) -> None:
    """rank-K.json of every slot."""
    slots = [(node.host, local) for node in machine.cluster for local in range(node.num_slots)]
    for rank, (host, local) in enumerate(slots):
        report = RankReport(
            schema_version=1,
            attempt_id=result.attempt_id,
            rank=rank,
            launch_rank=rank,
            host=host,
            local_rank=local,
            pid=1000 + rank,
            plan_key=result.plan_key,
            device="cpu",
            phases_s={"import": 1.0},
            iterations=tuple(
                Iteration(iteration=at, iteration_s=time_s, loss=None, grad_norm=None, skipped=False)
                for at, time_s in enumerate(result.iteration_s)
            ),
            peak_memory_bytes=(rank + 1) * 2**30,
            job=dict(result.job) if result.job is not None and rank == 0 else None,
            execution=None if plan is None else executed(plan, rank),
        )
        write_json_atomic(folder / f"rank-{rank}.json", dump(report))


def write_run(
    folder: Path, machine: FakeMachine | None = None, **config: Any
) -> tuple[TuningRun, TuneResult]:
    """A whole run in `folder`, from its baseline to its winner."""
    run = begin(folder, **{"study": {"trials": 10, "rounds": 3}, **config})
    result = tune(run, machine or WritingMachine(outcome=no_data_parallel))
    write_best(result, run=run)
    return run, result


def no_data_parallel(plan: Any) -> Outcome:
    """Some plans do not fit."""
    return Outcome.INFEASIBLE if plan.layout.data_parallel == 2 else Outcome.OK
