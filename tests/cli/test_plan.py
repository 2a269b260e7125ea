"""`quartet plan`."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli.main import build_app, main
from quartet_plugin.cost.memory import capacity_bytes_of
from quartet_plugin.model.plan import read_plan
from tests.model.clusters import make_cluster

JOB = """
model: {num_layers: 8, hidden_size: 1024, num_attention_heads: 16, seq_length: 1024, vocab_size: 32000}
cluster: {device: %s, num_nodes: 1, devices_per_node: 4%s}
batch: {global_batch_size: 16}
search: {tensor_parallel: auto, micro_batch_size: [1, 2]}
"""


def write_job(folder: Path, *, device: str = "H100-SXM-80GB", more: str = "") -> str:
    path = folder / "job.yaml"
    path.write_text(JOB % (device, more), encoding="utf-8")
    return str(path)


def test_the_command_is_there() -> None:
    assert [command.name for command in build_app().registered_commands].count("plan") == 1


def test_ranked_plans_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "plan.json"
    assert main(["plan", write_job(tmp_path), "-o", str(output), "--top", "3"]) == 0
    times = []
    for name in ("plan.json", "plan.2.json", "plan.3.json"):
        plan = read_plan(tmp_path / name)
        assert plan.prediction is not None
        assert plan.prediction.iteration_s is not None
        times.append(plan.prediction.iteration_s)
        assert plan.layout.world_size == len(plan.mapping.slots) == 4
    assert times == sorted(times)
    assert " predicted, " in capsys.readouterr().out


def test_the_first_line_says_what_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", write_job(tmp_path), "--named-only"]) == 0
    job, first, terms, *_ = capsys.readouterr().out.splitlines()
    assert job == (
        "8 layers of hidden size 1,024; 16 sequences of 1,024 tokens per iteration; bf16; "
        "4 x H100-SXM-80GB, 4 a node"
    )
    assert first.startswith("1. ")
    assert "e-" not in terms


def test_a_shown_plan_that_no_run_measured_says_so_and_names_many_nodes_by_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "plan.json")
    words = ["plan", "--model", "llama3-8b", "--cluster", "H100", "--devices", "64", "--global-batch", "512"]
    assert main([*words, "--named-only", "--top", "2", "-o", path]) == 0
    assert (
        "mapping solved: no order of the ranks is faster than the stock order tp-pp-dp"
        in capsys.readouterr().out
    )
    assert main(["show", path]) == 0
    first, _, made_for, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith("of `quartet plan`, place 1; not measured")
    assert made_for.endswith("64 processes on 8 nodes, node-0000 to node-0007 (H100-SXM-80GB x8)")
    assert main(["explain", path]) == 0
    assert "e-" not in capsys.readouterr().out.partition("\nrank ")[0].partition("\nterm ")[2]


def test_a_models_sequences_have_the_length_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "llama3-8b", "--cluster", "H100", "--devices", "64", "--global-batch", "512"]
    assert main([*words, "--named-only", "--seq-length", "4096"]) == 0
    assert "512 sequences of 4,096 tokens per iteration" in capsys.readouterr().out


def test_the_length_of_a_jobs_sequences_stands_in_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", write_job(tmp_path), "--seq-length", "4096"]) == 2
    assert "a JOB.yaml has model.seq_length" in capsys.readouterr().err


def test_a_plan_that_nearly_fills_the_memory_says_how_much_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best plan stays the best in a memory that just holds it."""
    job = write_job(tmp_path)
    assert main(["plan", job, "--named-only", "--json"]) == 0
    needed = json.loads(capsys.readouterr().out)["plans"][0]["peak_memory_bytes"]
    assert main(["plan", job, "--named-only"]) == 0
    assert "below the limit" not in capsys.readouterr().out
    job = write_job(tmp_path, more=f", memory_bytes: {capacity_bytes_of(1.02 * needed):.0f}")
    assert main(["plan", job, "--named-only"]) == 0
    assert "GiB below the limit, and a prediction may be 5 % off" in capsys.readouterr().out


def test_a_plan_is_for_the_release_that_is_asked_for(tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    words = ["plan", write_job(tmp_path), "--named-only", "-o", str(output)]
    assert main([*words, "--megatron", "0.18.2"]) == 0
    assert read_plan(output).made_for.framework_version == "0.18.2"


def test_a_setting_that_the_asked_release_is_without_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, output = tmp_path / "job.yaml", tmp_path / "plan.json"
    asked = "{tensor_parallel: 1, pipeline_parallel: 1, use_megatron_fsdp: true}"
    text = JOB % ("H100-SXM-80GB", "")
    job.write_text(text.replace("{tensor_parallel: auto, micro_batch_size: [1, 2]}", asked))
    words = ["plan", str(job), "--named-only", "-o", str(output)]
    assert main([*words, "--megatron", "0.17.1"]) == 2
    assert "search.use_megatron_fsdp: on; " in (error := capsys.readouterr().err)
    assert "needs Megatron 0.19" in error
    assert not output.exists()
    assert main([*words, "--megatron", "0.19.2"]) == 0
    plan = read_plan(output)
    assert (plan.made_for.framework_version, plan.layout.setting("use_megatron_fsdp")) == ("0.19.2", True)


def test_a_plan_is_for_the_tree_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = tmp_path / "tree" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 20\nPATCH = 0\nPRE_RELEASE = 'rc0'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "tree"))
    output = tmp_path / "plan.json"
    assert main(["plan", write_job(tmp_path), "--named-only", "-o", str(output)]) == 0
    assert read_plan(output).made_for.framework_version == "0.20.0rc0"


def test_a_release_must_be_a_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", write_job(tmp_path), "--megatron", "newest"]) == 2
    assert capsys.readouterr().err.strip() == (
        "quartet: --megatron 'newest': must be a version, such as 0.19.2"
    )


def test_a_time_limit_reaches_the_searches_of_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []

    class StopError(Exception):
        pass

    def capture(*_: object, time_limit_s: float | None, **__: object) -> None:
        limits.append(time_limit_s)
        raise StopError

    monkeypatch.setattr("quartet_plugin.planner.order_search.planned_ranking", capture)
    main(["plan", write_job(tmp_path), "--time-limit", "2.5"])
    main(["plan", write_job(tmp_path)])
    assert limits == [2.5, None]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--time-limit", "0"], "--time-limit 0: must be from 0.1 to 1e+06 seconds"),
        (["--time-limit", "nan"], "--time-limit nan: must be from"),
        (["--time-limit", "5", "--named-only"], "--time-limit 5: limits schedule searches, which do not run"),
        (["--time-limit", "5", "--frontier", "memory"], "--time-limit 5: limits schedule searches"),
        (["--time-limit", "5", "--devices", "4,8"], "--time-limit 5: limits schedule searches"),
    ],
)
def test_a_time_limit_that_limits_nothing_is_refused(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", write_job(tmp_path), *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("schedule", ["stock", "[1f1b, zb-h1]"])
def test_a_time_limit_of_a_job_without_searched_orders_is_refused(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Path(write_job(tmp_path))
    text = job.read_text(encoding="utf-8").replace("search: {", f"search: {{schedule: {schedule}, ")
    job.write_text(text, encoding="utf-8")
    assert main(["plan", str(job), "--time-limit", "5"]) == 2
    error = capsys.readouterr().err
    assert "--time-limit 5: limits schedule searches; search.schedule has no searched" in error
    assert main(["plan", str(job)]) == 0


def test_exhaustive_writes_the_same_plan(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    assert main(["plan", job, "-o", str(tmp_path / "a.json")]) == 0
    assert main(["plan", job, "-o", str(tmp_path / "b.json"), "--exhaustive"]) == 0
    assert read_plan(tmp_path / "a.json").key == read_plan(tmp_path / "b.json").key


@pytest.mark.parametrize(
    ("device", "more", "code", "words"),
    [
        ("H9000", "", 2, "unknown"),
        ("H100-SXM-80GB", ", scale_up_bandwidth_bytes_per_s: -5.0", 2, "scale_up_bandwidth_bytes_per_s"),
        ("H100-SXM-80GB", ", memory_bytes: 2000000000", 3, "GiB that are usable"),
    ],
)
def test_one_line_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str, more: str, code: int, words: str
) -> None:
    job = write_job(tmp_path, device=device, more=more)
    assert main(["plan", job, "-o", str(tmp_path / "plan.json")]) == code
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("links", "device", "words"),
    [
        (
            {"network": {"bandwidth_bytes_per_s": -5.0, "latency_s": 0.0}},
            "H100",
            "bandwidth_bytes_per_s: -5.0",
        ),
        ({}, "H9000", "device 'H9000': unknown"),
    ],
)
def test_a_wrong_cluster_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], links: dict[str, Any], device: str, words: str
) -> None:
    cluster = make_cluster(device=device, links=links)
    (tmp_path / "cluster.json").write_text(json.dumps(cluster), encoding="utf-8")
    job = Path(write_job(tmp_path))
    lines = job.read_text(encoding="utf-8").splitlines()
    named = ["cluster: {file: cluster.json}" if line.startswith("cluster") else line for line in lines]
    job.write_text("\n".join(named), encoding="utf-8")
    assert main(["plan", str(job), "-o", str(tmp_path / "plan.json")]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1


def test_a_model_that_is_said_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", write_job(tmp_path), "--model", "llama3-8b"]) == 2
    assert "remove the section, or the option" in capsys.readouterr().err


def test_no_legal_layout_ends_with_three_and_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(write_job(tmp_path))
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("tensor_parallel: auto", "tensor_parallel: 3"), encoding="utf-8")
    assert main(["plan", str(path), "-o", str(tmp_path / "plan.json")]) == 3
    error = capsys.readouterr().err
    assert "none is legal" in error
    assert len(error.strip().splitlines()) == 1


def test_rates_and_cost_are_shown_and_kept_in_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, plan = write_job(tmp_path), str(tmp_path / "plan.json")
    cost = ["--tokens", "1e9", "--price", "2.5"]
    assert main(["plan", job, "-o", plan, *cost]) == 0
    text = capsys.readouterr().out
    rates, price = (line.strip() for line in text.splitlines()[3:5])
    assert "tokens/s per device, " in rates
    assert "MFU" in rates
    assert "days for 1e+09 tokens" in price
    assert "price" in price
    for command in ("show", "explain"):
        assert main([command, plan]) == 0
        text = capsys.readouterr().out
        assert rates in text
        assert price in text
    Path(job).write_text(
        Path(job).read_text(encoding="utf-8") + "cost: {tokens: 1000000000, price_per_device_hour: 2.5}\n",
        encoding="utf-8",
    )
    assert main(["plan", job]) == 0
    assert price in capsys.readouterr().out


def test_json_says_what_the_lines_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, path = write_job(tmp_path), tmp_path / "plan.json"
    assert main(["plan", job, "-o", str(path), "--top", "2", "--refused", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    plan = read_plan(path)
    assert plan.prediction is not None
    best, second = data["plans"]
    assert best["file"] == str(path)
    assert best["iteration_s"] == plan.prediction.iteration_s
    assert best["layout"]["tensor_parallel"] == plan.layout.tensor_parallel
    assert sum(best["terms"].values()) == pytest.approx(best["iteration_s"])
    assert best["mfu"] == pytest.approx(best["model_flops_per_s_per_device"] / 989e12)
    assert best["cost"] is None
    assert second["iteration_s"] >= best["iteration_s"]
    assert data["plain"]["is_users"] is False
    assert data["layouts"]["predicted"] >= 2
    assert data["refused"] == []
    assert data["not_read"] == []
    assert data["limits"] == []


def test_what_was_cut_off_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster.json").write_text(json.dumps(make_cluster()), encoding="utf-8")
    job = Path(write_job(tmp_path))
    lines = job.read_text(encoding="utf-8").splitlines()
    named = ["cluster: {file: cluster.json}" if line.startswith("cluster") else line for line in lines]
    job.write_text("\n".join(named), encoding="utf-8")
    assert main(["plan", str(job), "--named-only", "--json"]) == 0
    (limit,) = json.loads(capsys.readouterr().out)["limits"]
    assert limit.startswith("mappings: solved one by one only for the best 4 of ")
    assert main(["plan", str(job), "--named-only"]) == 0
    assert limit in capsys.readouterr().out.splitlines()


def test_several_numbers_of_devices_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path)
    arguments = ["plan", job, "--devices", "8,4,16", "--tokens", "1e9", "--price", "2"]
    assert main(arguments) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["4", "8", "16"]
    for word in ("efficiency", "days", "price", "tokens/s per device"):
        assert word in head
    assert "100.0 %" in rows[0]
    assert main([*arguments, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["devices_frontier"]
    assert [point["num_devices"] for point in points] == [4, 8, 16]
    assert points[1]["plan"]["cost"]["days"] < points[0]["plan"]["cost"]["days"]
    assert main(["plan", job, "--devices", "8", "-o", str(tmp_path / "plan.json")]) == 0
    assert read_plan(tmp_path / "plan.json").made_for.world_size == 8


def test_the_order_of_numbers_of_devices_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes are as large as the device's name says, where the largest number fills them."""
    options = ["--model", "llama3-8b", "--cluster", "H100", "--seq-length", "2048", "--global-batch", "64"]
    tables = []
    for numbers in ("4,16", "16,4"):
        assert main(["plan", *options, "--devices", numbers, "--json"]) == 0
        tables.append(json.loads(capsys.readouterr().out)["devices_frontier"])
    assert tables[0] == tables[1]


def test_time_against_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", write_job(tmp_path), "--frontier", "memory", "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["memory_frontier"]
    assert len(points) > 2
    for faster, smaller in pairwise(points):
        assert faster["iteration_s"] < smaller["iteration_s"]
        assert faster["peak_memory_bytes"] > smaller["peak_memory_bytes"]
    assert main(["plan", write_job(tmp_path), "--frontier", "memory"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(points) + 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--devices", "many"), "--devices many: must be numbers"),
        (("--devices", "6"), "nearest: 4 or 8"),
        (("--devices", "0"), "--devices 0: must be from 1 to 65536"),
        (("--model", "llama3-8b", "--devices", "4,0"), "--devices 0: must be from 1 to 65536"),
        (("--devices", "4,8", "-o", "plan.json"), "-o, --top, --refused and --exhaustive are for one plan"),
        (("--price", "2"), "needs its length; add --tokens N"),
        (("--tokens", "-1"), "cost.tokens: -1.0"),
        (("--tokens", "nan"), "cost.tokens"),
        (("--frontier", "time"), "memory"),
    ],
)
def test_a_wrong_option_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], says: str
) -> None:
    assert main(["plan", write_job(tmp_path), *options]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.strip().splitlines()) == 1
