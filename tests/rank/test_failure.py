"""The record of a rank's failure holds no secret."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.model.schema import dump
from quartet_plugin.rank.failure import describe_failure, is_device_failure, kind_of
from quartet_plugin.rank.failure_texts import wanted_bytes_of
from quartet_plugin.rank.rendezvous import RankEnv
from quartet_plugin.rank.session import write_command_failure

# Messages as the libraries print them, and the kind of failure each of them means after the first step.
MESSAGES = json.loads(Path(__file__).with_name("failure_messages.json").read_text())


@pytest.mark.parametrize("row", MESSAGES, ids=lambda row: f"{row['source']}: {row['message'][-40:]}")
def test_a_librarys_message_has_its_kind(row: dict[str, Any]) -> None:
    base = OSError if row["type"] == "OSError" else RuntimeError
    error = type(row["type"], (base,), {})(row["message"])
    assert kind_of(error, num_steps=3) == row["kind"]
    assert wanted_bytes_of(row["message"]) == row["wanted_bytes"]


@pytest.mark.parametrize("row", MESSAGES, ids=lambda row: f"{row['source']}: {row['message'][-40:]}")
def test_a_device_fails_without_memory_and_never_by_a_peer(row: dict[str, Any]) -> None:
    error = type(row["type"], (RuntimeError,), {})(row["message"])
    if row["kind"] in ("out-of-memory", "network"):
        assert is_device_failure(error) is (row["kind"] == "out-of-memory")
    else:
        assert is_device_failure(error) is row["message"].startswith(("CUDA error", "HIP error"))


def test_torchs_class_of_device_errors_is_known_by_its_name() -> None:
    accelerator = type("AcceleratorError", (RuntimeError,), {})
    assert is_device_failure(accelerator("unspecified launch failure"))
    assert not is_device_failure(RuntimeError("unspecified launch failure"))


def failed(text: str) -> Exception:
    """An exception that was raised."""
    try:
        raise RuntimeError(text)
    except RuntimeError as error:
        return error


def test_a_message_with_a_token_is_masked_before_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "swordfish-and-more")
    monkeypatch.setattr(sys, "argv", ["x.py", "--my-api-key", "flag-secret", "--db", "s3://u:url-secret@h"])
    error = failed("x" * 3_990 + "swordfish-and-more")
    described = describe_failure(error, num_steps=1, peak_bytes=0)
    assert described.message.endswith("x***")
    words = json.dumps(dump(describe_failure(failed("flag-secret url-secret a"), num_steps=1, peak_bytes=0)))
    assert "*** *** a" in words
    assert "flag-secret" not in words
    assert "url-secret" not in words
    assert "swordfish" not in json.dumps(dump(described))


def test_so_is_what_a_training_outside_of_a_trial_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "swordfish")
    monkeypatch.setenv("QUARTET_ERRORS", str(tmp_path))
    write_command_failure(failed("denied: swordfish"), rank_env=RankEnv.of({}))
    text = (tmp_path / "rank-0.err.json").read_text()
    assert "denied: ***" in text
    assert "swordfish" not in text
