"""`quartet export`: a plan as Megatron's own flags."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.cli.export import export, flags_of, lines
from quartet_plugin.cli.main import main
from quartet_plugin.model.plan import ScheduleChoice, Split, write_plan
from tests.model.plans import PLAN
from tests.space.jobs import make_layout, make_shape


def test_flags_say_what_the_plan_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    write_plan(PLAN, path=path)
    assert main(["export", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    words = shlex.split("\n".join(lines), comments=True)
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given["--pipeline-model-parallel-layout"] == "Etttttt|ttL"
    assert given["--pipeline-model-parallel-size"] == "2"
    assert given["--micro-batch-size"] == "4"
    assert "# RANK 0: node-a, LOCAL_RANK 1" in lines
    assert main(["export", str(path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["flags"]["--num-layers"] == 8
    assert [row["local_rank"] for row in content["ranks"]] == [1, 0]
    assert content["is_stock_order"] is False


def test_switches_and_the_group() -> None:
    plan = replace(
        PLAN,
        layout=make_layout(virtual_stages=2, recompute="full", distributed_optimizer=True),
        split=Split(transformer_layers_per_stage=(0, 4, 3, 1)),
        schedule=ScheduleChoice(name="interleaved", group=4),
        shape=make_shape(num_query_groups=2),
    )
    flags = flags_of(plan)
    assert flags["--microbatch-group-size-per-virtual-pipeline-stage"] == 4
    assert flags["--recompute-granularity"] == "full"
    assert flags["--use-distributed-optimizer"] is True
    assert flags["--num-query-groups"] == 2
    assert flags["--pipeline-model-parallel-layout"] == "E|tttt|ttt|tL"


def test_a_layout_counts_every_layer() -> None:
    for counts, text in (((8, 0), "Etttttttt|L"), ((3,), "EtttL"), ((0, 2, 1, 0), "E|tt|t|L")):
        assert Split(transformer_layers_per_stage=counts).megatron_layout == text


def test_flags_that_a_plan_replaces_are_named() -> None:
    named = export(PLAN)["leave_out"]
    assert "--num-layers-per-virtual-pipeline-stage" in named
    assert "--recompute-granularity" not in named
    base = replace(
        PLAN.made_for.baseline,
        layout=make_layout(recompute="full", distributed_optimizer=True, sequence_parallel=True),
    )
    other = replace(PLAN, made_for=replace(PLAN.made_for, baseline=base))
    named = export(other)["leave_out"]
    assert {"--recompute-granularity", "--use-distributed-optimizer", "--sequence-parallel"} <= set(named)
    assert not set(named) & set(export(other)["flags"])


def test_what_the_plan_keeps_of_recomputation_is_not_written() -> None:
    """The command may say more than a plan can: how many layers, and by which method."""
    base = replace(PLAN.made_for.baseline, layout=make_layout(recompute="full"))
    plan = replace(PLAN, made_for=replace(PLAN.made_for, baseline=base), layout=make_layout(recompute="full"))
    assert not [flag for flag in [*flags_of(plan), *export(plan)["leave_out"]] if "recompute" in flag]


def test_the_vocabulary_stays_padded_as_it_was_under_another_tensor_parallel_size() -> None:
    assert "--padded-vocab-size" not in flags_of(PLAN)
    plan = replace(
        PLAN,
        layout=make_layout(tensor_parallel=2, pipeline_parallel=1),
        split=Split(transformer_layers_per_stage=(8,)),
        schedule=ScheduleChoice(name="no-pipelining"),
    )
    assert flags_of(plan)["--padded-vocab-size"] == PLAN.shape.vocab_size


def test_a_deepspeed_plan_is_a_plain_ds_config() -> None:
    plan = replace(PLAN, made_for=replace(PLAN.made_for, framework="deepspeed"))
    content = export(plan)
    assert "flags" not in content
    sizes = content["ds_config"]
    micro, steps = sizes["train_micro_batch_size_per_gpu"], sizes["gradient_accumulation_steps"]
    assert sizes["train_batch_size"] == micro * steps * plan.layout.data_parallel
    assert sizes["zero_optimization"] == {"stage": int(plan.layout.distributed_optimizer)}
    assert "name the plan in one" in lines(content)[-1]
    sized = make_layout(distributed_optimizer=True, reduce_bucket_size=2000, allgather_bucket_size=1000)
    assert export(replace(plan, layout=sized))["ds_config"]["zero_optimization"] == {
        "stage": 1,
        "reduce_bucket_size": 2000,
        "allgather_bucket_size": 1000,
    }


def test_a_deepspeed_plan_goes_into_the_users_own_ds_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = replace(PLAN, made_for=replace(PLAN.made_for, framework="deepspeed"))
    path, config = tmp_path / "plan.json", tmp_path / "ds.json"
    write_plan(plan, path=path)
    own = {"bf16": {"enabled": True}, "train_batch_size": 1, "quartet": {"plan": "plan.json"}}
    config.write_text(json.dumps({**own, "zero_optimization": {"stage": 1, "round_robin_gradients": True}}))
    assert main(["export", str(path), "--ds-config", str(config)]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "bf16": {"enabled": True},
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "zero_optimization": {"stage": 0, "round_robin_gradients": True},
    }
    config.write_text("[]")
    assert main(["export", str(path), "--ds-config", str(config)]) == 2
    assert "a ds_config is a JSON object" in capsys.readouterr().err
    write_plan(PLAN, path=path)
    assert main(["export", str(path), "--ds-config", str(config)]) == 2
    assert "megatron-core" in capsys.readouterr().err
