"""The files of a batch of an earlier release are read, and written again to the byte."""

from pathlib import Path

from quartet_plugin.batch.job_file import read_batch_file, read_job_file, write_batch_file, write_job_file
from quartet_plugin.batch.results import read_batch_state
from quartet_plugin.model.batch import BatchPaths, BatchResults
from quartet_plugin.model.schema import read_record, write_record

GOLDEN = Path(__file__).parents[1] / "golden" / "batch_0.1.0"


def test_files_are_written_as_they_were_read(tmp_path: Path) -> None:
    kept, new = BatchPaths(GOLDEN), BatchPaths(tmp_path)
    write_batch_file(read_batch_file(kept), paths=new)
    file = read_job_file(kept, "a")
    assert file is not None
    write_job_file(file, paths=new)
    write_record(read_record(BatchResults, kept.results_file), path=new.results_file)
    for path in GOLDEN.rglob("*.json"):
        assert (tmp_path / path.relative_to(GOLDEN)).read_bytes() == path.read_bytes(), path


def test_the_state_of_a_batch_is_that_of_its_jobs() -> None:
    results = read_batch_state(BatchPaths(GOLDEN))
    assert results == read_record(BatchResults, GOLDEN / "results.json")
    assert results.counts() == {"done": 1, "waiting": 2}
