"""Plans as values of a configuration."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from quartet_plugin.bridge.fields import arguments_of, vocabulary_of
from quartet_plugin.bridge.planned import (
    check_checkpoint,
    check_vocabulary,
    division_of_experts,
    write_plan,
)
from quartet_plugin.errors import PlanError
from quartet_plugin.megatron.apply import check_fit
from quartet_plugin.model.custom_schedule import CustomSchedule, StageProfile
from quartet_plugin.model.plan import ScheduleChoice, Split
from quartet_plugin.model.tensor_partition import partition_from_label
from quartet_plugin.rank.mapping import Process, assign
from tests.bridge.configurations import make_config, make_model
from tests.model.plans import LAYOUT, PLAN, plan_with


def test_the_split_becomes_a_layout_and_is_said() -> None:
    config = make_config()
    check_fit(PLAN, arguments_of(config), version="0.19.2", world_size=2)
    (note,) = write_plan(PLAN, config)
    assert config.model.pipeline_model_parallel_layout == "Etttttt|ttL"
    assert config.model.virtual_pipeline_model_parallel_size is None
    assert note == "the plan replaces pipeline_model_parallel_layout left out -> Etttttt|ttL"


def test_virtual_stages_and_recompute_are_fields_of_the_provider() -> None:
    config = make_config()
    layout = replace(LAYOUT, virtual_stages=2, recompute="full", micro_batch_size=2)
    plan = plan_with(
        layout=layout,
        split=Split(transformer_layers_per_stage=(2, 2, 3, 1)),
        schedule=ScheduleChoice(name="interleaved", group=4),
    )
    write_plan(plan, config)
    model = config.model
    assert model.pipeline_model_parallel_layout == "Ett|tt|ttt|tL"
    assert model.virtual_pipeline_model_parallel_size == 2
    assert model.microbatch_group_size_per_vp_stage == 4
    recompute = (model.recompute_granularity, model.recompute_method, model.recompute_num_layers)
    assert recompute == ("full", "uniform", 1)
    assert config.train.micro_batch_size == 2
    # Two devices exchange in both directions at once.
    assert (model.overlap_p2p_comm, model.batch_p2p_comm) == (True, False)


def test_a_pipeline_that_the_command_does_not_have() -> None:
    config = make_config(
        make_model(pipeline_model_parallel_size=1, tensor_model_parallel_size=2, vocab_size=16100)
    )
    layout = replace(LAYOUT, tensor_parallel=1)
    plan = replace(PLAN, layout=layout)
    write_plan(plan, config)
    assert config.model.pipeline_model_parallel_size == 2
    assert config.model.pipeline_dtype == "torch.float32"
    assert config.model.tensor_model_parallel_size == 1
    assert vocabulary_of(config) == PLAN.shape.vocab_size
    check_vocabulary(plan, config)


def test_no_pipeline_leaves_no_layout() -> None:
    config = make_config(
        make_model(pipeline_model_parallel_layout="Etttt|ttttL", virtual_pipeline_model_parallel_size=1)
    )
    plan = plan_with(
        layout=replace(LAYOUT, pipeline_parallel=1, data_parallel=2),
        split=Split(transformer_layers_per_stage=(8,)),
        schedule=ScheduleChoice(name="no-pipelining"),
    )
    write_plan(plan, config)
    assert config.model.pipeline_model_parallel_layout is None
    assert config.model.virtual_pipeline_model_parallel_size is None


def test_a_custom_schedule_is_refused() -> None:
    profile = StageProfile(
        forward_s=(1.0, 1.0),
        input_grad_s=(1.0, 1.0),
        weight_grad_s=(1.0, 1.0),
        backward_s=(2.0, 2.0),
        activation_bytes=(1.0, 1.0),
        forward_transfer_s=(0.0, 0.0),
        backward_transfer_s=(0.0, 0.0),
    )
    custom = CustomSchedule(placement=(0, 1), profile=profile, named="zb-h1")
    plan = plan_with(schedule=ScheduleChoice(name="custom", custom=custom))
    with pytest.raises(PlanError, match="Megatron-Bridge runs Megatron's own schedules"):
        write_plan(plan, make_config())


def test_a_mapping_is_refused_beside_an_in_process_restart() -> None:
    processes = [
        Process(host="node-a", group_rank=0, local_rank=rank, local_world_size=2) for rank in range(2)
    ]
    assert assign(PLAN, processes, args=arguments_of(make_config())).rank_of == (1, 0)
    restarted = make_config(inprocess_restart=SimpleNamespace(enabled=True))
    with pytest.raises(PlanError, match=r"inprocess_restart\.enabled\) needs the launcher"):
        assign(PLAN, processes, args=arguments_of(restarted))


def test_a_checkpoint_of_other_stages_must_be_reshardable() -> None:
    config = make_config()
    config.checkpoint.load = "checkpoints"
    experts = division_of_experts(config)
    check_checkpoint(PLAN, config, experts=experts)
    config.ddp.use_distributed_optimizer = True
    with pytest.raises(PlanError, match="dist_ckpt_optim_fully_reshardable"):
        check_checkpoint(PLAN, config, experts=experts)
    same = replace(PLAN, split=PLAN.made_for.baseline.split)
    check_checkpoint(same, config, experts=experts)
    # Half of every expert has the size of every second one.
    config.model.expert_model_parallel_size, config.model.expert_tensor_parallel_size = 2, 1
    with pytest.raises(PlanError, match="divides experts otherwise"):
        check_checkpoint(same, config, experts=experts)
    config.checkpoint.dist_ckpt_optim_fully_reshardable = True
    check_checkpoint(PLAN, config, experts=experts)


def test_a_tensor_partition_is_refused() -> None:
    layout = replace(
        LAYOUT,
        tensor_parallel=2,
        pipeline_parallel=1,
        tensor_partition=partition_from_label("rings"),
        sequence_parallel=True,
    )
    plan = plan_with(
        layout=layout,
        split=Split(transformer_layers_per_stage=(8,)),
        schedule=ScheduleChoice(name="no-pipelining"),
    )
    with pytest.raises(PlanError, match="Megatron-Bridge builds its models by itself"):
        write_plan(plan, make_config())


def test_another_vocabulary_is_another_job() -> None:
    with pytest.raises(PlanError, match="vocab_size 32000"):
        check_vocabulary(PLAN, make_config(make_model(vocab_size=32000, should_pad_vocab=False)))
