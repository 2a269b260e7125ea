"""HuggingFace's config.json as a model section; the files are written by hand from published sizes."""

import json
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.cost.predict import predict_rows
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.huggingface import model_section
from quartet_plugin.planner.job import PlanRequest, parse_job

CONFIGS = Path(__file__).parent / "configs"
CLUSTER = {"device": "H100", "num_nodes": 4, "devices_per_node": 8}
# Each family's file, and the preset of the same model with what the preset does not follow.
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama3-8b", {}),
    "qwen3": ("qwen3-8b", {"seq_length": 4096}),
    "qwen3-moe": ("qwen3-30b-a3b", {}),
    "mixtral": ("mixtral-8x7b", {"seq_length": 4096}),
    "deepseek-v3": ("deepseek-v3", {}),
    "nemotron": ("nemotron4-15b", {}),
}


def request_for(model: Any) -> PlanRequest:
    job = {"model": model, "cluster": CLUSTER, "batch": {"global_batch_size": 64}}
    return parse_job(job, where="job", folder=CONFIGS)


@pytest.mark.parametrize("name", sorted(TWINS))
def test_a_file_is_the_preset_of_its_model(name: str) -> None:
    preset, differing = TWINS[name]
    positions = {"max_position_embeddings": 4096}
    by_file = request_for({"hf": name, **differing, **positions})
    by_name = request_for({"name": preset, **positions})
    assert (by_file.shape, by_file.experts, by_file.latent) == (
        by_name.shape,
        by_name.experts,
        by_name.latent,
    )


def test_every_written_file_is_read() -> None:
    names = {path.name for path in CONFIGS.iterdir()}
    assert names == set(TWINS) | {"mistral", "gpt-oss"}
    assert request_for({"hf": "mistral/config.json"}).shape.seq_length == 8192
    oss = request_for({"hf": "gpt-oss"})
    assert oss.experts is not None
    assert (oss.experts.num_experts, oss.experts.experts_per_token) == (128, 4)
    assert (oss.shape.kv_channels, oss.shape.hidden_size, oss.shape.seq_length) == (64, 2880, 4096)


def changed(tmp_path: Path, name: str, **changes: Any) -> Path:
    content = json.loads((CONFIGS / name / "config.json").read_text(encoding="utf-8"))
    content.update(changes)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({key: value for key, value in content.items() if value != "absent"}), encoding="utf-8"
    )
    return path


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama", "model_type", "nemotron_h"),
        ("llama", "model_type", "absent"),
        ("llama", "model_type", ["llama"]),
        ("llama", "num_hidden_layers", "absent"),
        ("llama", "num_hidden_layers", 0),
        ("llama", "hidden_size", 4096.0),
        ("llama", "vocab_size", True),
        ("llama", "hidden_act", "relu2"),
        ("llama", "tie_word_embeddings", "yes"),
        ("nemotron", "hidden_act", "silu"),
        ("qwen3-moe", "decoder_sparse_step", 2),
        ("qwen3-moe", "mlp_only_layers", [3]),
        ("mixtral", "num_experts_per_tok", 9),
        ("deepseek-v3", "moe_layer_freq", 2),
        ("deepseek-v3", "q_lora_rank", None),
    ],
)
def test_what_no_section_holds_is_refused_by_its_field(
    tmp_path: Path, name: str, field: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(tmp_path, name, **{field: value})
    with pytest.raises(ConfigError, match=rf"config\.json: {field}: "):
        model_section(path)
    words = ["plan", "--model", str(path), "--cluster", "H100", "--devices", "8", "--global-batch", "64"]
    assert main(words) == 2
    assert f"{field}: " in capsys.readouterr().err


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        model_section(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match="must be a JSON object"):
        model_section(tmp_path)


def test_rows_take_a_shape_from_a_file() -> None:
    row = {"id": "a", "gpu": "H100", "gpus": 64, "gbs": 128, "tp": 2, "pp": 4, "seq_len": 4096}
    sizes = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "gated_ffn": True}
    by_file, by_sizes = predict_rows(
        [{**row, "hf": "llama"}, {**row, **sizes, "vocab": 128256}], where="rows", folder=CONFIGS
    )
    assert by_file["iter_time_s"] == by_sizes["iter_time_s"]
    assert by_file["peak_memory_bytes"] == by_sizes["peak_memory_bytes"]
    assumed, refused = predict_rows(
        [{"gpu": "H100", "gpus": 64, "gbs": 128, "hf": "deepseek-v3", "ep": 64}, {"hf": 3}],
        where="rows",
        folder=CONFIGS,
    )
    assert assumed["assumed"]["seq_len"] == 4096
    assert "latent_attention" not in assumed["assumed"]
    assert "hf" in refused["error"]


def test_a_rows_columns_of_experts_go_before_the_files() -> None:
    row = {"gpu": "H100", "gpus": 64, "gbs": 128, "hf": "deepseek-v3", "ep": 64, "seq_len": 4096}
    by_file, wider, all_routed = predict_rows(
        [row, {**row, "shared_ffn": 8192}, {**row, "dense_layers": 0}], where="rows", folder=CONFIGS
    )
    assert wider["iter_time_s"] > 1.01 * by_file["iter_time_s"]
    assert all_routed["iter_time_s"] != by_file["iter_time_s"]
