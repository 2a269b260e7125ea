"""A DeepSpeed command as a trial: the same files, outcomes and plans as for Megatron."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.plan import Mapping, Split
from quartet_plugin.search.job import baseline_plan, nodes_of
from quartet_plugin.trial.files import RankFiles, parse_job
from quartet_plugin.trial.request import Outcome, TrialRequest
from quartet_plugin.trial.runner import run_trial
from tests.deepspeed.support import ROOT

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "csv_monitor": {"enabled": True, "output_path": "csv"},
    "quartet": {"plan": "auto"},
}


STARTERS = ["deepspeed --num_gpus 2", f"{sys.executable} -m torch.distributed.run --nproc-per-node 2"]


@pytest.mark.parametrize("starter", STARTERS, ids=["deepspeed", "torchrun"])
def test_the_baseline_and_a_plan(tmp_path: Path, starter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples" / "prepare_data.py"),
            str(tmp_path / "text"),
            "--max-mb",
            "0.2",
        ],
        check=True,
        capture_output=True,
    )
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    script = (
        f"{ROOT}/examples/pretrain_deepspeed.py --data-path {tmp_path}/text --num-layers 4 --hidden-size 32"
    )
    sizes = "--num-attention-heads 2 --seq-length 16 --vocab-size 260 --pipeline-stages 2 --save saved"
    words = f"{starter} {script} {sizes} --deepspeed_config ds.json".split()
    request = TrialRequest(
        folder=tmp_path / "trials" / "0",
        command=parse_command(words),
        warmup=1,
        measure=3,
        device="cpu",
        deadline_s=200,
        cwd=tmp_path,
    )
    result = run_trial(request)
    assert result.outcome in (Outcome.OK, Outcome.UNSTABLE), (result.reason, result.last_lines)
    assert len(result.iteration_s) == len(result.loss) == len(result.grad_norm) == 3
    assert result.job is not None
    job = parse_job(result.job)
    assert job.framework == "deepspeed"
    assert (job.layout.pipeline_parallel, job.layout.distributed_optimizer) == (2, True)
    shape = job.shape
    assert (shape.num_layers, shape.hidden_size, shape.seq_length, shape.vocab_size) == (4, 32, 16, 260)
    assert "csv_monitor" in job.neutralised
    assert not (tmp_path / "csv").exists()
    assert not (tmp_path / "saved").exists()
    files = RankFiles(result.folder, attempt_id=result.attempt_id).scan()
    nodes = nodes_of(files.reports.values())
    plan = baseline_plan(job, nodes=nodes, run="test", seed=0)
    plan = replace(
        plan,
        split=Split(transformer_layers_per_stage=(3, 1)),
        mapping=Mapping(slots=tuple(reversed(plan.mapping.slots))),
    )
    tried = run_trial(replace(request, folder=tmp_path / "trials" / "1", plan=plan))
    assert tried.outcome in (Outcome.OK, Outcome.UNSTABLE), (tried.reason, tried.last_lines)
    assert tried.loss == pytest.approx(result.loss, rel=1e-3)
