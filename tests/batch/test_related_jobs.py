"""What a job gains from a related one: trials until a plan is within 2 % of the best, with and without it.

The machine surprises the cost model in the same way in every job: small micro-batches are the fastest, and
one pipeline stage is served more slowly than the other.
"""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.model.plan import Plan
from quartet_plugin.tuner.tune_result import TuneResult
from tests.space.jobs import make_job, make_shape
from tests.tuner.fakes import FakeMachine, begin, by_formula, tune
from tests.tuner.run_folders import WritingMachine, write_run

NEAR = 1.02
SEARCH = {"pipeline_parallel": 2, "virtual_stages": 1, "schedule": "1f1b", "mapping": "stock"}


def surprising(plan: Plan) -> float:
    """Seconds an iteration that no assumed coefficient explains."""
    first, *_ = plan.split.transformer_layers_per_stage
    part = first / plan.shape.num_layers
    micro_batch = 1.0 + 0.12 * (plan.layout.micro_batch_size - 1)
    return (
        by_formula(replace(plan, split=plan.made_for.baseline.split))
        * micro_batch
        * (1 + 4 * (part - 0.7) ** 2)
    )


def study_of(seed: int) -> dict[str, Any]:
    return {"trials": 12, "rounds": 3, "top_k": 1, "seed": seed}


def num_trials(result: TuneResult) -> int:
    """The launched plans up to the first one that is near the best of all that were seen."""
    own = [
        trial.plan
        for trial in result.trials
        if trial.number and trial.record.repeats is None and trial.record.source is None
    ]
    best = min(map(surprising, own))
    return next(place for place, plan in enumerate(own, start=1) if surprising(plan) <= NEAR * best)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("changes", [{"batch": 64}, {"layers": 16}], ids=["another batch", "another depth"])
def test_related_jobs_need_half_as_many_trials(tmp_path: Path, changes: dict[str, int]) -> None:
    job = make_job(
        shape=make_shape(num_layers=changes.get("layers", 8)), global_batch_size=changes.get("batch", 32)
    )
    alone: list[int] = []
    related: list[int] = []
    for seed in range(3):
        first = WritingMachine(seconds=surprising)
        write_run(tmp_path / f"first-{seed}", first, search=SEARCH, study=study_of(seed))
        for prior, counts in ((None, alone), (tmp_path / f"first-{seed}", related)):
            machine = FakeMachine(job=job, seconds=surprising)
            run = begin(
                tmp_path / f"{len(counts)}-{prior is None}", search=SEARCH, study=study_of(100 + seed)
            )
            counts.append(num_trials(tune(run, machine, prior=prior)))
    print(f"trials alone {alone}, with a related job {related}")
    assert statistics.mean(related) <= 0.5 * statistics.mean(alone), (alone, related)
