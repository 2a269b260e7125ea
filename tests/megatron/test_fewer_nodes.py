"""The command of a trial on fewer nodes: a part of the replicas, or of one replica's stages."""

import json
import shlex
from pathlib import Path

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.megatron.fewer_nodes import on_fewer_nodes
from quartet_plugin.model.training_job import parse_training_job
from tests.megatron.entry_launch import GLOBAL_BATCH_SIZE, MEGATRON_FLAGS, launch, write_trial
from tests.megatron.native import native_flags

FLAGS = native_flags()
DEEP = shlex.split(
    "--num-layers 16 --pipeline-model-parallel-size 8 --tensor-model-parallel-size 2 --micro-batch-size 2 "
    "--global-batch-size 64"
)


def test_a_trial_with_fewer_replicas_has_a_part_of_the_batch() -> None:
    words = ["--micro-batch-size", "2", "--global-batch-size=64", "--seq-length", "8"]
    smaller = on_fewer_nodes(FLAGS, words, divisor=8, num_processes=2)
    assert smaller.stage_divisor == 1
    assert FLAGS.values(smaller.words).global_batch_size == 8
    assert "--global-batch-size=64" not in smaller.words
    # Megatron's own batch without the flag is a microbatch a replica.
    assert on_fewer_nodes(FLAGS, words[:2], divisor=8, num_processes=2).words == words[:2]
    with pytest.raises(ConfigError, match="--global-batch-size 64: must be a multiple of 3"):
        on_fewer_nodes(FLAGS, words, divisor=3, num_processes=2)
    growing = [*words, "--rampup-batch-size", "8", "8", "1000"]
    with pytest.raises(ConfigError, match="--rampup-batch-size: the batch grows during training"):
        on_fewer_nodes(FLAGS, growing, divisor=2, num_processes=2)


@pytest.mark.parametrize(("num_processes", "divisor"), [(16, 4), (8, 8), (4, 16), (2, 32)])
def test_of_a_replica_that_is_larger_a_trial_has_a_part_of_the_stages(
    num_processes: int, divisor: int
) -> None:
    """Of 64 processes with 4 replicas: each trial has 2 layers a stage and 8 microbatches a replica."""
    smaller = on_fewer_nodes(FLAGS, DEEP, divisor=divisor, num_processes=num_processes)
    values = FLAGS.values(smaller.words)
    assert smaller.stage_divisor == 16 // num_processes
    assert values.pipeline_model_parallel_size * values.tensor_model_parallel_size == num_processes
    assert values.num_layers == 2 * values.pipeline_model_parallel_size
    assert values.global_batch_size == 64 // 4


@pytest.mark.parametrize(
    ("more", "num_processes", "divisor", "fault"),
    [
        ([], 3, 64, r"multiple of those of a stage \(2\)"),
        ([], 12, 64, "divide the replica"),
        ([], 4, 6, r"the nodes \(6\) must be a multiple of 4"),
        (["--num-layers", "18"], 4, 16, r"--num-layers \(18\) must be a multiple of 4"),
        (["--num-experts", "8"], 4, 16, "--num-experts: .* not all equal; raise trial.nodes"),
        (["--decoder-first-pipeline-num-layers", "1"], 4, 16, "--decoder-first-pipeline-num-layers: "),
        (["--cp-comm-type", *["p2p", "a2a"] * 8], 4, 16, "--cp-comm-type: .* not all equal"),
        (["--no-rope-freq", "([0]*3+[1]*1)*4"], 4, 16, "--no-rope-freq: .* not all equal"),
        (["--num-virtual-stages-per-pipeline-rank", "2"], 2, 32, "one pipeline rank, which has no virtual"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_a_fix(
    more: list[str], num_processes: int, divisor: int, fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        on_fewer_nodes(FLAGS, [*DEEP, *more], divisor=divisor, num_processes=num_processes)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_train_a_part_of_a_pipeline_of_six(tmp_path: Path) -> None:
    trial = write_trial(tmp_path, warmup=1, measure=2)
    trial.write_text(json.dumps({**json.loads(trial.read_text()), "batch_divisor": 6}))
    flags = [*MEGATRON_FLAGS, "--pipeline-model-parallel-size", "6", "--micro-batch-size", "1"]
    done = launch(2, [*flags, "--quartet-trial", str(trial), "--quartet-device", "cpu"], folder=tmp_path)
    assert done.code == 0, done.output[-3000:]
    job = parse_training_job(done.ranks[0]["job"])
    assert job.stage_divisor == 3
    assert "fewer_stages" in job.features
    assert (job.layout.pipeline_parallel, job.shape.num_layers) == (2, 2)
    assert job.global_batch_size == GLOBAL_BATCH_SIZE // 2
