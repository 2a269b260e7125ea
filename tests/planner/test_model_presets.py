"""Models by name."""

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.job_description import model_flops_per_sequence
from quartet_plugin.planner.job import parse_job
from quartet_plugin.planner.model_presets import preset_named, presets
from tests.planner.planning import job_data

# Billions of parameters that work on a token, by the sources of the sizes.
ACTIVE = {
    "mixtral-8x7b": 12.9,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22.0,
    "gpt-oss-120b": 5.1,
    "deepseek-v2": 21.0,
    "deepseek-v3": 37.0,
    "kimi-k2": 32.0,
}


@pytest.mark.parametrize("name", list(presets()))
def test_a_preset_has_the_size_of_its_name(name: str) -> None:
    job = parse_job({**job_data(), "model": name}, where="job")
    stated = ACTIVE.get(name) or float(name.rpartition("-")[2].removesuffix("b"))
    shape = job.shape
    attention = (shape.kv_channels, shape.kv_channels)
    if job.latent is not None:
        attention = (job.latent.qk_head_dim + job.latent.qk_pos_emb_head_dim, job.latent.v_head_dim)
    scores = 3 * shape.num_layers * shape.seq_length**2 * shape.num_attention_heads * sum(attention)
    flops = model_flops_per_sequence(shape, experts=job.experts, latent_attention=job.latent)
    # The head counts as parameters, the table of an embedding that is not tied does not.
    active = (flops - scores) / (6 * shape.seq_length)
    table = 0 if shape.tied_embeddings else shape.embedding_parameters
    assert 0.93 * stated < (active + table) / 1e9 < 1.07 * stated + 0.3
    assert presets()[name]["source"]


@pytest.mark.parametrize("name", ["llama3-8b", "Llama-3-8B", "LLAMA3_8B"])
def test_a_name_is_read_however_it_is_spelled(name: str) -> None:
    assert preset_named(name)["hidden_size"] == 4096


@pytest.mark.parametrize(("name", "says"), [("lama3-8b", "llama3-8b"), ("gpt3-175", "gpt3-175b")])
def test_an_unknown_name_is_answered_with_the_nearest(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean .*{says}"):
        parse_job({**job_data(), "model": name}, where="job")
    with pytest.raises(ConfigError, match="known are gpt3"):
        preset_named("zzzz")


def test_values_beside_a_name_replace_the_presets() -> None:
    model = {"name": "llama3-8b", "seq_length": 4096, "precision": "fp8"}
    job = parse_job({**job_data(cluster={"device": "H100"}), "model": model}, where="job")
    assert (job.shape.seq_length, job.shape.num_layers, job.precision) == (4096, 32, "fp8")
    with pytest.raises(ConfigError, match="did you mean seq_length"):
        parse_job({**job_data(), "model": {"name": "llama3-8b", "seq_lenght": 1}}, where="job")


def test_a_model_and_a_device_by_name_are_a_whole_job(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--cluster", "H100", "--global-batch", "128", "--devices", "16"]
    assert main(["plan", "--model", "llama3-8b", *job]) == 0
    assert "MFU" in capsys.readouterr().out
    assert main(["plan", "--model", "llama3", *job]) == 2
    assert "did you mean llama" in capsys.readouterr().err
    assert main(["plan", "--model", "llama3-8b", "--cluster", "H100", "--global-batch", "128"]) == 2
    assert "add --devices N" in capsys.readouterr().err
