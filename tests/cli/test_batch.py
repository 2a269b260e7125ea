"""`quartet batch` from the command line: a whole batch, its state and results, refusals, Ctrl-C."""

import csv
import json
import signal
from pathlib import Path

import pytest

from quartet_plugin.cli import batch as batch_module
from quartet_plugin.cli.main import main
from quartet_plugin.model.batch import BatchResults
from quartet_plugin.model.plan import read_plan
from quartet_plugin.model.schema import read_record
from quartet_plugin.trial.lease import Lease
from tests.batch.support import TINY, log_of, start_batch
from tests.cli.tuning import living, wait_until

SMALL = "{num_layers: 4, hidden_size: 256, num_attention_heads: 4, seq_length: 256, vocab_size: 1024}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the batch is started, with the tiny tuner."""
    monkeypatch.setattr(batch_module, "PROGRAM", TINY)
    monkeypatch.setenv("TINY_LOG", str(tmp_path / "log"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, *jobs: str) -> None:
    (folder / "jobs.yaml").write_text("\n".join(["jobs:", *(f"- {{{job}}}" for job in jobs)]))


def test_a_whole_batch(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(folder, "name: a, command: torchrun x.py", "name: bad, command: torchrun x.py --code 3")
    assert main(["batch", "jobs.yaml"]) == 7
    shown = capfd.readouterr()
    assert shown.err == "quartet: of 2 jobs 1 failed\n"
    lines = shown.out.splitlines()
    assert lines[0] == "batch jobs in batches/jobs: 2 jobs"
    assert "job  state   trials  s/iter  speedup  left" in lines
    assert "a    done       6/6   3.432    1.23x" in lines
    assert "\x1b" not in shown.out
    assert max(len(line) for line in lines if line.startswith(("job", "a ", "bad "))) <= 80

    path = folder / "batches" / "jobs"
    results = read_record(BatchResults, path / "results.json")
    assert [job.state for job in results.jobs] == ["done", "failed"]
    with (path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["a", "bad"]
    assert float(rows[0]["speedup.low"]) < float(rows[0]["speedup.median"]) < float(rows[0]["speedup.high"])
    page = (path / "report.html").read_text()
    assert "1.23x (1.20x to 1.23x)" in page
    assert "the job&#x27;s own fault" in page
    assert "<script" not in page

    assert main(["batch", "status", "jobs"]) == 0
    assert "2 jobs: 1 done, 1 failed" in capfd.readouterr().out
    assert main(["batch", "status", str(path), "--json"]) == 0
    content = json.loads(capfd.readouterr().out)
    assert (content["schema_version"], content["state"], len(content["jobs"])) == (1, "finished", 2)
    assert main(["batch", "jobs.yaml", "--resume"]) == 7
    assert len(log_of(folder / "log")) == 4


def test_plans_alone_start_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cluster = "{device: H100-SXM-80GB, num_nodes: 1, devices_per_node: 1}"
    flags = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --micro-batch-size 1"
    command = f"torchrun --nproc-per-node 1 x.py {flags} --max-position-embeddings 256 --vocab-size 1024"
    write(
        folder,
        f"name: described, job: {{model: {SMALL}, cluster: {cluster}, batch: {{global_batch_size: 8}}}}",
        f"name: command, command: {command} --global-batch-size 8, job: {{cluster: {cluster}}}",
        "name: nothing, command: torchrun x.py",
    )
    assert main(["batch", "jobs.yaml", "--plan-only"]) == 7
    shown = capfd.readouterr()
    assert "nothing: failed (exit code 2)" in shown.out
    assert log_of(folder / "log") == []
    results = read_record(BatchResults, folder / "batches" / "jobs-plan" / "results.json")
    assert results.is_plan_only
    first, second, _ = results.jobs
    for job in (first, second):
        assert job.plan is not None
        assert job.predicted_s == pytest.approx(read_plan(Path(job.plan)).prediction.iteration_s)  # type: ignore[union-attr]
        assert (job.iteration_s, job.speedup) == (None, None)
    assert "predicted" in (folder / "batches" / "jobs-plan" / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["batch", "nowhere.yaml"], 2, "nowhere.yaml: cannot be read"),
        (["batch", "jobs.yaml", "--resume"], 2, "no batch to resume"),
        (["batch", "jobs.yaml", "--retry-failed"], 2, "add --resume"),
        (["batch", "status", "nowhere"], 2, "no such batch"),
        (["batch", "jobs.yaml", "--", "torchrun"], 2, "takes no training command"),
        (["batch", "lists.yaml"], 2, "a batch is a mapping"),
        (["batch", "config.yaml"], 2, "missing.yaml: cannot be read"),
        (["batch", "--frobnicate"], 2, "frobnicate"),
    ],
)
def test_refusals_are_one_line(
    words: list[str], code: int, says: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(folder, "name: a, command: torchrun x.py")
    (folder / "lists.yaml").write_text("- a\n")
    (folder / "config.yaml").write_text("config: missing.yaml\njobs: [{name: a, command: torchrun x.py}]\n")
    assert main(words) == code
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert says in lines[0]
    assert not (folder / "batches").exists()


def test_a_batch_is_begun_once_and_run_by_one_process(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(folder, "name: a, command: torchrun x.py")
    assert main(["batch", "jobs.yaml"]) == 0
    assert main(["batch", "jobs.yaml"]) == 2
    assert "the batch exists; add --resume" in capfd.readouterr().err
    with Lease.acquire(folder / "batches" / "jobs"):
        half = folder / "batches" / "jobs" / ".results.json.x.tmp"
        half.touch()  # the other process is about to rename it
        assert main(["batch", "jobs.yaml", "--resume"]) == 6
        assert half.exists()
        assert "runs this batch" in capfd.readouterr().err
        assert main(["batch", "status", "jobs"]) == 0
        assert "batch jobs: running" in capfd.readouterr().out
    assert main(["batch", "jobs.yaml", "--resume"]) == 0
    assert not half.exists()


def test_ctrl_c_ends_the_tuners_and_keeps_the_state(folder: Path) -> None:
    write(
        folder, f"name: a, command: torchrun x.py --hold {folder / 'hold'}", "name: b, command: torchrun x.py"
    )
    batch = start_batch(folder, "jobs.yaml")
    wait_until(lambda: bool(log_of(folder / "log")), what="a tuner", timeout_s=500.0)
    batch.send_signal(signal.SIGINT)
    output, _ = batch.communicate(timeout=60)
    assert batch.returncode == 130, output
    assert (
        output.decode().splitlines()[-1]
        == "quartet: stopped; `quartet batch JOBS.yaml --resume` continues it"
    )
    assert living(folder) == []
    (folder / "hold").touch()
    assert main(["batch", "jobs.yaml", "--resume"]) == 0
