"""Secrets are not written down."""

import pytest

from quartet_plugin.trial.redact import is_secret, recorded_environment, redacted_argv


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "HF_TOKEN", "--hub-token", "DB_PASSWORD", "AWS_SECRET", "key"]
)
def test_secret_names(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["--tokenizer-model", "--kv-channels", "KEYBOARD", "--num-layers", "PATH"])
def test_other_names(name: str) -> None:
    assert not is_secret(name)


def test_argv() -> None:
    words = [
        "env",
        "HF_TOKEN=abc",
        "torchrun",
        "a.py",
        "--api-key",
        "abc",
        "--auth=abc",
        "--lr",
        "1",
        "--token",
        "--x",
    ]
    assert redacted_argv(words) == [
        "env",
        "HF_TOKEN=<redacted>",
        "torchrun",
        "a.py",
        "--api-key",
        "<redacted>",
        "--auth=<redacted>",
        "--lr",
        "1",
        "--token",
        "--x",
    ]


def test_environment() -> None:
    recorded = recorded_environment(
        {"NCCL_DEBUG": "x", "HOME": "/h", "SLURM_JWT_TOKEN": "t", "CUDA_VISIBLE_DEVICES": "0", "EDITOR": "vi"}
    )
    assert recorded == {"CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "x", "SLURM_JWT_TOKEN": "<redacted>"}
