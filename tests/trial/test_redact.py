"""Secrets are not written down."""

import subprocess

import pytest

from quartet_plugin.trial.redact import is_secret, recorded_environment, redacted_argv, shell_words


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


def test_a_shell_line_takes_secrets_from_variables() -> None:
    words = ["env", "HF_TOKEN=abc", "x.py", "--api-key", "de f", "--auth=gh'i", "--lr", "$1", "it's"]
    line = shell_words(words)
    assert not any(secret in line for secret in ("abc", "de f", "gh'i"))
    secrets = {"HF_TOKEN": "abc", "API_KEY": "de f", "AUTH": "gh'i"}
    done = subprocess.run(
        ["sh", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True, env=secrets
    )
    assert done.stdout.decode().split("\0")[:-1] == words
    unset = subprocess.run(["sh", "-c", line], capture_output=True, check=False, env={"HF_TOKEN": "abc"})
    assert unset.returncode != 0
    assert b"API_KEY" in unset.stderr


def test_environment() -> None:
    recorded = recorded_environment(
        {"NCCL_DEBUG": "x", "HOME": "/h", "SLURM_JWT_TOKEN": "t", "CUDA_VISIBLE_DEVICES": "0", "EDITOR": "vi"}
    )
    assert recorded == {"CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "x", "SLURM_JWT_TOKEN": "<redacted>"}
