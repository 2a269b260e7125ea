"""What does not fit is refused in one line with code 2, on every rank, and nothing hangs."""

import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deepspeed.accelerator import get_accelerator

from quartet_plugin.model.plan import write_plan
from tests.deepspeed.support import (
    ROOT,
    TIMEOUT_S,
    TORCHRUN,
    environment,
    layout,
    plan,
    run_ranks,
    schedule,
    schedule_file,
    shape,
    text_in,
)


def launch(
    tmp_path: Path, config: dict[str, Any], *, words: tuple[str, ...] = (), launcher: str = "torchrun"
) -> tuple[int, str, dict[str, Any]]:
    """Run the example under the entry on two processes: exit code, output and the ranks' records."""
    file, errors = tmp_path / "ds.json", tmp_path / "errors"
    errors.mkdir(exist_ok=True)
    file.write_text(json.dumps({**BASE, **config}), encoding="utf-8")
    script = [str(ROOT / "examples" / "pretrain_deepspeed.py"), "--data-path", str(text_in(tmp_path))]
    script += ["--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "16"]
    script += ["--vocab-size", "260", "--train-iters", "3", "--log-interval", "1", "--pipeline-stages", "2"]
    script += ["--deepspeed_config", str(file), *words]
    if launcher == "torchrun":
        own = ["--nproc-per-node=2", "--rdzv-endpoint=localhost:0", "-m", "quartet_plugin.deepspeed"]
        log = tmp_path / f"log-{len(list(tmp_path.iterdir()))}"
        code, said = run_ranks([*own, *script], log=log, QUARTET_ERRORS=str(errors))
    else:
        program = str(Path(TORCHRUN[0]).with_name("deepspeed"))
        run = subprocess.run(
            [program, "--num_gpus", "2", "--module", "quartet_plugin.deepspeed", *script],
            env={**environment(), "QUARTET_ERRORS": str(errors)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        code, said = run.returncode, run.stdout
    found = {path.name: json.loads(path.read_text()) for path in errors.glob("rank-*.err.json")}
    return code, said, found


BASE: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 10**9,
}


def refused(code: int, said: str, found: dict[str, Any], *words: str) -> None:
    assert code != 0
    lines = [line for line in said.splitlines() if line.startswith("quartet: ")]
    assert len(lines) == 1, said[-3000:]
    for word in words:
        assert word in lines[0]
    assert "quartet_plugin/" not in said, "no frame of ours: torchrun alone shows a traceback, its own"
    # torchrun ends a rank that is still importing as soon as the other one has refused.
    assert found
    assert set(found) <= {"rank-0.err.json", "rank-1.err.json"}
    assert {err["exit_code"] for err in found.values()} == {2}
    assert {err["kind"] for err in found.values()} == {"plan"}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"plan": "p.json", "speed": 3}, ("speed", "unknown key")),
        ({"plan": "auto"}, ("'auto'", "quartet tune")),
        ({"plan": "missing.json"}, ("missing.json",)),
    ],
)
def test_a_wrong_section(tmp_path: Path, section: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(*launch(tmp_path, {"quartet": section}), *words)


def test_a_plan_for_another_world_size(tmp_path: Path) -> None:
    own = layout(4, world=4)
    write_plan(plan((1, 1, 1, 1), planned=own, own=own, batch=8), path=tmp_path / "plan.json")
    started = time.monotonic()
    section = {"quartet": {"plan": str(tmp_path / "plan.json")}}
    refused(*launch(tmp_path, section), "world_size 2 (plan: 4)", "made for another job")
    assert time.monotonic() - started < TIMEOUT_S


def test_a_plan_that_would_clip_otherwise(tmp_path: Path) -> None:
    """In fp32 with ZeRO 0 the first stage's layers decide about clipping: another split trains otherwise."""
    own = layout(2, world=2)
    small = replace(shape(4), vocab_size=260)
    made = plan((3, 1), planned=own, own=own, batch=8)
    made = replace(made, shape=small, made_for=replace(made.made_for, shape=small))
    write_plan(made, path=tmp_path / "plan.json")
    section = {"quartet": {"plan": str(tmp_path / "plan.json")}}
    without_zero = launch(tmp_path, {**section, "zero_optimization": {"stage": 0}})
    refused(*without_zero, "gradient_clipping", "first stage's norm")
    refused(*launch(tmp_path, section), "zero_optimization.stage 1 (plan: 0)")


def test_fewer_layers_than_stages(tmp_path: Path) -> None:
    made = schedule("zb-v", 2, 4, (1, 1, 1, 1))
    section = {"quartet": {"schedule": schedule_file(tmp_path, made)}}
    refused(*launch(tmp_path, section, words=("--num-layers", "1")), "4 stages", "3 layers", "fewer stages")


def test_a_split_of_another_model(tmp_path: Path) -> None:
    made = schedule("zb-v", 2, 4, (2, 2, 2, 2))
    refused(*launch(tmp_path, {"quartet": {"schedule": schedule_file(tmp_path, made)}}), "split", "4 layers")


def test_a_type_that_the_device_does_not_compute_in(tmp_path: Path) -> None:
    made = schedule("gpipe", 2, 4, (3, 3))
    section = {"quartet": {"schedule": schedule_file(tmp_path, made)}, "fp16": {"enabled": True}}
    code, said, found = launch(tmp_path, section)
    if get_accelerator().is_fp16_supported():
        assert code == 0, said[-3000:]
    else:
        refused(code, said, found, "fp16.enabled", "use bf16")


def test_zero_2_with_a_pipeline(tmp_path: Path) -> None:
    made = schedule("gpipe", 2, 4, (3, 3))
    section = {"quartet": {"schedule": schedule_file(tmp_path, made)}, "zero_optimization": {"stage": 2}}
    refused(*launch(tmp_path, section), "zero_optimization.stage: 2", "supports 0 or 1")


@pytest.mark.nightly
def test_an_unedited_script_trains_under_both_launchers(tmp_path: Path) -> None:
    """And the clipping of stock DeepSpeed that depends on the first stage alone is named."""
    made = schedule("zb-h1", 2, 4, (3, 3))
    config = {"quartet": {"schedule": schedule_file(tmp_path, made)}}
    losses = []
    for launcher in ("torchrun", "deepspeed"):
        code, said, found = launch(tmp_path, config, launcher=launcher)
        assert code == 0, said[-3000:]
        assert found == {}
        losses.append([line for line in said.splitlines() if line.startswith("iteration")])
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
    _, said, _ = launch(tmp_path, {"zero_optimization": {"stage": 0}})
    assert "clips all stages by the first stage's gradient norm alone" in said
