"""`quartet plan` of a hybrid model's command: Megatron accepts its plans, and one trains."""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet_plugin.cli.export import flags_of, lines
from quartet_plugin.cli.main import main
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.launchers.hybrid_words import PATTERN
from quartet_plugin.launchers.megatron_words import read_arguments
from quartet_plugin.megatron.apply import check_fit, rewrite
from quartet_plugin.megatron.describe import describe_job
from quartet_plugin.model.megatron_arguments import split_of
from quartet_plugin.model.plan import Plan, read_plan
from quartet_plugin.model.training_job import parse_training_job
from quartet_plugin.planner.command_job import job_of_command
from quartet_plugin.space.expert_stages import fault_of_plan
from tests.megatron.native import native_flags
from tests.megatron.test_hybrid_kinds import LAYERS
from tests.megatron.test_hybrid_models import FLAGS, SCRIPT
from tests.megatron.test_plan_then_train import CLUSTER
from tests.megatron.test_production_commands import ProductionCommand, hopper, validated

SIZES = shlex.split(
    "--hidden-size 1024 --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096 "
    "--vocab-size 32768 --position-embedding-type none --untie-embeddings-and-output-weights --bf16 "
    "--micro-batch-size 1 --global-batch-size 32 --lr 1e-4 --train-iters 100 --mock-data --eval-iters 1 "
    "--tokenizer-type NullTokenizer"
)
EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --disable-bias-linear "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01"
)
LATENT = "--q-lora-rank 96 --kv-lora-rank 48 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64"
STATE_SPACE_FLAGS = "--mamba-num-heads 16 --mamba-head-dim 32 --mamba-num-groups 4 --mamba-state-dim 64"
COMMANDS = {
    "state spaces": f"{PATTERN} M-M*M-M*M-M* {STATE_SPACE_FLAGS}",
    "stages in the pattern": f"{PATTERN} M-M|*M-|M*M|-M* --pipeline-model-parallel-size 2 "
    f"{STATE_SPACE_FLAGS}",
    "experts with logged losses": f"{PATTERN} MEM*EMEM*-*- {EXPERTS}",
    "a first letter that looks like a flag": f"{PATTERN}=-*-*-*-*",
    "latent attention": f"{PATTERN} M+-M+-M+- {LATENT}",
    "multi-token prediction": f"{PATTERN} M-M*M-M*/*-/*-",
    "an older flag": "--hybrid-override-pattern M-M*M-M* --pipeline-model-parallel-size 2",
}


def start(more: str) -> list[str]:
    return [*shlex.split("torchrun --nproc-per-node 8 pretrain.py"), *SIZES, *shlex.split(more)]


def plan_files(more: str, folder: Path, *options: str) -> list[Plan]:
    """The plans that the command writes."""
    search = ["--cluster", "H100", "-o", str(folder / "plan.json"), "--top", "5", *options]
    assert main(["plan", *search, "--", *start(more)]) == 0
    return [read_plan(path) for path in sorted(folder.glob("plan*.json"))]


@pytest.mark.parametrize("name", COMMANDS)
def test_megatron_accepts_the_plans_of_a_hybrid_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("search: {pipeline_parallel: [2, 4]}\n")
    words, flags = start(COMMANDS[name])[4:], native_flags()
    plans = plan_files(COMMANDS[name], tmp_path, str(job))
    assert len(plans) == 5
    user = flags.values(words)
    with hopper(ProductionCommand(name, tuple(words), 8, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})):
        for plan in plans:
            check_fit(plan, user, version="0.19.2", world_size=8)
            edited, _ = rewrite(plan, flags=flags, words=words)
            assert split_of(flags.values(edited)) == plan.split
            args = validated(edited)
            assert args.pipeline_model_parallel_size == plan.layout.pipeline_parallel
            assert 0 not in plan.split.transformer_layers_per_stage
            job_of_plan = plan.made_for.job
            assert job_of_plan is not None
            assert fault_of_plan(plan, job_of_plan.logged_expert_layers or ()) is None


@pytest.mark.parametrize("name", COMMANDS)
def test_the_flags_say_what_rank_0_reports(name: str) -> None:
    """The same model, stages and layers of multi-token prediction, read without a start."""
    words = start(COMMANDS[name])[4:]
    native = native_flags()
    with hopper(ProductionCommand(name, tuple(words), 8, {})):
        described = describe_job(validated(words), as_written=native.values(words), neutralised=[])
    reported = parse_training_job(described)
    command = job_of_command(parse_command(start(COMMANDS[name])), sections={"cluster": "H100"})
    read = command.request
    assert read.shape == reported.shape
    assert command.split == reported.split
    assert command.layout == reported.layout
    assert (read.experts, read.latent) == (reported.experts, reported.latent)
    assert (read.mtp_layers, read.mtp_kinds) == (reported.mtp_layers or 0, reported.mtp_kinds)
    assert read.logged_expert_layers == (reported.logged_expert_layers or ())


@pytest.mark.parametrize(
    "words",
    [
        f"{PATTERN} M* --hybrid-override-pattern M*",
        f"{PATTERN} M*X",
        f"{PATTERN} M*+",
        f"{PATTERN} M*/*-/--",
        f"{PATTERN} M|*",
        f"{PATTERN} M|*|- --pipeline-model-parallel-size 2",
        f"{PATTERN} M|* --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1",
        f"{PATTERN} M* --account-for-loss-in-pipeline-split",
    ],
)
def test_megatron_refuses_what_the_reader_refuses(words: str) -> None:
    given = [*SIZES, *shlex.split(words)]
    with pytest.raises(Exception, match=r"--"):
        read_arguments(given)
    native_flags()
    with (
        hopper(ProductionCommand("refused", tuple(given), 8, {})),
        pytest.raises((AssertionError, ValueError)),
    ):
        validated(given)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "an older flag"])
def test_exported_flags_have_the_stages_in_the_pattern(name: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("search: {pipeline_parallel: 2, schedule: stock}\n")
    (plan, *_) = plan_files(COMMANDS[name], tmp_path, str(tmp_path / "job.yaml"))
    words = start(COMMANDS[name])[4:]
    rows = lines({"flags": flags_of(plan), "leave_out": [], "is_stock_order": True})
    exported = shlex.split("\n".join(rows), comments=True)
    args, wanted = (native_flags().values([*words, *more]) for more in (exported, []))
    assert split_of(args) == plan.split
    letters = [text.replace("|", "") for text in (args.hybrid_layer_pattern, wanted.hybrid_layer_pattern)]
    assert letters[0] == letters[1]
    check_fit(plan, args, version="0.19.2", world_size=8)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_plan_of_a_hybrid_command_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    job: dict[str, Any] = {"cluster": CLUSTER, "search": {"pipeline_parallel": 2, "schedule": "stock"}}
    Path("job.yaml").write_text(yaml.safe_dump(job))
    words = [*FLAGS, *shlex.split(LAYERS), PATTERN, "M*E-ME", "--train-iters", "3"]
    command = ["torchrun", "--nproc-per-node", "2", str(SCRIPT), *words]
    assert main(["plan", "job.yaml", "-o", "plan.json", "--", *command]) == 0
    plan = read_plan(Path("plan.json"))
    assert plan.layout.pipeline_parallel == 2
    assert fault_of_plan(plan, (2, 5)) is None
    assert main(["train", "--device", "cpu", "--plan", "plan.json", "--", *command]) == 0
