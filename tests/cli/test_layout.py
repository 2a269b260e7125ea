"""`quartet layout`."""

import json
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli.main import main

CONFIGS = Path(__file__).parents[1] / "model" / "configs"


def layout_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["layout", *words, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_the_best_split_is_faster_than_the_even_one_and_counts_every_layer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = layout_json(capsys, "--model", "llama3-8b", "--pp", "4", "--vpp", "2", "--tp", "2")
    best, even = found["best"], found["even"]
    assert best["iteration_s"] < even["iteration_s"]
    assert even["layers_per_stage"] == [4] * 8
    assert sum(best["layers_per_stage"]) == 32
    # A vocabulary of 128,256 makes the head as much work as several layers.
    assert best["layers_per_stage"][-1] < 4
    stages = best["layout"].removeprefix("E").removesuffix("L").split("|")
    assert stages == ["t" * count for count in best["layers_per_stage"]]


def test_the_search_ends_where_no_move_of_one_layer_is_better() -> None:
    from quartet_plugin.cost.constants import fitted
    from quartet_plugin.cost.predict import predict
    from quartet_plugin.model.layout import Layout
    from quartet_plugin.planner.job import parse_job
    from quartet_plugin.planner.stage_layouts import best_and_even

    request = parse_job(
        {
            "model": "gpt3-6.7b",
            "cluster": {"device": "H100", "num_nodes": 1, "devices_per_node": 8},
            "batch": {"global_batch_size": 16},
        },
        where="job",
    )
    layout = Layout(
        tensor_parallel=2,
        pipeline_parallel=4,
        data_parallel=1,
        virtual_stages=1,
        context_parallel=1,
        expert_parallel=1,
        micro_batch_size=1,
        sequence_parallel=True,
        distributed_optimizer=True,
        recompute="none",
    )
    best, even = best_and_even(request, layout, constants=fitted())
    assert best.fits
    assert best.iteration_s <= even.iteration_s
    split = best.split.transformer_layers_per_stage
    for giver in range(4):
        for taker in range(4):
            moved = list(split)
            moved[giver] -= 1
            moved[taker] += 1
            seconds = predict(request.run(request.shape, layout, tuple(moved)), fitted()).iter_time_s
            assert seconds >= best.iteration_s


def test_a_config_file_is_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pp", "2", "--tp", "8", "--microbatches", "4"]
    by_file = layout_json(capsys, "--model", str(CONFIGS / "llama" / "config.json"), *words)
    by_name = layout_json(capsys, "--model", "llama3-8b", *words)
    assert by_file == by_name


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--pp 8 --vpp 8", 3, "the nearest that fits is --pp 8 --vpp 4"),
        ("--pp 64", 3, "the nearest that fits is --pp 32 --vpp 1"),
        ("--pp 1 --vpp 2", 2, "--vpp 2"),
        ("--pp 4 --vpp 2 --microbatches 6", 2, "a multiple of it"),
        ("--pp 0", 2, "--pp 0"),
        ("--pp 2 --dp 4 --ep 3", 2, "--ep 3"),
        ("--pp 2 --tp 3", 3, "--tp 3: heads: TP 3 does not divide 32 heads; nearest: 2 or 4"),
        ("--pp 2 --dp 4 --ep 2", 3, "--ep 2: the model has no experts; nearest: 1"),
        ("--pp 2 --device H9000", 2, "H9000"),
        ("--pp 2 --profile p.json", 2, "--cluster"),
        ("--pp 2 --cluster c.json", 2, "--profile"),
    ],
)
def test_refusals(words: str, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "--model", "llama3-8b", *words.split()]) == code
    assert said in capsys.readouterr().err


def test_a_layout_of_many_layers_is_not_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is for copying."""
    model = json.loads((CONFIGS / "llama" / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**model, "num_hidden_layers": 1200}))
    assert main(["layout", "--model", str(path), "--pp", "4"]) == 0
    shown = capsys.readouterr().out
    assert "characters" not in shown
    assert any(line.count("t") >= 1200 for line in shown.splitlines() if "E" in line)
