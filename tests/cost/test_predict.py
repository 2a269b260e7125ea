"""Whole predictions: terms, errors, and published times."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published_fit import PublishedRun, fit
from quartet_plugin.cli.main import main
from quartet_plugin.cost.constants import Constants, fitted, names, of_mapping
from quartet_plugin.cost.devices import device_named
from quartet_plugin.cost.predict import predict, predict_row
from quartet_plugin.cost.run import run_of, uniform_cluster_of_device
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.layout import Layout
from tests.cost.runs import EXPERTS, PIPELINE, ROW, run


@pytest.mark.parametrize(
    ("row", "seconds"),
    [
        (ROW, 1.10),
        (ROW | {"recompute": "full", "sp": False}, 1.42),
        (PIPELINE, 2.6846),
        (PIPELINE | {"schedule": "ZB-1p"}, 2.3952),
        (PIPELINE | {"schedule": "ZB-2p"}, 2.1858),
        (PIPELINE | {"schedule": "1F1B-I", "vpp": 3}, 2.5157),
    ],
)
def test_published_times(row: dict[str, Any], seconds: float) -> None:
    """Korthikanti et al. (2022), table 5; Qi et al. (2024), table 4."""
    assert predict_row(row)["iter_time_s"] == pytest.approx(seconds, rel=0.08)


@pytest.mark.parametrize("row", [ROW, PIPELINE, PIPELINE | {"vpp": 3}, EXPERTS])
def test_terms_sum_and_none_is_negative(row: dict[str, Any]) -> None:
    found = predict_row(row)
    assert sum(found["terms"].values()) == pytest.approx(found["iter_time_s"])
    assert sum(found["compute_terms"].values()) == pytest.approx(found["terms"]["compute_s"])
    assert min(found["terms"].values()) >= 0
    assert sum(found["memory_terms"].values()) == pytest.approx(found["peak_memory_bytes"])


def test_more_work_and_slower_devices_take_longer() -> None:
    base = predict_row(PIPELINE)["iter_time_s"]
    assert predict_row(PIPELINE | {"gbs": 128})["iter_time_s"] > 1.7 * base
    assert predict_row(PIPELINE | {"gpu": "V100-SXM2-32GB"})["iter_time_s"] > 2 * base
    assert predict_row(PIPELINE | {"recompute": "full"})["iter_time_s"] > 1.2 * base


def test_recompute_that_is_not_printed_is_the_least_that_fits() -> None:
    row = {key: value for key, value in PIPELINE.items() if key != "recompute"}
    assert predict_row(row)["assumed"]["recompute"] == "none"
    assert predict_row(row | {"gpu_mem_gb": 28})["assumed"]["recompute"] == "selective"
    assert predict_row(row | {"gpu_mem_gb": 22})["assumed"]["recompute"] == "full"
    tight = predict_row(row | {"gpu_mem_gb": 8})
    assert not tight["fits"]
    assert "does not fit" in tight["warnings"][0]


def test_constants_are_checked_and_complete() -> None:
    assert len(names()) <= 20
    assert fitted() == of_mapping({name: getattr(fitted(), name) for name in names()}, where="x")
    with pytest.raises(ConfigError, match="gemm_rate"):
        of_mapping({"gemm_rate": -1.0}, where="x")
    with pytest.raises(ConfigError, match="magic"):
        of_mapping({"magic": 1.0}, where="x")


def test_a_fit_finds_the_constants_that_made_the_times() -> None:
    true = of_mapping({"gemm_rate": 0.8, "softmax": 1.5}, where="x")
    runs = [run(row, mbs=m, gbs=64) for row in (ROW | {"gbs": 64}, PIPELINE) for m in (1, 2, 4)]
    seen = [PublishedRun(run=one, seconds=predict(one, true).iter_time_s, spread=0.003) for one in runs]
    found = fit(seen, rounds=3)
    assert found.gemm_rate == pytest.approx(0.8, rel=0.03)
    for one in seen:
        assert predict(one.run, found).iter_time_s == pytest.approx(one.seconds, rel=0.01)
    unseen = fit(seen, rounds=1).flops_per_joule
    assert unseen == pytest.approx(Constants().flops_per_joule)


def test_a_plans_shape_and_layout_are_predicted_too() -> None:
    known = run(PIPELINE)
    layout = Layout(
        tensor_parallel=4, pipeline_parallel=2, data_parallel=2, virtual_stages=1, context_parallel=1,
        expert_parallel=1, micro_batch_size=1, sequence_parallel=True, distributed_optimizer=True,
        recompute="none",
    )  # fmt: skip
    machines = uniform_cluster_of_device(device_named("H100"), num_devices=16)
    job = run_of(known.shape, layout, global_batch_size=64, layers_per_stage=(23, 23), cluster=machines)
    assert 0.2 < predict(job, fitted()).iter_time_s < 2
    with pytest.raises(ConfigError, match="16 ranks"):
        run_of(
            known.shape,
            layout,
            global_batch_size=64,
            layers_per_stage=(23, 23),
            cluster=uniform_cluster_of_device(device_named("H100"), num_devices=8),
        )
    with pytest.raises(ConfigError, match="layers_per_stage"):
        run_of(known.shape, layout, global_batch_size=64, layers_per_stage=(20, 23), cluster=machines)


def test_the_command_writes_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, output = tmp_path / "rows.json", tmp_path / "predictions.json"
    rows.write_text(json.dumps([{**ROW, "id": "good"}, {**ROW, "id": "bad", "gpu": "?"}]), encoding="utf-8")
    assert main(["predict", str(rows), "-o", str(output)]) == 0
    good, bad = json.loads(output.read_text(encoding="utf-8"))
    assert {"id", "iter_time_s", "peak_memory_bytes", "terms", "assumed", "warnings"} <= set(good)
    assert set(bad) == {"id", "error"}
    assert "1 rows with an error" in capsys.readouterr().out
    rows.write_text('{"rows": NaN}', encoding="utf-8")
    assert main(["predict", str(rows), "-o", str(output)]) == 2


def test_rows_that_all_fail_are_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, output = tmp_path / "rows.json", tmp_path / "predictions.json"
    rows.write_text(json.dumps([{**ROW, "gpu": "?"}, {**ROW, "tp": 7}]), encoding="utf-8")
    assert main(["predict", str(rows), "-o", str(output)]) == 2
    assert "none of 2 rows can be predicted; the first: device '?'" in capsys.readouterr().err
    assert [set(entry) for entry in json.loads(output.read_text(encoding="utf-8"))] == [{"id", "error"}] * 2


def test_a_wrong_key_or_folder_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, output = tmp_path / "rows.json", tmp_path / "predictions.json"
    rows.write_text(json.dumps([{**ROW, "head": 4}]), encoding="utf-8")
    assert main(["predict", str(rows), "-o", str(output)]) == 2
    assert "[0]: head: unknown key; did you mean heads?" in capsys.readouterr().err
    rows.write_text(json.dumps([ROW]), encoding="utf-8")
    assert main(["predict", str(rows), "-o", str(output), "--hardware", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert not output.exists()
