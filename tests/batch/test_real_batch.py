"""Three jobs on real Megatron, killed twice in their middle: each ends with its result."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from quartet_plugin.cli.batch import PROGRAM
from quartet_plugin.model.batch import BatchResults
from quartet_plugin.model.schema import read_record
from tests.batch.support import start_batch
from tests.batch.test_killed import kill
from tests.cli.tuning import living
from tests.megatron.entry_launch import MEGATRON_FLAGS
from tests.megatron.support import PRETRAIN_SCRIPT

CONFIG = """\
search: {tensor_parallel: 1, pipeline_parallel: 2, virtual_stages: 1, schedule: 1f1b, mapping: stock}
trial: {warmup: 1, measure: 3, deadline_s: 240}
study: {trials: 2, top_k: 1, rounds: 3, control: 0}
device: cpu
"""


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_three_jobs_on_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "q.yaml").write_text(CONFIG)
    command = ["torchrun", "--nproc-per-node", "2", str(PRETRAIN_SCRIPT), *MEGATRON_FLAGS]
    command += ["--pipeline-model-parallel-size", "2", "--global-batch-size", "{batch}"]
    matrix = {"axes": {"batch": [4, 8, 16]}, "name": "b{batch}", "command": command}
    (tmp_path / "jobs.yaml").write_text(json.dumps({"config": "q.yaml", "matrix": matrix}))
    words: tuple[str, ...] = ("jobs.yaml",)
    runs = tmp_path / "batches" / "jobs" / "runs"
    for trial in ("b4/trials/000001", "b8/trials/000001"):
        batch = start_batch(tmp_path, *words, program=PROGRAM)
        end = time.monotonic() + 1200.0
        while not (runs / trial).exists():
            assert time.monotonic() < end, f"waited for {trial}"
            time.sleep(0.1)
        kill(batch)
        words = ("jobs.yaml", "--resume")
    output, _ = start_batch(tmp_path, *words, program=PROGRAM).communicate(timeout=1800)
    assert "3 jobs: 3 done" in output.decode(), output.decode()[-2000:]
    results = read_record(BatchResults, tmp_path / "batches" / "jobs" / "results.json")
    assert [(job.state, job.num_trials) for job in results.jobs] == [("done", 2)] * 3
    assert [job.started_from for job in results.jobs] == [None, "b4", "b8"]
    assert all(Path(job.run or "").is_dir() for job in results.jobs)
    assert living(tmp_path) == []
