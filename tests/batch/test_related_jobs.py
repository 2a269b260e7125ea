"""What a job gains from a related one: trials until a plan is within 2 % of the best, with and without it.

The machine surprises the cost model in the same way in every job: small micro-batches are the fastest, and
one pipeline stage is served more slowly than the other.
"""

import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from quartet_plugin.model.plan import Plan
from quartet_plugin.tuner.tune_result import TuneResult
from tests.space.jobs import make_job, make_shape
from tests.tuner.fakes import FakeMachine, begin, by_formula, tune
from tests.tuner.run_folders import WritingMachine, write_run

NEAR = 1.02
STUDY = {"trials": 12, "rounds": 3, "top_k": 1}
SEARCH = {"pipeline_parallel": 2, "virtual_stages": 1, "schedule": "1f1b", "mapping": "stock"}


# The part of the layers that the first stage holds in the fastest plan, by machine.
PARTS = (0.7, 0.3, 0.6)


def surprising(plan: Plan, *, fastest_part: float) -> float:
    """Seconds an iteration that no assumed coefficient explains."""
    first, *_ = plan.split.transformer_layers_per_stage
    split = 1.0 + 4.0 * (first / plan.shape.num_layers - fastest_part) ** 2
    micro_batch = 1.0 + 0.12 * (plan.layout.micro_batch_size - 1)
    return by_formula(replace(plan, split=plan.made_for.baseline.split)) * split * micro_batch


def launched(result: TuneResult) -> list[Plan]:
    """The plans that the run launched itself, in their order."""
    return [
        trial.plan
        for trial in result.trials
        if trial.number and trial.record.repeats is None and trial.record.source is None
    ]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("changes", [{"batch": 64}, {"layers": 16}], ids=["another batch", "another depth"])
def test_related_jobs_need_half_as_many_trials(tmp_path: Path, changes: dict[str, int]) -> None:
    job = make_job(
        shape=make_shape(num_layers=changes.get("layers", 8)), global_batch_size=changes.get("batch", 32)
    )
    alone: list[int] = []
    related: list[int] = []
    for index, part in enumerate(PARTS):
        seconds = partial(surprising, fastest_part=part)
        earlier = tmp_path / f"earlier-{index}"
        write_run(earlier, WritingMachine(seconds=seconds), search=SEARCH, study=STUDY)
        plans = []
        for other in (None, earlier):
            folder = tmp_path / f"{index}-{'alone' if other is None else 'related'}"
            run = begin(folder, search=SEARCH, study={**STUDY, "seed": 1})
            plans.append(launched(tune(run, FakeMachine(job=job, seconds=seconds), earlier_run=other)))
        near_s = NEAR * min(map(seconds, [*plans[0], *plans[1]]))
        for counts, tried in zip((alone, related), plans, strict=True):
            reached = [place for place, plan in enumerate(tried, start=1) if seconds(plan) <= near_s]
            counts.append(min(reached, default=len(tried) + 1))
    print(f"trials alone {alone}, with a related job {related}")
    assert statistics.mean(related) <= 0.5 * statistics.mean(alone), (alone, related)
