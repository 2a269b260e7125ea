"""Plans of a command keep the axes that a study of the command keeps, at the command's own values."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.cost.constants import fitted
from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import read_plan
from quartet_plugin.planner.bounds import bounds_of
from quartet_plugin.planner.command_job import CommandJob, job_of_command
from quartet_plugin.planner.described_job import request_of
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.layout_table import layout_table_of, refused_degrees
from quartet_plugin.planner.plans import plain_layout, plan_of, users_layout
from quartet_plugin.planner.ranking import Ranked, rank
from quartet_plugin.report.tables import changes
from quartet_plugin.space.axes import Axis

FLAGS = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 32768 "
    "--max-position-embeddings 1024 --bf16 --micro-batch-size 2 --global-batch-size 16 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer"
)
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 512 --expert-model-parallel-size 2 --sequence-parallel "
    "--untie-embeddings-and-output-weights --disable-bias-linear"
)
AUX_LOSS = f"{EXPERTS} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"
START = "torchrun --nnodes 2 --nproc-per-node 4 pretrain_gpt.py"
KEPT_DEGREES = {"degrees", "micro_batch"}


def words(more: str) -> list[str]:
    return shlex.split(f"{START} {FLAGS} {more}")


def read(more: str, **search: Any) -> CommandJob:
    sections = {"cluster": "H100", "search": search}
    return job_of_command(parse_command(words(more)), sections=sections)


def degrees(layout: Layout) -> tuple[int, ...]:
    """The degrees of parallelism; virtual stages are a part of the schedule."""
    parallel = (layout.tensor_parallel, layout.pipeline_parallel, layout.data_parallel)
    return (*parallel, layout.context_parallel, layout.expert_parallel)


def plans(job: CommandJob) -> list[Ranked]:
    """Up to 400 plans of a job, the best first."""
    return list(rank(job.request, top=400).best)


@pytest.mark.parametrize(
    ("more", "locked"),
    [
        ("", set()),
        (EXPERTS, set()),
        (AUX_LOSS, {"micro_batch"}),
        (AUX_LOSS.replace("aux_loss --", "global_aux_loss --"), KEPT_DEGREES),
        (f"{EXPERTS} --moe-expert-capacity-factor 1.0", KEPT_DEGREES),
        (f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01", set()),
        ("--dataloader-type cyclic", KEPT_DEGREES),
        ("--eod-mask-loss", KEPT_DEGREES),
        ("--eod-mask-loss --calculate-per-token-loss", set()),
        ("--reset-position-ids", KEPT_DEGREES),
        ("--use-tp-pp-dp-mapping", {"mapping"}),
        ("--num-distributed-optimizer-instances 2", {"degrees"}),
        ("--fine-grained-activation-offloading --offload-modules qkv_linear", set()),
        ("--eval-micro-batch-size 2", {"degrees"}),
        ("--eval-global-batch-size 24", KEPT_DEGREES),
        ("--eval-global-batch-size 32", set()),
        ("--phase-transition-iterations 10", {axis.value for axis in Axis} - {"scaling"}),
    ],
)
def test_plans_keep_what_a_feature_locks(more: str, locked: set[str]) -> None:
    job = read(more)
    own, found = job.layout, plans(job)
    assert {axis.value for axis in job.locked} == locked
    is_free = {
        "micro_batch": len({plan.layout.micro_batch_size for plan in found}) > 1,
        "degrees": len({degrees(plan.layout) for plan in found}) > 1,
        "schedule": len({plan.schedule_label for plan in found}) > 1,
    }
    for axis in ("micro_batch", "degrees", "schedule"):
        assert is_free[axis] == (axis not in locked), axis
    for plan in found:
        if "degrees" in locked:
            assert degrees(plan.layout) == degrees(own)
            assert plan.layout.sequence_parallel == own.sequence_parallel
            assert plan.layout.distributed_optimizer == own.distributed_optimizer
        if "micro_batch" in locked:
            assert plan.layout.micro_batch_size == own.micro_batch_size
        if "split" in locked:
            assert plan.split == job.split.transformer_layers_per_stage
        if "schedule" in locked:
            assert (plan.schedule_label, plan.layout.virtual_stages) == (
                job.schedule.name,
                own.virtual_stages,
            )
            assert plan.layout.pipeline_parallel == own.pipeline_parallel
        if "mapping" in locked:
            assert plan.slots is None


SINKHORN = f"{EXPERTS} --moe-router-load-balancing-type sinkhorn"


@pytest.mark.parametrize("search", [{}, {"tensor_parallel": [1, 4]}, {"change_class": "C"}], ids=str)
def test_plans_share_a_sinkhorn_routers_tokens_as_the_command_does(search: dict[str, Any]) -> None:
    job = read(SINKHORN, **search)
    layouts = [plan.layout for plan in plans(job)]
    assert {(layout.tensor_parallel, layout.context_parallel) for layout in layouts} == {(2, 1)}
    assert len({layout.pipeline_parallel for layout in layouts}) > 1
    assert (len({layout.micro_batch_size for layout in layouts}) > 1) == ("change_class" in search)
    assert job.request.batching_features == ("moe_sinkhorn",)


BIASED = EXPERTS.replace(" --disable-bias-linear", "")


@pytest.mark.parametrize(
    ("more", "search", "sizes"),
    [
        (BIASED, {}, {1}),
        (BIASED, {"expert_tensor_parallel": "auto"}, {1, 2, 4}),
        (f"{BIASED} --expert-tensor-parallel-size 1", {}, {1, 2, 4}),
        (EXPERTS, {}, {1, 2, 4}),
    ],
)
def test_no_plan_shares_experts_with_biases(more: str, search: dict[str, Any], sizes: set[int]) -> None:
    """Megatron asserts it (megatron/core/transformer/transformer_config.py)."""
    request = read(more, schedule="stock", micro_batch_size=[2], **search).request
    table = layout_table_of(request, request.shape)
    layouts = [table.layout(row) for row in range(len(table))]
    assert {layout.tensor_parallel for layout in layouts} == sizes
    if "expert_tensor_parallel" in search:
        divided = [layout for layout in layouts if layout.tensor_parallel > 1]
        assert {layout.setting("expert_tensor_parallel") for layout in divided} == {1}
    refused = {refusal.reason for refusal in refused_degrees(request, request.shape)}
    words = "biases: TP 2 without --expert-tensor-parallel-size 1: experts with linear biases are not shared"
    assert any(reason.startswith(words) for reason in refused) == (sizes == {1})


WHOLE = EXPERTS.replace("--expert-model-parallel-size 2", "--expert-tensor-parallel-size 1")


@pytest.mark.parametrize("more", ["", "--expert-model-parallel-size 4"])
def test_plans_spread_whole_experts_over_tensor_parallel_ranks(more: str) -> None:
    """The command's own EP 4 over TP 2 x DP 2, too; of its shared experts EP divides DP x CP."""
    job = read(f"{WHOLE} {more}", schedule="stock", micro_batch_size=[2])
    assert not job.locked
    degrees = {
        (layout.tensor_parallel, layout.data_parallel, layout.expert_parallel)
        for layout in layouts(job)
        if layout.pipeline_parallel == 2
    }
    assert {(1, 4, 4), (2, 2, 1), (2, 2, 2), (2, 2, 4), (4, 1, 2), (4, 1, 4)} <= degrees
    assert all(tp * dp % ep == 0 for tp, dp, ep in degrees)
    shared = layouts(read(EXPERTS, schedule="stock", micro_batch_size=[2]))
    assert {layout.needs_whole_experts for layout in shared} == {False}


def test_whole_experts_that_a_search_asks_for_are_spread_as_those_of_a_command() -> None:
    asked = {"expert_tensor_parallel": [0, 1], "schedule": "stock", "micro_batch_size": [2]}
    planned = layouts(read(EXPERTS, **asked))
    spread = [layout for layout in planned if layout.needs_whole_experts]
    assert {layout.setting("expert_tensor_parallel") for layout in spread} == {1}
    assert {layout.setting("expert_tensor_parallel") for layout in planned} == {None, 1}


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        (f"{WHOLE} --expert-model-parallel-size 8", r"8; must divide TP x DP x CP \(4\)"),
        (f"{EXPERTS} --expert-model-parallel-size 4", r"4; must divide DP x CP \(2\)"),
    ],
)
def test_experts_that_no_devices_of_a_stage_divide_are_refused(more: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rf"--expert-model-parallel-size: {rule}$"):
        read(more.replace("--num-experts 4", "--num-experts 8"))


def test_what_a_feature_locks_is_kept_whatever_is_asked_for() -> None:
    job = read(AUX_LOSS, micro_batch_size=[1, 4])
    assert {plan.layout.micro_batch_size for plan in plans(job)} == {2}


NEEDS_SHARDING = (
    "--use-precision-aware-optimizer",
    "--overlap-grad-reduce --overlap-param-gather",
    "--fp8-format hybrid --fp8-param-gather",
)


def layouts(job: CommandJob) -> list[Layout]:
    """Every layout that the job's table has."""
    table = layout_table_of(job.request, job.request.shape)
    return [table.layout(row) for row in range(len(table))]


@pytest.mark.parametrize("more", NEEDS_SHARDING)
def test_a_distributed_optimizer_that_another_flag_needs_is_kept(more: str) -> None:
    planned = layouts(read(more, micro_batch_size=2))
    # Megatron refuses the other flag without this one where there is one copy of the model, too.
    assert {layout.data_parallel for layout in planned} == {1, 2, 4, 8}
    assert {layout.distributed_optimizer for layout in planned} == {True}
    free = layouts(read("", micro_batch_size=2))
    assert {layout.distributed_optimizer for layout in free} == {True, False}


def test_the_optimizers_offload_has_the_distributed_optimizer_that_it_needs() -> None:
    flags = f"{NEEDS_SHARDING[0]} --optimizer-cpu-offload"
    planned = layouts(read(flags, micro_batch_size=2, optimizer_cpu_offload=[True, False]))
    assert {layout.setting("optimizer_cpu_offload") for layout in planned} == {None, False}


@pytest.mark.parametrize("more", NEEDS_SHARDING)
def test_another_distributed_optimizer_is_refused_where_a_flag_needs_the_commands(more: str) -> None:
    fault = r"search\.distributed_optimizer: off; must be the command's own on: (precision|overlap|fp8)"
    with pytest.raises(ConfigError, match=fault):
        read(more, distributed_optimizer=False)
    kept = read(more, distributed_optimizer="auto").request.search
    assert kept.distributed_optimizer == (True,)


@pytest.mark.parametrize("optimizer", ["muon", "adaptive_muon --muon-tp-mode blockwise", "soap"])
def test_plans_divide_the_matrices_of_an_update_as_the_command_does(optimizer: str) -> None:
    search: dict[str, Any] = {"tensor_parallel": [1, 2, 4], "micro_batch_size": 2}
    search |= dict.fromkeys(("distributed_optimizer", "expert_tensor_parallel"), "auto")
    job = read(f"{EXPERTS} --optimizer {optimizer}", **search)
    assert not job.locked
    planned = layouts(job)
    assert {layout.tensor_parallel for layout in planned} == {2}
    assert {layout.setting("expert_tensor_parallel") for layout in planned} == {None}
    assert {layout.distributed_optimizer for layout in planned} == {True}
    assert len({layout.pipeline_parallel for layout in planned}) > 1
    assert "--muon-tp-mode" not in job.unread
    assert "--optimizer" in job.unread  # predictions are those of Adam


def test_plans_have_other_tensor_parallelism_where_an_update_is_of_whole_matrices() -> None:
    words = "--optimizer muon --muon-tp-mode duplicated"
    planned = layouts(read(words, tensor_partition="auto", micro_batch_size=2))
    assert {layout.tensor_parallel for layout in planned} == {1, 2, 4}
    assert {layout.tensor_partition for layout in planned} == {None}
    assert {layout.distributed_optimizer for layout in planned} == {True}


def test_plans_keep_the_pipeline_beside_several_layers_at_an_end_in_bf16() -> None:
    ends = "--fp8-format hybrid --first-last-layers-bf16"
    several = layouts(read(f"{ends} --num-layers-at-start-in-bf16 3", micro_batch_size=2))
    assert {layout.pipeline_parallel for layout in several} == {2}
    assert len({layout.pipeline_parallel for layout in layouts(read(ends, micro_batch_size=2))}) > 1
    scaling = {"tolerance": 0.1}
    assert read(ends, scaling=scaling).locked == {}
    assert set(read(f"{ends} --num-layers-at-end-in-bf16 2", scaling=scaling).locked) == {Axis.SCALING}


def test_plans_have_the_virtual_stages_that_a_gather_in_the_optimizers_step_needs() -> None:
    gathered = "--overlap-grad-reduce --overlap-param-gather"
    flag = "--overlap-param-gather-with-optimizer-step"
    interleaved = "--num-layers-per-virtual-pipeline-stage 2"
    search: dict[str, Any] = {"overlap_param_gather": "auto", "micro_batch_size": 2}
    job = read(f"{gathered} {flag} {interleaved} --ckpt-format torch", **search)
    planned = layouts(job)
    assert planned
    assert all(layout.pipeline_parallel > 1 and layout.virtual_stages > 1 for layout in planned)
    assert {layout.setting("overlap_param_gather") for layout in planned} == {None}
    assert flag not in job.unread
    free = layouts(read(f"{gathered} {interleaved}", **search))
    assert any(layout.virtual_stages == 1 for layout in free)
    assert False in {layout.setting("overlap_param_gather") for layout in free}


@pytest.mark.parametrize(
    ("flags", "name"),
    [("--ddp-num-buckets 8", "ddp_bucket_size"), ("--save-params-interval 100", "overlap_param_gather")],
)
def test_plans_keep_a_setting_that_another_flag_binds(flags: str, name: str) -> None:
    search: dict[str, Any] = {"micro_batch_size": 2, name: [1000] if name == "ddp_bucket_size" else "auto"}
    on = "--overlap-grad-reduce"
    assert {layout.setting(name) for layout in layouts(read(on, **search))} > {None}
    kept = read(f"{on} {flags}", **{**search, name: "auto"})
    assert {layout.setting(name) for layout in layouts(kept)} == {None}


def test_class_a_keeps_degrees_and_micro_batch() -> None:
    found = plans(read("", change_class="A"))
    own = read("").layout
    assert {degrees(plan.layout) for plan in found} == {degrees(own)}
    assert {plan.layout.micro_batch_size for plan in found} == {own.micro_batch_size}
    assert len({plan.schedule_label for plan in found}) > 1


def test_class_c_frees_what_the_objective_locks_on_stock_schedules() -> None:
    job = read(AUX_LOSS, change_class="C")
    found = plans(job)
    assert len({plan.layout.micro_batch_size for plan in found}) > 1
    assert not any(plan.schedule.is_custom for plan in found)
    other = next(plan for plan in found if plan.layout.micro_batch_size != 2)
    plan = plan_of(job.request, other, plain=plain_layout(job.request, best=other), name="plan", place=1)
    assert "C" in {change.change_class for change in changes(plan)}
    assert plan.made_for.job is not None
    assert request_of(plan, plan.made_for.job).batching_features == ("moe_microbatch_loss",)
    with pytest.raises(
        ConfigError, match=r"search\.schedule: zb-h1; must be stock with search\.change_class C"
    ):
        read(AUX_LOSS, change_class="C", schedule="zb-h1")
    # A loss that does not depend on its microbatches leaves class C nothing to keep.
    assert any(plan.schedule.is_custom for plan in plans(read("", change_class="C")))


UNEVEN = "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|ttt|ttt|tL"
FEW = {"tensor_parallel": 2, "micro_batch_size": 2, "virtual_stages": 1, "schedule": "stock"}


def splits_by_stages(request: PlanRequest) -> dict[int, set[tuple[int, ...]]]:
    """The splits that the layouts of each number of stages may have."""
    table = layout_table_of(request, request.shape)
    bounds = bounds_of(request, request.shape, table, constants=fitted())
    found: dict[int, set[tuple[int, ...]]] = {}
    for row in range(len(table)):
        split = bounds.split(request, request.shape, table, row)
        found.setdefault(table.layout(row).num_stages, set()).add(split)
    return found


@pytest.mark.parametrize(
    ("asked", "of_two", "of_four"),
    [
        ("stock", {(4, 4)}, {(1, 3, 3, 1)}),
        ("even", {(4, 4)}, {(2, 2, 2, 2)}),
        (["stock", "even"], {(4, 4)}, {(1, 3, 3, 1), (2, 2, 2, 2)}),
        (["5+3", "stock"], {(4, 4), (5, 3)}, {(1, 3, 3, 1)}),
        (["stock", "1+3+3+1", "2+2+2+2"], {(4, 4)}, {(1, 3, 3, 1), (2, 2, 2, 2)}),
        ("5+3", {(5, 3)}, None),
    ],
)
def test_the_stock_split_is_the_commands(
    asked: str | list[str], of_two: set[tuple[int, ...]], of_four: set[tuple[int, ...]] | None
) -> None:
    found = splits_by_stages(read(UNEVEN, split=asked, **FEW).request)
    assert (found.get(2), found.get(4)) == (of_two, of_four)


def test_the_stock_split_of_a_plans_file_is_the_commands() -> None:
    job = read(UNEVEN, split="stock", **FEW, pipeline_parallel=[2, 4])
    plain = users_layout(
        job.request, layout=job.layout, split=job.split, schedule=job.schedule, constants=None
    )
    best = rank(job.request, top=1).best[0]
    plan = plan_of(job.request, best, plain=plain, name="plan", place=1)
    assert plan.made_for.job is not None
    again = request_of(plan, plan.made_for.job)
    assert splits_by_stages(again) == splits_by_stages(job.request) == {2: {(4, 4)}, 4: {(1, 3, 3, 1)}}


def test_the_command_says_what_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    command = ["--cluster", "H100", "--named-only", "-o", str(path), "--", *words(AUX_LOSS)]
    assert main(["plan", *command]) == 0
    shown = capsys.readouterr().out
    how = "(search.change_class: C tunes degrees and micro_batch)"
    assert f"not tuned because of moe_microbatch_loss (docs/support.md): micro_batch {how}" in shown
    assert "--moe-router-load-balancing-type" not in shown
    assert read_plan(path).made_for.batching_features == ("moe_microbatch_loss",)
    assert main(["explain", str(path)]) == 0
    capsys.readouterr()
    assert main(["plan", "--json", *command]) == 0
    assert json.loads(capsys.readouterr().out)["locked"]["micro_batch"] == "moe_microbatch_loss"


def test_planned_experts_have_the_pipelines_of_the_layers_in_the_order_tp_pp_dp() -> None:
    flags = f"{EXPERTS} --expert-tensor-parallel-size 1"
    assert any(not has_equal_pipelines(plan.layout) for plan in plans(read(flags)))
    planned = plans(read(f"{flags} --use-tp-pp-dp-mapping"))
    assert {plan.layout.pipeline_parallel for plan in planned} > {1, 2}
    assert all(has_equal_pipelines(plan.layout) for plan in planned)


def has_equal_pipelines(layout: Layout) -> bool:
    """Whether whole experts and layers have the same pipelines in the order tp-cp-ep-pp-dp."""
    devices = layout.tensor_parallel * layout.context_parallel
    return layout.pipeline_parallel == 1 or layout.expert_parallel == devices


def test_plans_of_a_command_are_priced_with_what_it_has_on_the_host() -> None:
    modules = "--fine-grained-activation-offloading --offload-modules core_attn attn_proj"
    flags = f"{modules} {NEEDS_SHARDING[0]} --optimizer-cpu-offload --optimizer-offload-fraction 0.25"
    job = read(flags)
    assert job.unread == ()
    software = job.request.software
    assert software.offloaded_modules == ("attn_proj", "core_attn")
    assert software.optimizer_on_host == 0.25
    assert read("").request.software.optimizer_on_host == 0.0


ONE_STAGE = "--pipeline-model-parallel-size 1 --use-megatron-fsdp --ckpt-format fsdp_dtensor"


def test_plans_of_a_command_with_megatron_fsdp_keep_its_stages_and_sharding() -> None:
    job = read(ONE_STAGE, micro_batch_size=2)
    assert set(job.locked.values()) == {"fsdp"}
    assert job.layout.distributed_optimizer
    planned = layouts(job)
    assert {layout.pipeline_parallel for layout in planned} == {1}
    assert {layout.tensor_parallel for layout in planned} == {1, 2, 4}
    assert {layout.setting("use_megatron_fsdp") for layout in planned} == {None}
    run = job.request.run(job.request.shape, planned[0], (8,))
    assert (run.zero_stage, run.shard_group) == (3, run.copies)


def test_plans_turn_megatron_fsdp_on_or_off_where_the_search_names_it() -> None:
    search: dict[str, Any] = {"micro_batch_size": 2, "use_megatron_fsdp": [False, True]}
    off = layouts(read(ONE_STAGE, **search))
    assert {layout.setting("use_megatron_fsdp") for layout in off} == {None, False}
    job = read("", **search, distributed_optimizer="auto")
    made = {
        (layout.pipeline_parallel > 1, layout.distributed_optimizer, layout.setting("use_megatron_fsdp"))
        for layout in layouts(job)
    }
    assert {
        (is_staged, has_sharded_optimizer) for is_staged, has_sharded_optimizer, value in made if value
    } == {(False, True)}
    fault = r"search\.use_megatron_fsdp: on; must be the command's own off: meta_init"
    with pytest.raises(ConfigError, match=fault):
        layouts(read("--init-model-with-meta-device", use_megatron_fsdp=True))


def test_a_plan_without_the_request_says_nothing_of_megatron_fsdp() -> None:
    request = read("--use-nccl-ub", overlap_grad_reduce=[True, False]).request
    assert "use_megatron_fsdp" not in {setting.name for setting in request.settings}
    assert "fsdp_bound" not in request.features
