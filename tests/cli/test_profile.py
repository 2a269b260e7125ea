"""`quartet profile` on real Megatron, and `quartet calibrate` with what it left."""

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.calibration.constants_fit import read_calibration, seconds_of
from quartet_plugin.calibration.observations import Direction, Quantity
from quartet_plugin.calibration.profile import Profile
from quartet_plugin.cli.calibrate import of_profile
from quartet_plugin.cli.main import main
from quartet_plugin.cli.profile import simulated_rank_of
from quartet_plugin.cost.constants import NEUTRAL
from quartet_plugin.errors import UsageError
from quartet_plugin.model.cluster import parse_cluster, write_cluster
from quartet_plugin.model.schema import read_record
from quartet_plugin.schedule.files import read_costs

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"
MODEL = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --train-iters 1000 --lr 1e-4 "
    "--attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --eval-interval 1000 --micro-batch-size 2"
)
CLUSTER = {
    "nodes": [{"name": "here", "devices": ["a core", "a core"]}],
    "devices": {
        "a core": {
            "peak_flops": {"fp32": 5e10},
            "memory_bytes": 8 * 2**30,
            "memory_bandwidth_bytes_per_s": 1e10,
            "compute_units": 1,
        }
    },
    "links": {"scale_up": {"bandwidth_bytes_per_s": 1e9, "latency_s": 5e-5}, "measured": True},
}


def torchrun(num_processes: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_processes)]


@pytest.mark.slow
def test_two_ranks_are_profiled_and_calibrate_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, costs, calibration = (tmp_path / f"{name}.json" for name in ("profile", "costs", "calibration"))
    words = [
        *torchrun(2), str(SCRIPT), *MODEL, "--global-batch-size", "8", "--pipeline-model-parallel-size", "2",
    ]  # fmt: skip
    options = ["-o", str(profile), "--costs", str(costs), "--iterations", "4", "--device", "cpu"]
    assert main(["profile", *options, "--", *words]) == 0, capsys.readouterr().err

    found = read_record(Profile, profile)
    assert [rank.pipeline_rank for rank in found.ranks] == [0, 1]
    parts = {part.name: part for part in found.parts}
    assert set(parts) == {"embedding", "layer.0", "layer.1", "layer.2", "layer.3", "head"}
    layer = parts["layer.1"]
    assert layer.forward_s is not None
    assert layer.input_grad_s is not None
    assert layer.weight_grad_s is not None
    assert layer.backward_s is not None
    assert min(layer.forward_s, layer.input_grad_s, layer.weight_grad_s) > 0
    assert layer.num_intervals == 4 * 4
    # Scores and inputs of the products alone: 4 heads x 64 x 64 and several times 64 x 64, of 2 sequences.
    assert layer.activation_bytes > 2 * 4 * (4 * 64 * 64 + 6 * 64 * 64)
    table = read_costs(costs)
    names = ["embedding", "layer.0", "layer.1", "layer.2", "layer.3", "head"]
    assert [layer.name for layer in table.layers] == names
    assert table.num_devices == 2
    assert table.num_microbatches == 4

    cluster = tmp_path / "cluster.json"
    write_cluster(parse_cluster(CLUSTER, where="a test"), path=cluster)
    words = ["calibrate", "--cluster", str(cluster), "--profile", str(profile), "-o", str(calibration)]
    assert main(words) == 0, capsys.readouterr().err
    corrected = read_calibration(calibration)
    assert corrected.num_iterations == 1
    assert corrected.num_parts >= 8
    assert {term.name for term in corrected.terms} >= {"gemm_rate", "elementwise", "optimizer"}


@pytest.mark.slow
def test_a_hybrid_model_is_profiled_by_its_letters_and_calibrates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("profile", "calibration", "cluster")
    profile, calibration, cluster = (tmp_path / f"{name}.json" for name in names)
    script = Path(__file__).resolve().parents[1] / "megatron" / "hybrid_pretrain.py"
    sizes = "--mamba-num-heads 8 --mamba-head-dim 16 --mamba-num-groups 2 --mamba-state-dim 16"
    words = [
        *torchrun(2), str(script), *MODEL[2:], *shlex.split(sizes), "--hybrid-layer-pattern", "M*-M",
        "--global-batch-size", "8", "--pipeline-model-parallel-size", "2",
    ]  # fmt: skip
    options = ["-o", str(profile), "--iterations", "4", "--device", "cpu"]
    assert main(["profile", *options, "--", *words]) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    for name in ("attention layer", "mlp layer", "state space layer"):
        assert f"\n{name} " in printed
    assert len(read_record(Profile, profile).parts) == 6

    write_cluster(parse_cluster(CLUSTER, where="a test"), path=cluster)
    words = ["calibrate", "--cluster", str(cluster), "--profile", str(profile), "-o", str(calibration)]
    assert main(words) == 0, capsys.readouterr().err
    terms = {term.name: term for term in read_calibration(calibration).terms}
    assert terms["scan"].learned > 0
    slower = replace(NEUTRAL, scan=2.0)
    measured = of_profile(profile, cluster=cluster)
    of_scan = [each for each in measured if seconds_of(each, slower) > seconds_of(each, NEUTRAL)]
    # The gradients of weights have no scan; no other layer has one.
    assert [(each.quantity, each.direction) for each in of_scan] == [
        (Quantity.LAYER, Direction.FORWARD),
        (Quantity.LAYER, Direction.BACKWARD),
        (Quantity.LAYER, Direction.INPUT_GRAD),
        (Quantity.ITERATION, None),
    ]


def test_a_rank_of_a_large_job_runs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    words = [
        sys.executable, str(SCRIPT), *MODEL, "--global-batch-size", "32", "--num-layers", "8",
        "--pipeline-model-parallel-size", "4", "--tensor-model-parallel-size", "2",
    ]  # fmt: skip
    options = ["-o", str(path), "--iterations", "2", "--device", "cpu", "--stage", "2", "--world-size", "64"]
    assert main(["profile", *options, "--", *words]) == 0, capsys.readouterr().err
    found = read_record(Profile, path)
    assert found.played is not None
    assert (found.played.rank, found.played.world_size) == (32, 64)
    assert {part.name for part in found.parts} == {"layer.4", "layer.5"}
    assert found.ranks[0].rank == 32
    assert found.ranks[0].pipeline_rank == 2
    assert found.ranks[0].peak_memory_bytes > 0
    assert found.job["layout"]["data_parallel"] == 8
    assert len(found.costs["layers"]) == 8
    assert found.iteration_s == ()


def test_a_command_that_fails_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [sys.executable, str(SCRIPT), *MODEL, "--global-batch-size", "7"]
    assert main(["profile", "-o", str(tmp_path / "p.json"), "--device", "cpu", "--", *words]) == 5
    error = capsys.readouterr().err
    assert "not profiled" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "stage", "world", "rank"),
    [
        ("--pipeline-model-parallel-size 8", 3, 64, 24),
        ("--pipeline-model-parallel-size=8 --tensor-model-parallel-size 4", 7, 1024, 896),
        (
            "--pipeline-model-parallel-size 8 --tensor-model-parallel-size 4 --use-tp-pp-dp-mapping",
            7,
            1024,
            28,
        ),
        ("", 0, 16, 0),
    ],
)
def test_the_rank_that_stands_for_a_stage(flags: str, stage: int, world: int, rank: int) -> None:
    simulated = simulated_rank_of(["python", "x.py", *flags.split()], stage=stage, world_size=world)
    assert simulated is not None
    assert simulated.rank == rank


@pytest.mark.parametrize(
    ("flags", "stage", "world", "rule"),
    [
        ("--pipeline-model-parallel-size 4", 4, 16, "--stage 4"),
        ("--pipeline-model-parallel-size 4", 1, 18, "--world-size 18"),
        ("--pipeline-model-parallel-size many", 0, 16, "many"),
        ("", 0, None, "both"),
        ("", None, 4, "both"),
    ],
)
def test_stages_that_are_not_there_are_refused(
    flags: str, stage: int | None, world: int | None, rule: str
) -> None:
    with pytest.raises(UsageError, match=rule):
        simulated_rank_of(["python", "x.py", *flags.split()], stage=stage, world_size=world)


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["profile", "--iterations", "1", "--", "python", "x.py"], "--iterations 1"),
        (["profile", "--device", "tpu", "--", "python", "x.py"], "--device tpu"),
        (["profile"], "the training command is missing"),
        (["profile", "--", sys.executable, "no_such_script.py"], "no_such_script.py"),
        (["profile", "--stage", "0", "--world-size", "2", "--", *torchrun(2), str(SCRIPT)], "2 processes"),
        (["calibrate", "--cluster", "c.json"], "nothing measured"),
        (["calibrate", "--cluster", "c.json", "no_such_run"], "no measured trial"),
        (["calibrate", "--cluster", "c.json", "--profile", "no_such.json"], "no_such.json"),
    ],
)
def test_wrong_words_are_refused(
    words: list[str],
    rule: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert rule in error
    assert error.count("\n") == 1


def test_a_profile_with_faults_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"schema_version": 1, "job": {}}))
    assert main(["calibrate", "--cluster", "c.json", "--profile", str(path)]) == 2
    assert "profile.json" in capsys.readouterr().err
