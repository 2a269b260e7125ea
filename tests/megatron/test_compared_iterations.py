"""A trial whose first iterations are compared trains as the command does, also while it keeps its weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.trial.compared_start import kept_by
from tests.megatron.entry_launch import MEGATRON_FLAGS, Launch, launch, write_trial

# The parameters lie in shards and are gathered during the forward pass: saving comes between two steps.
FLAGS = [
    *MEGATRON_FLAGS,
    *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
]
WITHOUT_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]


def train(folder: Path, *flags: str, **more: Any) -> Launch:
    """Six iterations of the user's command as a trial; `more` is written into its trial.json."""
    trial = write_trial(folder, warmup=3, measure=3)
    trial.write_text(json.dumps({**json.loads(trial.read_text()), **more}))
    of_trial = ["--quartet-trial", str(trial), "--quartet-device", "cpu"]
    done = launch(2, [*FLAGS, *flags, *of_trial], folder=folder)
    assert done.code == 0, done.output[-3000:]
    return done


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compared_iterations_change_nothing_of_a_trial(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", *WITHOUT_DROPOUT)
    weights = tmp_path / "weights"
    kept = train(tmp_path / "kept", *WITHOUT_DROPOUT, save_weights=str(weights), num_compared=3)
    assert kept.losses() == plain.losses()
    assert kept.grad_norms() == plain.grad_norms()
    assert kept_by(weights) == json.loads((tmp_path / "kept" / "trial.json").read_text())["attempt_id"]
    # From those weights, and with dropout: only the compared iterations are without it.
    random = train(tmp_path / "random", weights=str(weights), num_compared=3)
    assert random.losses()[:3] == plain.losses()[:3]
    assert random.grad_norms()[:3] == plain.grad_norms()[:3]
    differences = [abs(a - b) for a, b in zip(random.losses()[3:], plain.losses()[3:], strict=True)]
    assert min(differences) > 1e-4
    for rank in (0, 1):
        sheet = json.loads((tmp_path / "random" / f"rank-{rank}.parity.json").read_text())
        assert (len(sheet["steps"]), sheet["settings"]) == (3, ["attention_dropout", "hidden_dropout", "p"])
        assert sheet["weights_s"] > 0
    assert not list((tmp_path / "plain").glob("*.parity.json"))
