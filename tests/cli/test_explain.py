"""`quartet explain`, and what `quartet plan` says about clusters and refusals."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.model.canonical import digest
from quartet_plugin.model.cluster import parse_cluster
from quartet_plugin.model.plan import (
    Baseline,
    Mapping,
    NodeInfo,
    ScheduleChoice,
    Slot,
    Split,
    read_plan,
    write_plan,
)
from quartet_plugin.planner.explain import baseline_of, job_of_cluster
from tests.model.clusters import make_cluster
from tests.model.plans import MADE_FOR, plan_with

GOLDEN = Path(__file__).parents[1] / "golden"
JOB = """
model: {num_layers: 8, hidden_size: 1024, num_attention_heads: 12, kv_channels: 64, seq_length: 1024,
        vocab_size: 32000%s}
cluster: %s
batch: {global_batch_size: 16}
search: {micro_batch_size: [1, 2]}
"""
EQUAL = "{device: H100-SXM-80GB, num_nodes: 2, devices_per_node: 4}"


def planned(folder: Path, *, cluster: str = EQUAL, more: str = "", top: int = 1) -> Path:
    """A plan of the job in `folder`."""
    (folder / "job.yaml").write_text(JOB % (more, cluster), encoding="utf-8")
    output = folder / "plan.json"
    assert main(["plan", str(folder / "job.yaml"), "-o", str(output), "--top", str(top), "--refused"]) == 0
    return output


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    capsys.readouterr()
    assert main(["explain", *arguments, "--json"]) == 0
    data: dict[str, object] = json.loads(capsys.readouterr().out)
    return data


def test_terms_memory_and_runner_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(tmp_path, top=2)
    data = explained(capsys, str(plan), "--cluster", str(tmp_path / "job.yaml"))
    read, second = read_plan(plan), read_plan(tmp_path / "plan.2.json")
    assert read.prediction is not None
    assert second.prediction is not None
    assert data["iteration_s"] == pytest.approx(read.prediction.iteration_s)
    assert sum(data["terms"].values()) == pytest.approx(data["iteration_s"])  # type: ignore[attr-defined]
    memory = data["memory"]["ranks"]  # type: ignore[index]
    assert len(memory) == read.layout.pipeline_parallel
    assert max(one["total_bytes"] for one in memory) == pytest.approx(read.prediction.peak_memory_bytes)
    runner_up = data["runner_up"]
    assert runner_up["slower_by"] >= 0  # type: ignore[index]
    if second.layout != read.layout:
        assert runner_up["equal_work_s"] == pytest.approx(second.prediction.iteration_s)  # type: ignore[index]


def test_a_plans_own_nodes_are_enough_for_equal_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(tmp_path)
    alone = explained(capsys, str(plan))
    whole = explained(capsys, str(plan), "--cluster", str(tmp_path / "job.yaml"))
    assert alone["iteration_s"] == pytest.approx(whole["iteration_s"])
    assert alone["runner_up"] == whole["runner_up"]
    assert alone["assumed"] == whole["assumed"] == {}


def test_a_plan_without_a_description_is_explained_with_what_is_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = read_plan(planned(tmp_path))
    older = replace(plan, made_for=replace(plan.made_for, job=None))
    write_plan(older, path=tmp_path / "older.json")
    data = explained(capsys, str(tmp_path / "older.json"))
    assumed = {
        "precision": "bf16",
        "model": "dense layers with plain attention (the plan does not say more)",
        "search": "auto",
    }
    assert data["assumed"] == {**assumed, "links": "library values for this device"}
    assert job_of_cluster(older, parse_cluster(make_cluster(), where="test"))[1] == assumed


def test_a_plan_of_experts_that_nothing_describes_is_not_explained_as_a_dense_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = replace(MADE_FOR.baseline.layout, pipeline_parallel=1, data_parallel=2, expert_parallel=2)
    spread = Baseline(
        layout=layout,
        split=Split(transformer_layers_per_stage=(8,)),
        schedule=ScheduleChoice(name="no-pipelining"),
    )
    plans = {
        "layout": plan_with(layout=spread.layout, split=spread.split, schedule=spread.schedule),
        "made_for.baseline.layout": plan_with(made_for=replace(MADE_FOR, baseline=spread)),
    }
    path, cluster = tmp_path / "plan.json", tmp_path / "cluster.json"
    cluster.write_text(json.dumps(make_cluster(num_nodes=1, per_node=2)), encoding="utf-8")
    for key, plan in plans.items():
        write_plan(plan, path=path)
        for more in ((), ("--cluster", str(cluster))):
            capsys.readouterr()
            assert main(["explain", str(path), *more]) == 2
            (line,) = capsys.readouterr().err.strip().splitlines()
            assert f"{key}.expert_parallel: 2; must be 1 where the plan does not describe" in line
            assert "add --cluster JOB.yaml" in line


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(tmp_path)
    capsys.readouterr()
    assert main(["explain", str(plan)]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("compute", "█", "of usable", "bubble", "next best", "schedule"))


def test_an_unequal_cluster_is_explained_with_its_mapping(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = make_cluster(per_node=2, slowdown={(0, 1): 2.0, (1, 0): 2.0})
    (tmp_path / "cluster.json").write_text(json.dumps(cluster), encoding="utf-8")
    plan = planned(tmp_path, cluster="{file: cluster.json}", top=2)
    assert "slower:" in capsys.readouterr().out
    data = explained(capsys, str(plan), "--cluster", str(tmp_path / "job.yaml"))
    stated = read_plan(plan).prediction
    assert stated is not None
    assert data["iteration_s"] == pytest.approx(stated.iteration_s)
    other = explained(capsys, str(plan), "--cluster", str(tmp_path / "cluster.json"))
    assert other["iteration_s"] == pytest.approx(stated.iteration_s)


def test_refused_degrees_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(
        tmp_path,
        cluster="{device: H100-SXM-80GB, num_nodes: 1, devices_per_node: 8, memory_bytes: 4000000000}",
    )
    text = capsys.readouterr().out
    assert "TP 8 does not divide 12 heads" in text
    assert "memory: TP" in text


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("missing.json",), 2, "missing.json"),
        (("plan.json", "--cluster", "missing.yaml"), 2, "missing.yaml"),
        (("plan.json", "--cluster", "other.yaml"), 2, "made_for: shape"),
        (("plan.json", "--cluster", "small.json"), 2, "made_for: devices"),
        (("unequal.json",), 2, "add --cluster CLUSTER.json"),
        (("plan.json", "--hardware", "nowhere"), 2, "nowhere: no such folder"),
    ],
)
def test_one_line_and_an_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    planned(tmp_path)
    (tmp_path / "other.yaml").write_text(JOB % (", gated_ffn: true", EQUAL), encoding="utf-8")
    (tmp_path / "small.json").write_text(json.dumps(make_cluster(num_nodes=1)), encoding="utf-8")
    nodes = (
        NodeInfo(host="a", node_class="cpu x1", num_slots=1),
        NodeInfo(host="b", node_class="H100 x1", num_slots=1),
    )
    slots = Mapping(slots=(Slot(node=0, local=0), Slot(node=1, local=0)))
    unequal = plan_with(made_for=replace(MADE_FOR, nodes=nodes), mapping=slots)
    write_plan(unequal, path=tmp_path / "unequal.json")
    capsys.readouterr()
    assert main(["explain", *arguments]) == code
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize("plan", ["plan.json", "plan_custom.json", "plan_deepspeed.json"])
def test_the_plan_of_a_cpu_run_is_explained_with_what_is_not_known(
    plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = explained(capsys, str(GOLDEN / plan))
    assert data["iteration_s"] == pytest.approx(sum(data["terms"].values()))  # type: ignore[attr-defined]
    assert data["memory"]["available_bytes"] is None  # type: ignore[index]
    assumed: dict[str, str] = data["assumed"]  # type: ignore[assignment]
    assert "not known" in assumed["device"]
    assert assumed["precision"] == "fp32"
    # An order without a name is predicted as the plan makes it.
    assert "schedule" not in assumed
    assert main(["explain", str(GOLDEN / plan)]) == 0
    assert "not known" in capsys.readouterr().out


def test_a_device_without_a_file_is_stood_in_for_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = (NodeInfo(host="a", node_class="Some GPU x2", num_slots=2),)
    write_plan(plan_with(made_for=replace(MADE_FOR, nodes=nodes)), path=tmp_path / "plan.json")
    data = explained(capsys, str(tmp_path / "plan.json"))
    assumed: dict[str, str] = data["assumed"]  # type: ignore[assignment]
    assert "Some GPU is not in the device library" in assumed["device"]


def test_experts_are_planned_and_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(tmp_path, more=", num_experts: 8, expert_ffn_hidden_size: 1024")
    data = explained(capsys, str(plan), "--cluster", str(tmp_path / "job.yaml"))
    stated = read_plan(plan).prediction
    assert stated is not None
    assert data["iteration_s"] == pytest.approx(stated.iteration_s)
    assert explained(capsys, str(plan)) == data


LATENT = "{q_lora_rank: 64, kv_lora_rank: 32, qk_head_dim: 64, qk_pos_emb_head_dim: 32, v_head_dim: 64}"


@pytest.mark.parametrize("cluster", [EQUAL, "{file: cluster.json}"])
def test_a_plan_says_all_of_its_job(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts, latent attention, precision, hardware and search: no second file is needed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.json").write_text(json.dumps(make_cluster(device="H100")), encoding="utf-8")
    job = JOB % (f", num_experts: 4, precision: fp8, latent_attention: {LATENT}", cluster)
    rest = "  recompute: [none, full]\n  context_parallel: auto\n  distributed_optimizer: true\n"
    rest += "  forbid: {pipeline_parallel: 4}\n"
    search = f"search:\n{rest}  micro_batch_size: [1, 2]\n"
    text = job.replace("kv_channels: 64, ", "").replace("12,", "16,")
    (tmp_path / "job.yaml").write_text(text[: text.index("search:")] + search, encoding="utf-8")
    assert main(["plan", "job.yaml", "-o", "plan.json"]) == 0
    whole = explained(capsys, "plan.json", "--cluster", "job.yaml")
    alone = explained(capsys, "plan.json")
    assert alone == whole
    assert alone["assumed"] == {}
    assert alone["iteration_s"] == pytest.approx(alone["stated_s"])
    assert main(["show", "plan.json"]) == 0
    text = capsys.readouterr().out
    for words in ("precision fp8", "4 experts of 4096", "latent attention, ranks 64 and 32"):
        assert words in text


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("precision", "fp7", "precision"),
        ("search", {"tensor_paralel": 2}, "did you mean tensor_parallel"),
        ("devices", None, "must have one of devices and cluster"),
        ("experts", {"num_experts": 0, "experts_per_token": 1, "ffn_hidden_size": 1}, "num_experts"),
    ],
)
def test_a_wrong_description_is_one_line(
    key: str, value: object, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = planned(tmp_path)
    data = json.loads(path.read_text(encoding="utf-8"))
    del data["digest"]
    data["made_for"]["job"][key] = value
    if value is None:
        del data["made_for"]["job"][key]
    path.write_text(json.dumps({**data, "digest": digest(data)}), encoding="utf-8")
    capsys.readouterr()
    assert main(["explain", str(path)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.strip().splitlines()) == 1


def test_shapes_of_an_equal_budget_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Throughput against width and depth: planned for a job, measured beside a run's plan."""
    job = tmp_path / "job.yaml"
    text = (JOB % ("", EQUAL)).replace("num_attention_heads: 12", "num_attention_heads: 16")
    job.write_text(text.replace("search: {", "search: {scaling: {tolerance: 0.3, max_shapes: 3}, "))
    assert main(["plan", str(job), "-o", str(tmp_path / "plan.json")]) == 0
    curve: dict[str, Any] = explained(capsys, str(tmp_path / "plan.json"))["shapes"]  # type: ignore[assignment]
    assert len(curve["points"]) == 3
    assert curve["own_label"] in {point["label"] for point in curve["points"]}
    assert all(point["predicted"] > 0 and point["measured"] is None for point in curve["points"])
    best = max(curve["points"], key=lambda point: point["predicted"])
    assert read_plan(tmp_path / "plan.json").shape.label == best["label"]
    assert main(["explain", str(tmp_path / "plan.json")]) == 0
    assert "shapes    " in capsys.readouterr().out
    curve["points"][0] |= {"measured": 1.5, "trial": 3}
    (tmp_path / "shapes.json").write_text(json.dumps(curve))
    assert main(["explain", str(tmp_path / "plan.json")]) == 0
    assert "1.50x measured (trial 3)" in capsys.readouterr().out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of an earlier release, called `r`, in the folder `runs`."""
    path = tmp_path_factory.mktemp("explain") / "runs" / "r"
    shutil.copytree(GOLDEN / "run_0.1.0", path)
    return path


def test_a_run_is_explained_by_its_winner_as_its_trials_calibrated_the_model(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parents[1])
    data = explained(capsys, "r")
    plan = read_plan(run / "best" / "plan.json")
    assert plan.measurement is not None
    measured_s = plan.measurement.plan.iteration_s.median
    assert data["measured_s"] == measured_s
    assert data["num_calibrating_trials"] == sum(
        row["verdict"] == "measured" for row in read_trials(capsys, "r")
    )
    # What the trials taught is nearer to the measured time than what a generic CPU core would take.
    alone = run.parents[1] / "alone.json"
    shutil.copy(run / "best" / "plan.json", alone)
    assumed = explained(capsys, str(alone))
    assert assumed["num_calibrating_trials"] is None
    calibrated_s, assumed_s = float(str(data["iteration_s"])), float(str(assumed["iteration_s"]))
    assert abs(math.log(calibrated_s / measured_s)) < 0.25 < abs(math.log(assumed_s / measured_s))
    assert sum(data["terms"].values()) == pytest.approx(calibrated_s)  # type: ignore[attr-defined]
    baseline: dict[str, Any] = data["baseline"]  # type: ignore[assignment]
    assert sum(baseline["terms"].values()) == pytest.approx(baseline["iteration_s"])
    assert baseline["measured_s"] == plan.measurement.baseline.iteration_s.median
    assert "none" not in data["runner_up"]["label"]  # type: ignore[index]
    # The name, the folder, the folder of runs, and the plan's own file are one thing.
    for words in ((str(run),), ("runs/r",), ("r", "--run-dir", str(run.parent)), ("runs/r/best/plan.json",)):
        assert explained(capsys, *words) == data


def read_trials(capsys: pytest.CaptureFixture[str], run: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["trials", run, "-f", "json"]) == 0
    trials: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["trials"]
    return trials


def test_a_runs_explanation_says_what_was_measured_and_by_what_it_is_calibrated(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["explain", str(run)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^measured  [\d.]+ s per iteration, [\d.]+x the fitted time$", text, re.MULTILINE)
    assert re.search(r"^before    your command: .*, measured ", text, re.MULTILINE)
    assert re.search(
        r"^basis     the cost model as \d+ measured trials of the run calibrated it$", text, re.MULTILINE
    )
    assert main(["explain", str(GOLDEN / "plan.json")]) == 0
    assert "basis     not calibrated by trials: only the shares and ratios" in capsys.readouterr().out


def test_a_run_whose_trials_cannot_be_read_is_explained_without_them(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "r"
    shutil.copytree(run, copy)
    (copy / "study.sqlite3").unlink()
    data = explained(capsys, str(copy))
    assert data["num_calibrating_trials"] is None
    assert "not known" in data["assumed"]["device"]  # type: ignore[index]


@pytest.mark.parametrize("command", ["explain", "show"])
def test_a_run_without_a_winner_says_so_and_what_to_do(
    command: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "r"
    shutil.copytree(run, copy)
    (copy / "best" / "plan.json").unlink()
    events = (copy / "events.jsonl").read_text(encoding="utf-8")
    capsys.readouterr()
    for text, words in ((events, "add --trial "), (events.splitlines()[0] + "\n", "quartet tune --resume")):
        (copy / "events.jsonl").write_text(text, encoding="utf-8")
        assert main([command, str(copy)]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "winner" in line
        assert words in line
    assert main([command, "nowhere", "--run-dir", str(tmp_path)]) == 2
    assert "nowhere: no such plan file or run" in capsys.readouterr().err


def test_the_plan_of_a_trial_is_shown_and_explained_beside_the_command(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same as of the winner's file, and without a winner too."""
    winner = read_plan(run / "best" / "plan.json")
    number, measured = str(winner.provenance.trial), winner.measurement
    assert measured is not None
    of_winner = explained(capsys, str(run))
    copy = tmp_path / "r"
    shutil.copytree(run, copy)
    (copy / "best" / "plan.json").unlink()
    assert main(["explain", str(copy)]) == 2
    nearest = re.search(r"add --trial (\d+)", capsys.readouterr().err)
    assert nearest is not None
    assert nearest[1] == number
    of_trial = explained(capsys, str(copy), "--trial", number)
    assert {**of_trial, "measured_s": None, "baseline": None} == {
        **of_winner,
        "measured_s": None,
        "baseline": None,
    }
    assert of_trial["measured_s"] == measured.plan.iteration_s.median
    assert main(["show", str(copy), "--trial", number]) == 0
    text = capsys.readouterr().out
    assert "s/iteration in its single trial, " in text
    assert "speedup " in text
    rows = {row["trial"]: row for row in read_trials(capsys, str(copy))}
    other = next(row for row in rows.values() if row["trial"] and row["iteration_s"] and not row["repeats"])
    data = explained(capsys, str(copy), "--trial", str(other["trial"]))
    assert data["num_calibrating_trials"] == of_winner["num_calibrating_trials"]
    assert data["baseline"]["measured_s"]  # type: ignore[index]


@pytest.mark.parametrize("command", ["explain", "show"])
def test_a_trial_that_is_not_there_is_one_line(
    command: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main([command, str(run), "--trial", "999"]) == 2
    assert "--trial 999: the run has no such plan; `quartet trials " in capsys.readouterr().err
    assert main([command, str(run / "best" / "plan.json"), "--trial", "1"]) == 2
    assert "is a plan file; name a run" in capsys.readouterr().err


def test_show_takes_a_run(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parents[1])
    capsys.readouterr()
    assert main(["show", "runs/r/best/plan.json"]) == 0
    of_file = capsys.readouterr().out
    for words in (("r",), (str(run),), ("r", "--run-dir", "runs")):
        assert main(["show", *words]) == 0
        assert capsys.readouterr().out == of_file


def test_the_baseline_as_a_plan_has_the_terms_of_the_second_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = GOLDEN / "plan.json"
    write_plan(baseline_of(read_plan(path)), path=tmp_path / "baseline.json")
    alone = explained(capsys, str(tmp_path / "baseline.json"))
    beside: dict[str, Any] = explained(capsys, str(path))["baseline"]  # type: ignore[assignment]
    assert beside["terms"] == pytest.approx(alone["terms"])
    assert beside["compute_terms"] == pytest.approx(alone["compute_terms"])
    assert alone["baseline"] is None, "it is compared with itself"
