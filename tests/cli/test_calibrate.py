"""`quartet calibrate` with the trials of a run folder: iterations, and actions where they were recorded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.calibration.constants_fit import read_calibration
from quartet_plugin.calibration.observations import Direction, Quantity
from quartet_plugin.cli.calibrate import of_run_folder
from quartet_plugin.cli.main import main
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.predict import predict
from quartet_plugin.model.cluster import parse_cluster, write_cluster
from quartet_plugin.model.files import write_json_atomic
from tests.cli.test_profile import CLUSTER

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "attempt"


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.json"
    write_cluster(parse_cluster(CLUSTER, where="a test"), path=path)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with one measured trial of the user's command."""
    attempt = tmp_path / "runs" / "one" / "trials" / "000000" / "attempt-1"
    attempt.parent.mkdir(parents=True)
    shutil.copytree(GOLDEN, attempt)
    return tmp_path / "runs" / "one"


def record_actions(run: Path) -> None:
    """What both ranks of the trial would have left under a schedule of ours: two microbatches."""
    for device in range(2):
        texts = [f"{device}{kind}{number}" for number in range(2) for kind in "FIW"]
        sheet: dict[str, Any] = {
            "schema_version": 1,
            "attempt_id": json.loads((GOLDEN / "result.json").read_text())["attempt_id"],
            "launch_rank": device,
            "device": device,
            "replica": 0,
            "begin_at": 1000.0,
            "actions": texts,
            "start_s": [0.02 * at for at in range(6)],
            "end_s": [0.02 * at + 0.015 for at in range(6)],
            "waiting_s": [0.0] * 6,
        }
        path = run / "trials" / "000000" / "attempt-1" / f"rank-{device}.actions.json"
        write_json_atomic(path, sheet)


def test_iterations_of_stock_trials_calibrate(
    run: Path, cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calibration.json"
    assert main(["calibrate", "--cluster", str(cluster), str(run), "-o", str(path)]) == 0
    found = read_calibration(path)
    assert (found.num_iterations, found.num_parts) == (1, 0)
    assert found.constants.residual != 1.0
    printed = capsys.readouterr().out
    assert "gemm_rate" in printed
    assert "1 iterations and 0 parts" in printed


def test_links_that_were_measured_are_not_guessed(run: Path, cluster: Path, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    assert main(["calibrate", "--cluster", str(cluster), str(run), "-o", str(path)]) == 0
    # Cores that compute carry messages slower than a probe finds them.
    assert "hop_s" in {term.name for term in read_calibration(path).terms}
    for rank in (run / "trials" / "000000" / "attempt-1").glob("rank-?.json"):
        write_json_atomic(rank, json.loads(rank.read_text()) | {"device": "an accelerator"})
    assert main(["calibrate", "--cluster", str(cluster), str(run), "-o", str(path)]) == 0
    assert not {"scale_up", "scale_out", "hop_s"} & {term.name for term in read_calibration(path).terms}
    data = json.loads(cluster.read_text())
    data["links"]["measured"] = False
    write_json_atomic(cluster, data)
    assert main(["calibrate", "--cluster", str(cluster), str(run), "-o", str(path)]) == 0
    assert "hop_s" in {term.name for term in read_calibration(path).terms}


def test_recorded_actions_are_stages(run: Path, cluster: Path) -> None:
    record_actions(run)
    found = of_run_folder(run, cluster=cluster)
    stages = {(one.index, one.direction): one.seconds for one in found if one.quantity is Quantity.STAGE}
    assert set(stages) == {
        (stage, direction)
        for stage in (0, 1)
        for direction in (Direction.FORWARD, Direction.INPUT_GRAD, Direction.WEIGHT_GRAD)
    }
    assert all(seconds == pytest.approx(0.015) for seconds in stages.values())


def test_predictions_take_a_calibration(run: Path, cluster: Path, tmp_path: Path) -> None:
    calibration, rows = tmp_path / "calibration.json", tmp_path / "rows.json"
    assert main(["calibrate", "--cluster", str(cluster), str(run), "-o", str(calibration)]) == 0
    from tests.cost.runs import ROW

    rows.write_text(json.dumps([{"id": "one", **ROW}]))
    outputs = []
    for words in ([], ["--calibration", str(calibration)]):
        path = tmp_path / f"predictions-{len(words)}.json"
        assert main(["predict", str(rows), "-o", str(path), *words]) == 0
        outputs.append(json.loads(path.read_text())[0])
    assert "residual_s" not in outputs[0]["terms"]
    assert "residual_s" in outputs[1]["terms"]
    assert outputs[0]["iter_time_s"] != outputs[1]["iter_time_s"]


def test_trials_of_models_that_are_no_list_of_layers_are_left_out(
    run: Path, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "trials" / "000000" / "attempt-1" / "rank-0.json"
    data = json.loads(path.read_text())
    data["job"]["split"] = None
    write_json_atomic(path, data)
    assert main(["calibrate", "--cluster", str(cluster), str(run), "-o", str(run / "c.json")]) == 2
    assert "no measured trial" in capsys.readouterr().err


def report(run: Path, **changes: Any) -> None:
    """Change the job that RANK 0 of the trial reported."""
    path = run / "trials" / "000000" / "attempt-1" / "rank-0.json"
    data = json.loads(path.read_text())
    data["job"] |= changes
    write_json_atomic(path, data)


def test_a_mixture_of_experts_is_calibrated_as_one(run: Path, cluster: Path) -> None:
    experts = {"num_experts": 4, "experts_per_token": 2, "ffn_hidden_size": 480}
    dense = of_run_folder(run, cluster=cluster)[0].run
    report(run, features=["moe"], experts=experts, settings=[{"name": "ddp_bucket_size", "value": 10000}])
    routed = of_run_folder(run, cluster=cluster)[0].run
    assert routed.experts is not None
    assert routed.experts.num_experts == 4
    assert routed.software.bucket_elements == 10000
    assert predict(routed, fitted()).iter_time_s > predict(dense, fitted()).iter_time_s


def test_a_mixture_of_experts_that_is_not_described_is_refused(
    run: Path, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(run, features=["moe"])
    assert main(["calibrate", "--cluster", str(cluster), str(run), "-o", str(run / "c.json")]) == 2
    error = capsys.readouterr().err
    assert "job.experts: null" in error
    assert error.count("\n") == 1


HYBRID_KINDS = {
    "attention": 1,
    "mlp": 1,
    "experts": 0,
    "state_space": 2,
    "state_space_heads": 8,
    "state_space_groups": 2,
    "projected_size": 3 * 480 + 2 * 2 * 128 + 8,
    "pattern": "M*-M",
}


def report_hybrid(run: Path, kinds: dict[str, Any]) -> None:
    """Let the trial's model of four layers be a hybrid one."""
    path = run / "trials" / "000000" / "attempt-1" / "rank-0.json"
    shape = json.loads(path.read_text())["job"]["shape"]
    report(run, features=["hybrid"], shape={**shape, "layer_kinds": kinds})


def test_a_hybrid_model_corrects_the_scan_too(run: Path, cluster: Path, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    words = ["calibrate", "--cluster", str(cluster), str(run), "-o", str(path)]
    assert main(words) == 0
    dense = {term.name for term in read_calibration(path).terms}
    report_hybrid(run, HYBRID_KINDS)
    assert main(words) == 0
    assert {term.name for term in read_calibration(path).terms} - dense == {"scan"}


def test_a_hybrid_model_without_the_order_of_its_layers_is_refused(
    run: Path, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report_hybrid(run, {**HYBRID_KINDS, "pattern": None})
    assert main(["calibrate", "--cluster", str(cluster), str(run), "-o", str(run / "c.json")]) == 2
    error = capsys.readouterr().err
    assert "job.shape.layer_kinds: no pattern; the order of its layers is missing" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("source", ["run", "profile"])
def test_measurements_of_processors_do_not_calibrate_accelerators(
    source: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, profile = tmp_path / "h100.json", tmp_path / "profile.json"
    links = {"scale_up": {"bandwidth_bytes_per_s": 4.5e11, "latency_s": 5e-6}}
    nodes = [{"name": "gpu-17", "devices": ["H100-SXM-80GB"] * 2}]
    write_cluster(parse_cluster({"nodes": nodes, "links": links}, where="a test"), path=cluster)
    write_json_atomic(profile, profile_on_cpu())
    words = {"run": [str(run)], "profile": ["--profile", str(profile)]}[source]
    output = tmp_path / "c.json"
    assert main(["calibrate", "--cluster", str(cluster), *words, "-o", str(output)]) == 2
    error = capsys.readouterr().err
    assert "h100.json: H100-SXM-80GB;" in error
    assert "quartet probe --device cpu" in error
    assert error.count("\n") == 1
    assert not output.exists()


def profile_on_cpu() -> dict[str, Any]:
    """A profile of one rank on processor cores, without the times of its parts."""
    report = json.loads((GOLDEN / "rank-0.json").read_text())
    names = ("schema_version", "attempt_id", "launch_rank", "rank", "device", "peak_memory_bytes", "job")
    place = {"pipeline_rank": 0, "tensor_rank": 0, "parts": [], "steps": {}}
    rank = {name: report[name] for name in names} | place
    job = {"schema_version": 1, "job": report["job"], "played": None}
    return job | {"iteration_s": [1.0], "parts": [], "ranks": [rank], "costs": {}}


@pytest.mark.parametrize("command", ["predict", "calibrate"])
def test_a_folder_that_is_not_there_is_said_before_the_work(
    command: str, run: Path, cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is read first does not exist."""
    words = {"predict": ["missing.json"], "calibrate": ["--cluster", "missing.json", str(run)]}[command]
    assert main([command, *words, "-o", str(tmp_path / "nowhere" / "out.json")]) == 2
    assert "does not exist; create it first" in capsys.readouterr().err
