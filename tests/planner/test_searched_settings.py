"""Settings of Megatron in the planner: lists of them are enumerated as layouts are, bounds and all."""

import random
import shlex
from typing import Any

import pytest

from quartet_plugin.cli.export import flags_of, left_out
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.memory import peak_memory
from quartet_plugin.cost.predict import predict
from quartet_plugin.errors import ConfigError, InfeasibleError
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.layout import Layout
from quartet_plugin.planner.bounds import bounds_of
from quartet_plugin.planner.command_job import job_of_command
from quartet_plugin.planner.described_job import request_of
from quartet_plugin.planner.described_space import first_plans, space_of
from quartet_plugin.planner.job import PlanRequest, parse_job
from quartet_plugin.planner.layout_table import layout_table_of
from quartet_plugin.planner.order_search import may_search
from quartet_plugin.planner.plans import plain_layout, plan_of
from quartet_plugin.planner.ranking import rank
from quartet_plugin.space.knobs.registry import OPTIONS
from quartet_plugin.space.knobs.use_megatron_fsdp import saved_weights_refusal
from quartet_plugin.space.layouts import chosen_layouts
from tests.planner.planning import job_data, runs_of

# Every setting that a plan may change in a dense model, and in one with experts.
DENSE: dict[str, Any] = {
    "sequence_parallel": [True, False],
    "overlap_grad_reduce": [True, False],
    "overlap_param_gather": "auto",
    "ddp_bucket_size": "auto",
    "recompute_method": ["uniform", "block"],
    "recompute_num_layers": [1, 2],
    "recompute_modules": ["core_attn", "mlp", "core_attn+mlp"],
    "distributed_optimizer": [True, False],
}
EXPERTS: dict[str, Any] = {
    "moe_token_dispatcher": ["allgather", "alltoall"],
    "expert_tensor_parallel": [0, 1],
    "recompute_modules": ["moe_act", "layernorm+moe"],
    "moe_shared_expert_overlap": [True, False],
    "overlap_moe_expert_parallel_comm": [True, False],
    "delay_wgrad_compute": [True, False],
    "moe_grouped_gemm": [True, False],
}


def random_job(seed: int) -> PlanRequest:
    """A small job that searches three settings; memory is drawn so that it often decides."""
    draw = random.Random(seed)
    has_experts = seed % 3 == 2
    known = EXPERTS if has_experts else DENSE
    names = draw.sample(sorted(known), 3)
    model = {"num_layers": draw.randint(2, 5), "gated_ffn": True, "vocab_size": draw.choice([1000, 64000])}
    if has_experts:
        model |= {
            "num_experts": 4,
            "num_dense_layers": draw.choice([0, 1]),
            "shared_expert_ffn_hidden_size": 512,
        }
    cluster = {"devices_per_node": 4, "memory_bytes": draw.choice([5, 8, 80]) * 2**30}
    search = {"micro_batch_size": [1, 2], "schedule": ["stock", "zb-h1"], "virtual_stages": 1}
    search |= {name: known[name] for name in names}
    if "overlap_moe_expert_parallel_comm" in names:
        search["virtual_stages"] = [1, 2]
    return parse_job(job_data(model=model, cluster=cluster, search=search), where="job")


@pytest.mark.parametrize("seed", range(6))
def test_the_best_of_searched_settings_is_that_of_exhaustive_search(seed: int) -> None:
    job = random_job(seed)
    try:
        every = rank(job, top=3, exhaustive=True)
    except InfeasibleError:
        pytest.fail(f"seed {seed}: draw a job that fits")
    quick = rank(job, top=3)
    assert quick.best == every.best
    assert quick.num_considered == every.num_predicted + every.num_too_large


def test_a_custom_schedule_has_no_setting_that_needs_the_frameworks() -> None:
    """The all-to-all overlap runs in Megatron's schedules alone, not in named ones nor in searched orders."""
    model = {"num_layers": 4, "num_experts": 4}
    search = {
        "pipeline_parallel": 2,
        "virtual_stages": [1, 2],
        "overlap_moe_expert_parallel_comm": [True, False],
    }
    data = job_data(model=model, search=search)
    job = parse_job(data | {"search": search | {"schedule": ["stock", "zb-v", "searched"]}}, where="job")
    table = layout_table_of(job, job.shape)
    overlapped = {
        table.schedule(row).is_custom
        for row in range(len(table))
        if table.layout(row).setting("overlap_moe_expert_parallel_comm") is True
    }
    assert overlapped == {False}
    best = rank(job, top=200).best
    is_on = [plan.layout.setting("overlap_moe_expert_parallel_comm") is True for plan in best]
    assert {may_search(job, plan) for plan, on in zip(best, is_on, strict=True) if on} == {False}
    assert any(may_search(job, plan) for plan in best)
    alone = parse_job(
        data | {"search": search | {"overlap_moe_expert_parallel_comm": True, "schedule": "zb-v"}},
        where="job",
    )
    with pytest.raises(ConfigError, match="runs in the framework's own schedules alone"):
        layout_table_of(alone, alone.shape)


@pytest.mark.parametrize("seed", range(6))
def test_no_prediction_with_searched_settings_is_under_its_bounds(seed: int) -> None:
    job = random_job(seed)
    table = layout_table_of(job, job.shape)
    assert len(table.options) > 1
    bounds = bounds_of(job, job.shape, table, constants=fitted())
    for row in range(0, len(table), 7):
        split = bounds.split(job, job.shape, table, row)
        for run in runs_of(job, table, row, split):
            words = (run.layout, run.schedule)
            assert bounds.time_s[row] <= predict(run, fitted()).iter_time_s, words
            assert bounds.memory_bytes[row] <= peak_memory(run).total_bytes, words


@pytest.mark.parametrize("seed", range(3))
def test_a_study_has_the_same_settings_and_begins_with_the_plans(seed: int) -> None:
    job = random_job(seed)
    table, space = layout_table_of(job, job.shape), space_of(job)
    planned = {table.layout(row) for row in range(len(table))}
    tried = set(chosen_layouts(space.layouts[job.shape], OPTIONS, job.shape, space.rules()))
    assert planned == tried
    best = rank(job, top=5).best
    assert [plan.layout for _, plan in first_plans(space, job, top=5)] == [ranked.layout for ranked in best]


def test_the_plain_layout_lacks_a_setting_that_needs_what_it_leaves_out() -> None:
    """Overlap of expert communication needs virtual stages in a pipeline; a plain layout has none."""
    search = {"pipeline_parallel": 2, "expert_parallel": 4, "virtual_stages": 2, "schedule": "stock"}
    search |= {"overlap_moe_expert_parallel_comm": True, "moe_token_dispatcher": "alltoall"}
    job = parse_job(job_data(model={"num_experts": 8, "gated_ffn": True}, search=search), where="job")
    plain = plain_layout(job)
    assert (plain.layout.pipeline_parallel, plain.layout.virtual_stages) == (2, 1)
    assert "overlap_moe_expert_parallel_comm" not in values_of(plain.layout)
    best = rank(job).best[0]
    assert best.layout.setting("overlap_moe_expert_parallel_comm") is True
    assert first_plans(space_of(job), job, top=1)[0][1].layout == best.layout


def test_a_written_plan_states_the_settings_that_were_searched() -> None:
    search = {"overlap_grad_reduce": [True, False], "recompute_modules": ["core_attn", "mlp"]}
    search |= {"recompute": "selective", "tensor_parallel": 1, "pipeline_parallel": 1}
    job = parse_job(job_data(model={"gated_ffn": True}, search=search), where="job")
    best = rank(job).best[0]
    plan = plan_of(job, best, plain=plain_layout(job, best=best), name="plan", place=1)
    assert values_of(plan.layout) == {"overlap_grad_reduce": True, "recompute_modules": "core_attn"}


def values_of(layout: Layout) -> dict[str, Any]:
    return {setting.name: setting.value for setting in layout.settings or ()}


def test_a_commands_settings_are_searched_beside_its_own() -> None:
    flags = (
        "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --micro-batch-size 1 "
        "--max-position-embeddings 512 --global-batch-size 8 --padded-vocab-size 1024 --bf16 "
        "--use-distributed-optimizer --overlap-grad-reduce"
    )
    words = shlex.split(f"torchrun --nproc-per-node 4 pretrain_gpt.py {flags}")
    search = {"overlap_grad_reduce": [True, False], "pipeline_parallel": 1, "tensor_parallel": 1}
    request = job_of_command(parse_command(words), sections={"cluster": "H100", "search": search}).request
    table = layout_table_of(request, request.shape)
    found = {table.layout(row).setting("overlap_grad_reduce") for row in range(len(table))}
    assert found == {None, False}
    assert rank(request).best[0].layout.setting("overlap_grad_reduce") is None


def test_no_plan_has_parts_in_graphs_that_nothing_captures() -> None:
    search = {"overlap_grad_reduce": [True], "pipeline_parallel": 1, "tensor_parallel": 1}
    free = {**search, "cuda_graph_modules": "auto"}
    best, other = (rank(parse_job(job_data(search=asked), where="job")).best for asked in (search, free))
    assert other == best
    job = parse_job(job_data(search=free), where="job")
    plan = plan_of(job, other[0], plain=plain_layout(job, best=other[0]), name="plan", place=1)
    assert values_of(plan.layout) == {"overlap_grad_reduce": True}


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ({"zero_stage": 1}, "search.zero_stage: 1; `quartet plan` plans for Megatron"),
        ({"moe_token_dispatcher": ["alltoall"]}, "search.moe_token_dispatcher: alltoall; must be the comm"),
        ({"recompute_modules": "mlp", "recompute": "selective"}, "needs --disable-bias-linear"),
        ({"cuda_graph_modules": "attn"}, "search.cuda_graph_modules: attn; the command captures no graphs"),
        ({"ddp_bucket_size": 4, "overlap_grad_reduce": False}, "search.ddp_bucket_size: 4; needs overlap"),
    ],
)
def test_a_setting_that_no_layout_can_have_is_refused(search: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        rank(parse_job(job_data(search=search), where="job"))
    assert words in str(refused.value)


def sharing_job(num_nodes: int, **search: Any) -> PlanRequest:
    """A job on four devices that share sequences or not; links between nodes are slow."""
    cluster = {"num_nodes": num_nodes, "devices_per_node": 4 // num_nodes}
    wanted = {"pipeline_parallel": 1, "micro_batch_size": 1, "context_parallel": [1, 4], **search}
    model = {"num_layers": 3, "seq_length": 8192, "num_query_groups": 4, "vocab_size": 1000}
    return parse_job(job_data(model=model, cluster=cluster, search=wanted), where="job")


TWO_BY_TWO = {"hierarchical_context_parallel_sizes": "2+2"}


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_sizes_of_a_hierarchy_are_enumerated_and_priced(num_nodes: int) -> None:
    """Of four ranks two may exchange heads, or all; links between nodes make the pairs unlike."""
    asked = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": ["2+2", "4+1", "1+4", "4+2"]}
    job = sharing_job(num_nodes, context_parallel=4, tensor_parallel=1, **asked)
    quick, every = rank(job, top=4), rank(job, top=4, exhaustive=True)
    assert quick.best == every.best
    table = layout_table_of(job, job.shape)
    layouts = [table.layout(row) for row in range(len(table))]
    seconds = {
        layout.setting("hierarchical_context_parallel_sizes"): predict(
            job.run(job.shape, layout, (3,)), fitted()
        ).terms["cp_comm_s"]
        for layout in layouts
    }
    assert seconds.keys() == {"2+2", "4+1", "1+4"}
    assert len(set(seconds.values())) == 3
    bounds = bounds_of(job, job.shape, table, constants=fitted())
    for row in range(len(table)):
        for run in runs_of(job, table, row, bounds.split(job, job.shape, table, row)):
            assert bounds.time_s[row] <= predict(run, fitted()).iter_time_s


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_communication_of_shared_sequences_is_enumerated_and_priced(num_nodes: int) -> None:
    sizes = {"hierarchical_context_parallel_sizes": [2, 2]}
    job = sharing_job(num_nodes, cp_comm_type="auto", context_parallel=4, **sizes)
    assert sharing_job(num_nodes, cp_comm_type="auto", context_parallel=4, **TWO_BY_TWO) == job
    quick, every = rank(job, top=4), rank(job, top=4, exhaustive=True)
    assert quick.best == every.best
    table = layout_table_of(job, job.shape)
    layouts = [table.layout(row) for row in range(len(table))]
    found = {layout.setting("cp_comm_type") for layout in layouts}
    assert found == {None, "all_gather", "a2a", "a2a+p2p"}
    seconds = {
        layout.setting("cp_comm_type"): predict(job.run(job.shape, layout, (3,)), fitted()).terms["cp_comm_s"]
        for layout in layouts
    }
    assert len(set(seconds.values())) == 4
    bounds = bounds_of(job, job.shape, table, constants=fitted())
    for row in range(len(table)):
        for run in runs_of(job, table, row, bounds.split(job, job.shape, table, row)):
            assert bounds.time_s[row] <= predict(run, fitted()).iter_time_s


def test_a_plan_of_a_hierarchy_has_its_sizes() -> None:
    sizes = {"hierarchical_context_parallel_sizes": [2, 2]}
    job = sharing_job(2, cp_comm_type="a2a+p2p", context_parallel=4, **sizes)
    best = rank(job).best[0]
    plan = plan_of(job, best, plain=plain_layout(job, best=best), name="plan", place=1)
    assert values_of(plan.layout) == {"cp_comm_type": "a2a+p2p", **TWO_BY_TWO}
    flags = flags_of(plan)
    assert flags["--cp-comm-type"] == "a2a+p2p"
    assert flags["--hierarchical-context-parallel-sizes"] == ["2", "2"]
    assert plan.made_for.job is not None
    again = request_of(plan, plan.made_for.job)
    assert again.values_in(plan.layout.settings) == job.values_in(plan.layout.settings)
    # A plan of other degrees has no hierarchy, nor flags of one.
    free = sharing_job(2, cp_comm_type=["p2p", "a2a+p2p"], context_parallel=1, **sizes)
    best = rank(free).best[0]
    flags = flags_of(plan_of(free, best, plain=plain_layout(free, best=best), name="plan", place=1))
    assert not {"--cp-comm-type", "--hierarchical-context-parallel-sizes"} & flags.keys()


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ({"cp_comm_type": "a2a+p2p"}, "search.cp_comm_type: a2a+p2p; needs two --hierarchical-context"),
        (
            {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 4]},
            "search.cp_comm_type: a2a+p2p; needs two --hierarchical-context-parallel-sizes whose product",
        ),
        ({"hierarchical_context_parallel_sizes": [2]}, "search.hierarchical_context_parallel_sizes"),
        ({"hierarchical_context_parallel_sizes": [0, 2]}, "search.hierarchical_context_parallel_sizes"),
    ],
)
def test_a_hierarchy_without_fitting_sizes_is_refused(search: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        rank(sharing_job(1, **{"context_parallel": 4, **search}))
    assert words in str(refused.value)


@pytest.mark.parametrize("memory", [5, 6, 80])
def test_the_best_with_modules_on_the_host_is_that_of_exhaustive_search(memory: int) -> None:
    model = {"num_layers": 4, "num_experts": 4, "gated_ffn": True, "shared_expert_ffn_hidden_size": 512}
    search = {
        "offload_modules": ["none", "core_attn", "attn_proj+core_attn+expert_fc1+moe_act"],
        "recompute": ["none", "selective"],
        "micro_batch_size": [1, 2],
        "schedule": ["stock"],
    }
    cluster = {"devices_per_node": 4, "memory_bytes": memory * 2**30}
    job = parse_job(job_data(model=model, cluster=cluster, search=search), where="job")
    try:
        every = rank(job, top=20, exhaustive=True)
    except InfeasibleError:
        pytest.fail(f"{memory} GiB: make it fit")
    assert rank(job, top=20).best == every.best
    sets = {plan.layout.setting("offload_modules") for plan in every.best}
    assert sets > {None}


@pytest.mark.parametrize("has_experts", [False, True])
@pytest.mark.parametrize("memory_gib", [6, 80])
def test_no_prediction_with_sharded_parameters_is_under_its_bounds(
    has_experts: bool, memory_gib: int
) -> None:
    model: dict[str, Any] = {"num_layers": 4, "gated_ffn": True, "vocab_size": 64000}
    model |= {"num_experts": 4, "shared_expert_ffn_hidden_size": 512} if has_experts else {}
    search = {"micro_batch_size": [1, 2], "schedule": "stock", "recompute": ["none", "full"]}
    search |= {"use_megatron_fsdp": [False, True], "pipeline_parallel": [1, 2]}
    cluster = {"device": "H100-SXM-80GB", "memory_bytes": memory_gib * 2**30}
    job = parse_job(job_data(model=model, cluster=cluster, search=search), where="job")
    table = layout_table_of(job, job.shape)
    bounds = bounds_of(job, job.shape, table, constants=fitted())
    num_sharded = 0
    for row in range(len(table)):
        split = bounds.split(job, job.shape, table, row)
        for run in runs_of(job, table, row, split):
            assert bounds.time_s[row] <= predict(run, fitted()).iter_time_s, run.layout
            assert bounds.memory_bytes[row] <= peak_memory(run).total_bytes, run.layout
            num_sharded += run.zero_stage == 3
    assert num_sharded > 0
    assert rank(job, top=3).best == rank(job, top=3, exhaustive=True).best


def test_a_model_that_no_device_holds_is_planned_with_sharded_parameters() -> None:
    """Nine billion weights with their gradients on devices of 40 GiB: only shards of them fit without TP."""
    model = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "gated_ffn": True}
    search: dict[str, Any] = {"tensor_parallel": 1, "pipeline_parallel": 1, "micro_batch_size": 1}
    search |= {"recompute": "full", "distributed_optimizer": True}
    cluster = {"device": "H100-SXM-80GB", "memory_bytes": 40 * 2**30}
    data = job_data(model=model, cluster=cluster)
    with pytest.raises(InfeasibleError, match="memory"):
        rank(parse_job(data | {"search": search}, where="job"))
    asked = search | {"use_megatron_fsdp": [False, True]}
    job = parse_job(data | {"search": asked}, where="job")
    best = rank(job).best[0]
    assert values_of(best.layout) == {"use_megatron_fsdp": True}
    flags = flags_of(plan_of(job, best, plain=plain_layout(job, best=best), name="plan", place=1))
    assert flags["--use-megatron-fsdp"] is True
    assert flags["--ckpt-format"] == "fsdp_dtensor"


def test_a_plan_that_keeps_the_sharding_of_parameters_states_nothing_of_it() -> None:
    """What states it has checkpoints of another format than the command's."""
    search = {"tensor_parallel": 1, "pipeline_parallel": [1, 2], "use_megatron_fsdp": [False, True]}
    job = parse_job(job_data(search=search), where="job")
    ranked = rank(job, top=50).best
    for value in (None, True):
        best = next(each for each in ranked if each.layout.setting("use_megatron_fsdp") is value)
        plan = plan_of(job, best, plain=plain_layout(job, best=best), name="plan", place=1)
        assert plan.layout.setting("use_megatron_fsdp") is value
        assert (saved_weights_refusal(plan.layout) is None) == (value is None)
        assert not {"--use-megatron-fsdp", "--ckpt-format"} & set(left_out(plan))
