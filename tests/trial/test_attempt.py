"""A result has RANK 0's job, with what all ranks counted of it."""

from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.packed_lengths import PackedLengths, PackedTokens
from quartet_plugin.model.schema import dump
from quartet_plugin.model.training_job import parse_training_job
from quartet_plugin.protocol.attempt_files import TrialSpec
from quartet_plugin.protocol.rank_files import RankReport, rank_file
from quartet_plugin.trial.attempt import read_result, write_result
from quartet_plugin.trial.outcome import Cause, Verdict
from quartet_plugin.trial.request import Outcome
from tests.space.jobs import make_job, make_layout
from tests.trial.factory import ID, iteration, report


def job_in(folder: Path, counts: list[list[PackedTokens | None]], job: dict[str, Any] | None) -> Any:
    """The job of a result whose ranks, by their numbers, counted this in each iteration."""
    spec = TrialSpec(attempt_id=ID, folder=str(folder), warmup=0, measure=1, plan_key=None)
    for rank, counted in enumerate(counts):
        steps = tuple(iteration(number, packed=packed) for number, packed in enumerate(counted, start=1))
        record = report(rank, iterations=steps, job=None if rank else job)
        path = rank_file(RankReport, folder=folder, launch_rank=rank)
        write_json_atomic(path, {**dump(record), "cores": None})
    verdict = Verdict(cause=Cause.MEASURED, outcome=Outcome.OK, reason="measured", phase="done")
    write_result(folder, spec, verdict, wall_s=9.0)
    result = read_result(folder)
    assert result is not None
    return result.job


def test_the_job_has_the_documents_that_all_ranks_counted(tmp_path: Path) -> None:
    """Two copies of the model; the ranks of a stage without data count nothing."""
    job = dump(make_job(layout=make_layout(micro_batch_size=2, data_parallel=2)))
    first = PackedTokens(num_microbatches=2, num_tokens=40.0, squared_lengths=400.0)
    second = PackedTokens(num_microbatches=2, num_tokens=24.0, squared_lengths=176.0)
    found = job_in(tmp_path, [[first, second], [second, second], [None, None]], job)
    packed = PackedLengths(tokens_per_sequence=112 / 16, squares_per_sequence=928 / 16)
    assert parse_training_job(found).packed == packed


@pytest.mark.parametrize("job", [None, {}, {"layout": []}, {"layout": {"micro_batch_size": 0}}])
def test_a_job_that_says_no_micro_batch_stays_as_it_is(tmp_path: Path, job: dict[str, Any] | None) -> None:
    counted = PackedTokens(num_microbatches=1, num_tokens=8.0, squared_lengths=64.0)
    assert job_in(tmp_path, [[counted]], job) == job


def test_a_job_without_packed_sequences_says_nothing_of_them(tmp_path: Path) -> None:
    job = dump(make_job())
    assert "packed" not in job_in(tmp_path, [[None, None]], job)
