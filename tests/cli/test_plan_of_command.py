"""`quartet plan -- COMMAND`: the user's command as a job, read and not run."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli.export import flags_of, left_out
from quartet_plugin.cli.main import main
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.layout import Setting
from quartet_plugin.model.plan import Plan, Split, read_plan
from quartet_plugin.planner.command_job import job_of_command
from quartet_plugin.planner.described_job import request_of
from quartet_plugin.planner.described_rules import rules_of
from quartet_plugin.planner.job import parse_job
from quartet_plugin.planner.layout_table import layout_table_of
from quartet_plugin.planner.order_search import planned_ranking
from quartet_plugin.planner.plans import plain_layout, plan_of
from quartet_plugin.planner.ranking import Ranking, rank
from tests.model.clusters import make_cluster

FLAGS = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 32768 "
    "--max-position-embeddings 1024 --bf16 --micro-batch-size 2 --global-batch-size 16 --train-iters 100 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --lr 1e-4 --data-path a b"
)
UNTIED = "--untie-embeddings-and-output-weights"
MTP = f"{UNTIED} --position-embedding-type rope --mtp-num-layers 1"
START = "torchrun --nnodes 2 --nproc-per-node 4 pretrain_gpt.py"
CLUSTER = {"device": "H100-SXM-80GB", "num_nodes": 2, "devices_per_node": 4}


def words(more: str = "", *, start: str = START, without: str = "") -> list[str]:
    flags = FLAGS.replace(without, "") if without else FLAGS
    return shlex.split(f"{start} {flags} {more}")


def test_the_request_is_the_one_of_a_job_file() -> None:
    more = "--num-experts 4 --moe-ffn-hidden-size 512 --swiglu --fp8-format hybrid --disable-bias-linear"
    read = job_of_command(parse_command(words(more)), sections={"cluster": "H100"})
    # Megatron's FFN of a gated model is two thirds of 4 x hidden, in multiples of 64.
    model = {
        "num_layers": 8,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "seq_length": 1024,
        "vocab_size": 32768,
        "ffn_hidden_size": 2688,
        "gated_ffn": True,
        "tied_embeddings": True,
        "position_embedding": "learned_absolute",
        "precision": "fp8",
        "num_experts": 4,
        "expert_ffn_hidden_size": 512,
    }
    cost = {"tokens": 100 * 16 * 1024.0}
    job = {"model": model, "cluster": CLUSTER, "batch": {"global_batch_size": 16}, "cost": cost}
    # The command's own padding is the plan's, and so are its split and its settings of experts: no grouped
    # products.
    settings, described = read.request.settings, parse_job(job, where="job")
    assert described.features == ("moe_grouped_gemm",)
    assert read.request == replace(
        described, vocab_size=None, settings=settings, features=(), baseline_split=(4, 4)
    )
    assert {setting.name: setting.value for setting in settings} == {
        "expert_tensor_parallel": 0,
        "moe_token_dispatcher": "allgather",
        "moe_shared_expert_overlap": False,
        "overlap_moe_expert_parallel_comm": False,
        "delay_wgrad_compute": False,
        "moe_grouped_gemm": False,
    }
    layout = read.layout
    assert (layout.tensor_parallel, layout.pipeline_parallel, layout.data_parallel) == (2, 2, 2)
    assert read.split.transformer_layers_per_stage == (4, 4)
    assert read.unread == ("--lr", "--data-path")


def test_grouped_products_are_read_where_the_model_has_experts() -> None:
    flags = "--num-experts 4 --moe-ffn-hidden-size 512 --moe-grouped-gemm"
    read = job_of_command(parse_command(words(flags)), sections={"cluster": "H100"})
    assert Setting(name="moe_grouped_gemm", value=True) in read.request.settings
    assert "--moe-grouped-gemm" not in read.unread


@pytest.mark.parametrize(
    ("more", "search"),
    [
        ("--num-experts 4 --moe-ffn-hidden-size 512 --disable-bias-linear", {}),
        ("--num-experts 4 --moe-ffn-hidden-size 512 --moe-grouped-gemm --disable-bias-linear", {}),
        ("--num-experts 4 --moe-ffn-hidden-size 512", {"tensor_parallel": 1}),
        (
            "--num-experts 4 --moe-ffn-hidden-size 512 --moe-grouped-gemm --no-bias-dropout-fusion",
            {"tensor_parallel": 1, "moe_grouped_gemm": True},
        ),
        (
            "--num-experts 4 --moe-ffn-hidden-size 512 --moe-grouped-gemm --disable-bias-linear",
            {"recompute": "selective", "recompute_modules": "moe_act"},
        ),
        ("--disable-bias-linear", {"recompute": "selective", "recompute_modules": "mlp"}),
        (
            "--num-experts 4 --moe-ffn-hidden-size 512 --expert-tensor-parallel-size 1 --disable-bias-linear "
            "--expert-model-parallel-size 4 --sequence-parallel",
            {"pipeline_parallel": 2, "expert_parallel": 4},
        ),
        (
            "--num-experts 4 --moe-ffn-hidden-size 512 --disable-bias-linear",
            {"pipeline_parallel": 2, "expert_parallel": 4, "expert_tensor_parallel": [0, 1]},
        ),
    ],
)
def test_the_flags_of_a_plan_are_a_command_of_the_same_job(more: str, search: dict[str, Any]) -> None:
    sections = {"cluster": "H100", "search": {"schedule": "stock", "tensor_parallel": 2, **search}}
    request = job_of_command(parse_command(words(more)), sections=sections).request
    best = rank(request).best[0]
    plan = plan_of(request, best, plain=plain_layout(request, best=best), name="plan", place=1)
    command = shlex.split(START)
    for flag, value in flags_of(plan).items():
        command += [flag, *(value if isinstance(value, list) else [] if value is True else [str(value)])]
    again = job_of_command(parse_command(command), sections=sections).request
    assert again.features == request.features
    assert again.values_in(None) == request.values_in(plan.layout.settings)


@pytest.mark.parametrize(("dispatcher", "is_limited"), [("alltoall", False), ("flex", True)])
def test_a_dispatcher_that_limits_orders_of_ranks_limits_those_of_plans(
    dispatcher: str, is_limited: bool
) -> None:
    more = "--num-experts 4 --expert-model-parallel-size 2 --bf16 --moe-token-dispatcher-type " + dispatcher
    read = job_of_command(parse_command(words(more)), sections={"cluster": "H100"})
    assert rules_of(read.request).order_rules.keeps_experts == is_limited
    assert "--moe-token-dispatcher-type" not in read.unread


@pytest.mark.parametrize(("command", "backend"), [("alltoall", "flex-hybridep"), ("flex", "flex-deepep")])
def test_a_plan_is_predicted_with_its_own_dispatcher(command: str, backend: str) -> None:
    """Experts of two nodes, to which flex sends a token once; the command's dispatcher changes nothing."""
    experts = "--num-experts 8 --moe-router-topk 4 --expert-model-parallel-size 2 --sequence-parallel"
    search = {"schedule": "stock", "pipeline_parallel": 1, "tensor_parallel": 1, "expert_parallel": 8}
    line = words(f"{experts} --disable-bias-linear --moe-token-dispatcher-type {command}")
    seconds = {}
    for name in ("alltoall", backend):
        sections = {"cluster": "H100", "search": {**search, "moe_token_dispatcher": name}}
        request = job_of_command(parse_command(line), sections=sections).request
        best = rank(request).best[0]
        run = request.run(request.shape, best.layout, (8,))
        assert run.software.sends_once_a_domain == (name == backend)
        assert request.values_in(best.layout.settings)["moe_token_dispatcher"] == name
        seconds[name] = best.iteration_s
    assert seconds[backend] < seconds["alltoall"]


EXPERTS = "--num-experts 4 --expert-model-parallel-size 2 --sequence-parallel --disable-bias-linear"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", {"gathers_tokens": True}),
        ("--moe-token-dispatcher-type alltoall", {}),
        ("--moe-token-dispatcher-type flex", {"sends_once_a_domain": True}),
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep", {}),
        ("--moe-token-dispatcher-type alltoall --moe-router-force-load-balancing", {"imbalance": 1.02}),
        ("--moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 1", {"expert_shards": 1}),
        (
            "--moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.5 "
            "--moe-pad-expert-input-to-capacity",
            {"expert_load": 1.5},
        ),
        ("--moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 0.5", {"expert_load": 0.5}),
        (
            "--moe-token-dispatcher-type alltoall --cuda-graph-impl transformer_engine "
            "--cuda-graph-modules attn mamba",
            {"graphed_share": 0.3, "graphed_attention": True, "has_static_inputs": True},
        ),
        (
            "--moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm",
            {"expert_overlap": True},
        ),
    ],
)
def test_settings_of_experts_reach_predictions(more: str, expected: dict[str, Any]) -> None:
    read = job_of_command(parse_command(words(f"{EXPERTS} {more}")), sections={"cluster": "H100"})
    run = read.request.run(read.request.shape, read.layout, (4, 4))
    usual = {
        "gathers_tokens": False,
        "sends_once_a_domain": False,
        "graphed_share": 0.0,
        "graphed_attention": False,
        "has_static_inputs": False,
        "expert_overlap": False,
    }
    others = {"imbalance": 1.1, "expert_shards": 2, "expert_load": expected.get("imbalance", 1.1)}
    seen = {name: getattr(run.software, name) for name in usual}
    seen |= {name: getattr(run, name) for name in others}
    assert seen == usual | others | expected
    # Orders of the plugin's runtime are no choice where the framework overlaps exchanges or captures graphs.
    refuses = {"graphed_share", "expert_overlap"} & set(expected)
    assert (rules_of(read.request).no_custom_schedules is not None) == bool(refuses)


@pytest.mark.parametrize(
    ("more", "comm", "exchanging"),
    [
        ("", "p2p", 1),
        ("--cp-comm-type p2p", "p2p", 1),
        ("--cp-comm-type all_gather", "all_gather", 1),
        ("--cp-comm-type a2a", "a2a", 4),
        ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", "a2a+p2p", 2),
        (f"--cp-comm-type {' '.join(['a2a'] * 8)}", "p2p", 1),
    ],
)
def test_the_communication_of_shared_sequences_reaches_predictions(
    more: str, comm: str, exchanging: int
) -> None:
    command = words(f"--context-parallel-size 4 {more}", without="--pipeline-model-parallel-size 2")
    read = job_of_command(parse_command(command), sections={"cluster": "H100"})
    run = read.request.run(read.request.shape, read.layout, (8,))
    assert (run.software.context_comm, run.exchanging_ranks) == (comm, exchanging)
    assert ("--cp-comm-type" in read.unread) == (more.count("a2a ") > 1)
    # A command without the flag is described as before.
    assert (read.request.settings == ()) == (comm == "p2p")
    sections = {
        "cluster": "H100",
        "search": {"schedule": "stock", "micro_batch_size": 2, "tensor_parallel": 2},
    }
    request = job_of_command(parse_command(command), sections=sections).request
    best = rank(request).best[0]
    plan = plan_of(request, best, plain=plain_layout(request, best=best), name="plan", place=1)
    flags = flags_of(plan)
    if plan.layout.context_parallel > 1:
        assert flags.get("--cp-comm-type", "p2p") == comm
    if "hierarchical" in more and plan.layout.context_parallel > 1:
        assert flags["--hierarchical-context-parallel-sizes"] == ["2", "2"]


def test_packed_sequences_of_a_command_keep_their_communication() -> None:
    command = words("--context-parallel-size 2 --sft --calculate-per-token-loss")
    asked = {"cp_comm_type": "auto", "hierarchical_context_parallel_sizes": "auto"}
    read = job_of_command(parse_command(command), sections={"cluster": "H100", "search": asked})
    assert {read.request.search.requested(name) for name in asked} == {("stock",)}


def test_degrees_of_a_command_with_sizes_are_planned() -> None:
    """Another degree has sizes that fit, or the flags are left out."""
    sizes = "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2"
    without = "--pipeline-model-parallel-size 2"
    search = {"schedule": "stock", "micro_batch_size": 1, "tensor_parallel": 1, "pipeline_parallel": 1}

    def plans(more: str, asked: dict[str, Any]) -> dict[tuple[int, Any], Plan]:
        sections = {"cluster": "H100", "search": search | asked}
        command = parse_command(words(f"{sizes} {more}", without=without))
        request = job_of_command(command, sections=sections).request
        best = rank(request, top=50).best
        plain = plain_layout(request, best=best[0])
        made = [plan_of(request, each, plain=plain, name="plan", place=1) for each in best]
        name = "hierarchical_context_parallel_sizes"
        return {(plan.layout.context_parallel, plan.layout.setting(name)): plan for plan in made}

    ring = plans("", {})
    assert set(ring) == {(degree, None) for degree in (1, 2, 4, 8)}
    assert "--hierarchical-context-parallel-sizes" in left_out(ring[8, None])
    assert "--hierarchical-context-parallel-sizes" not in left_out(ring[4, None])
    rings = plans("--cp-comm-type a2a+p2p", {"hierarchical_context_parallel_sizes": "auto"})
    assert set(rings) == {(1, None), (4, None), (8, "2+4"), (8, "4+2")}
    assert flags_of(rings[8, "4+2"])["--hierarchical-context-parallel-sizes"] == ["4", "2"]
    assert flags_of(rings[4, None])["--hierarchical-context-parallel-sizes"] == ["2", "2"]
    both = {"--hierarchical-context-parallel-sizes", "--cp-comm-type"}
    assert both <= set(left_out(rings[1, None]))
    assert not both & set(left_out(rings[8, "4+2"]))


@pytest.mark.parametrize(("asked", "sizes"), [(None, None), ([1, 2], (1, 2))])
def test_a_hybrid_command_has_its_context_parallelism_planned(
    asked: list[int] | None, sizes: tuple[int, ...] | None
) -> None:
    """None is any size: those that divide the heads of state-space layers, too."""
    more = "--hybrid-layer-pattern M-M*M-M* --context-parallel-size 2"
    sections = {"cluster": "H100", "search": {} if asked is None else {"context_parallel": asked}}
    request = job_of_command(parse_command(words(more)), sections=sections).request
    assert request.search.context_parallel == sizes
    assert request.shape.pattern == "M-M*M-M*"


def test_a_command_that_exchanges_heads_has_no_plans_that_cannot() -> None:
    """16 heads in two query groups: of two tensor-parallel ranks each has one, which none can share."""
    groups = "--context-parallel-size 2 --group-query-attention --num-query-groups 2 --cp-comm-type a2a"
    command = words(groups, without="--tensor-model-parallel-size 2")
    search = {"schedule": "stock", "micro_batch_size": 1}

    def degrees(more: dict[str, Any]) -> set[tuple[int, bool]]:
        sections = {"cluster": "H100", "search": search | more}
        request = job_of_command(parse_command(command), sections=sections).request
        table = layout_table_of(request, request.shape)
        layouts = [table.layout(row) for row in range(len(table))]
        return {(layout.tensor_parallel, layout.context_parallel > 1) for layout in layouts}

    assert {(2, False), (1, True)} <= degrees({})
    assert (2, True) not in degrees({})
    assert (2, True) in degrees({"cp_comm_type": "auto"})


def test_a_plan_keeps_what_its_prediction_was_made_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    (tmp_path / "job.yaml").write_text("search: {tensor_parallel: 2, pipeline_parallel: 2, schedule: 1f1b}")
    more = f"{EXPERTS} --moe-token-dispatcher-type flex --expert-tensor-parallel-size 1"
    job = str(tmp_path / "job.yaml")
    assert main(["plan", job, "--cluster", "H100", "-o", str(path), "--", *words(more)]) == 0
    plan = read_plan(path)
    assert plan.made_for.job is not None
    request = request_of(plan, plan.made_for.job)
    assert request.features == ("moe_deepep", "moe_flex_dispatcher")
    run = request.run(plan.shape, plan.layout, plan.split.transformer_layers_per_stage)
    assert (run.expert_shards, run.software.sends_once_a_domain) == (1, True)
    assert main(["explain", str(path)]) == 0
    capsys.readouterr()


def test_the_commands_own_layout_is_what_plans_are_compared_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    assert main(["plan", "--cluster", "H100", "-o", str(plan), "--", *words()]) == 0
    text = capsys.readouterr().out
    for part in (
        "your command: tp2 pp2 dp2 mb2",
        "x as fast",
        "not read: --lr, --data-path",
        "tokens/s",
        "MFU",
    ):
        assert part in text
    baseline = read_plan(plan).made_for.baseline
    assert baseline.layout.label == "tp2 pp2 dp2 mb2"
    assert baseline.schedule.name == "1f1b"
    assert main(["explain", str(plan)]) == 0


def test_layers_of_multi_token_prediction_weigh_on_the_last_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = []
    (tmp_path / "job.yaml").write_text(
        "search: {tensor_parallel: 2, pipeline_parallel: 4, virtual_stages: 1, schedule: 1f1b}"
    )
    for more in (f"{UNTIED} --position-embedding-type rope --num-layers 32", f"{MTP} --num-layers 32"):
        path = tmp_path / "plan.json"
        options = [str(tmp_path / "job.yaml"), "--cluster", "H100", "-o", str(path)]
        assert main(["plan", *options, "--", *words(more)]) == 0
        plans.append(read_plan(path))
    plain, with_mtp = plans
    assert with_mtp.made_for.mtp_layers == 1
    last, fewer = (plan.split.transformer_layers_per_stage[-1] for plan in plans)
    assert fewer < last
    assert plain.prediction is not None
    assert with_mtp.prediction is not None
    assert (with_mtp.prediction.iteration_s or 0.0) > (plain.prediction.iteration_s or 0.0)
    capsys.readouterr()
    for command, says in (
        ("show", f"split     {with_mtp.split.label} transformer layers, embedding first, multi-token"),
        ("explain", f"{with_mtp.split.label}, multi-token prediction (1) last"),
        ("export", "mL"),
    ):
        assert main([command, str(path)]) == 0
        shown = capsys.readouterr().out
        assert says in shown
    assert "--mtp-num-layers" in shown


def test_a_cluster_file_and_a_job_files_search_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.json").write_text(json.dumps(make_cluster(per_node=4, device="H100")))
    (tmp_path / "job.yaml").write_text("search: {tensor_parallel: 1, micro_batch_size: 1}\n")
    arguments = ["plan", "job.yaml", "--cluster", "cluster.json", "--json", "--", *words()]
    assert main(arguments) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert data["plans"][0]["layout"]["tensor_parallel"] == 1
    assert data["plain"]["is_users"] is True
    assert data["plain"]["layout"]["tensor_parallel"] == 2
    assert data["not_read"] == ["--lr", "--data-path"]
    assert data["plans"][0]["cost"]["num_tokens"] == 100 * 16 * 1024


@pytest.mark.parametrize(("layout", "label"), [("Ettt|t*5m|L", "3+5+0"), ("Et*4|t*4|m|L", "4+4+0+0")])
def test_multi_token_prediction_before_the_last_stage_is_tuned_there_and_on_the_last_one(
    layout: str, label: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = layout.count("|") + 1
    size = f"--pipeline-model-parallel-size {stages}"
    start = f"torchrun --nnodes 1 --nproc-per-node {2 * stages} pretrain_gpt.py"
    command = words(
        f"{MTP} {size} --pipeline-model-parallel-layout {layout}",
        start=start,
        without="--pipeline-model-parallel-size 2",
    )
    job, made = tmp_path / "job.yaml", tmp_path / "plan.json"
    job.write_text(f"search: {{pipeline_parallel: {stages}, mtp_stage: before_last}}\n")
    arguments = ["--cluster", "H100", "--json", "--output", str(made), "--", *command]
    assert main(["plan", str(job), *arguments]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    counts = tuple(map(int, label.split("+")))
    assert (tuple(data["plain"]["split"]), data["plain"]["mtp_before_last"]) == (counts, True)
    plan = read_plan(made)
    assert plan.split.mtp_before_last
    assert plan.made_for.baseline.split == Split.of(counts, is_mtp_before_last=True)
    written = plan.split.layout_text(mtp_layers=1)
    assert flags_of(plan)["--pipeline-model-parallel-layout"] == written
    assert written.endswith("m|L")
    # The job that the plan says has the same stages, and the plan is explained as it is.
    assert plan.made_for.job is not None
    request = request_of(plan, plan.made_for.job)
    assert request.mtp_stages == ("before_last",)
    assert main(["explain", str(made)]) == 0
    shown = capsys.readouterr().out
    assert f"{plan.split.label}, multi-token prediction (1) on the stage before the last one" in shown
    # By default plans of such a command have both stages, and no axis is kept.
    assert main(["plan", "--top", "100", *arguments]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {row.get("mtp_before_last", False) for row in data["plans"]} == {True, False}
    assert not data["locked"]
    job.write_text(f"search: {{pipeline_parallel: {2 * stages}}}\n")
    assert main(["plan", str(job), *arguments]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {row["layout"]["pipeline_parallel"] for row in data["plans"]} == {2 * stages}


@pytest.mark.parametrize(
    ("command", "options", "says"),
    [
        (words("--mtp-num-layers 1"), (), "model.mtp_layers: 1; needs tied_embeddings: false"),
        (words(f"{UNTIED} --mtp-num-layers 1"), (), "model.mtp_layers: 1; needs position_embedding: rope"),
        (
            words(f"{MTP} --pipeline-model-parallel-layout E{'t' * 8}|m||L"),
            (),
            "multi-token prediction before the last stage",
        ),
        (words("--use-torch-fsdp2"), (), "--use-torch-fsdp2"),
        (
            words("--use-megatron-fsdp --data-parallel-sharding-strategy optim"),
            (),
            "--data-parallel-sharding-strategy: optim; must be optim_grads_params with --use-megatron-fsdp",
        ),
        (
            words("--use-megatron-fsdp"),
            ("--cluster", "H100", "--megatron", "0.17.1"),
            "--data-parallel-sharding-strategy: no_shard, the default of Megatron 0.17.1; must be optim",
        ),
        (words(without="--vocab-size 32768"), (), "--vocab-size before the --"),
        (words(without="--hidden-size 1024"), (), "--hidden-size: not given"),
        (words(without="--micro-batch-size 2"), (), "--micro-batch-size: not given"),
        (words("--hidden-size 1,024"), (), "--hidden-size: '1,024'"),
        (
            words("--context-parallel-size 0"),
            (),
            "--context-parallel-size: '0'; must be a whole number above",
        ),
        (words("--expert-tensor-parallel-size 4"), (), "--expert-tensor-parallel-size: 4; must be 1, or"),
        (
            words("--num-experts 8 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1"),
            (),
            "--expert-model-parallel-size: 8; must divide TP x DP x CP (4)",
        ),
        (words("--moe-layer-freq 2 --num-experts 4"), (), "--moe-layer-freq"),
        (words("--fp8-format hybrid"), ("--cluster", "A100"), "model.precision: fp8"),
        (words(), ("--cluster", "H100", "--global-batch", "8"), "batch: given by the command as well"),
        (words(), ("--cluster", "missing.json"), "missing.json"),
        (words(), ("--cluster", "H9000"), "device 'H9000': unknown"),
        (words(start="torchrun --nproc-per-node gpu x.py"), (), "how many processes"),
        (words(start="deepspeed x.py"), (), "a DeepSpeed command"),
        (words(start="bash"), (), "not supported"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    command: list[str], options: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *(options or ("--cluster", "H100")), "--", *command]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.strip().splitlines()) == 1


def test_a_key_that_nothing_reads_is_refused_beside_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A q.yaml has keys that the planner leaves to the tuner."""
    monkeypatch.chdir(tmp_path)
    command = ["--cluster", "H100", "--json", "--", *words()]
    (tmp_path / "job.yaml").write_text("serach: {tensor_parallel: 4}\n")
    assert main(["plan", "job.yaml", *command]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "job.yaml: serach: {'tensor_parallel': 4}: unknown key; did you mean search?" in line
    (tmp_path / "q.yaml").write_text("run: r\nstudy: {trials: 5}\nsearch: {tensor_parallel: 1}\n")
    assert main(["plan", "q.yaml", *command]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["layout"]["tensor_parallel"] == 1


def test_no_devices_and_other_devices_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--", *words()]) == 2
    assert "cluster: missing; name it with --cluster" in capsys.readouterr().err
    (tmp_path / "cluster.json").write_text(json.dumps(make_cluster(per_node=2, device="H100")))
    assert main(["plan", "--cluster", "cluster.json", "--", *words()]) == 2
    assert "4 devices; the command starts 8 processes" in capsys.readouterr().err
    assert main(["plan"]) == 2
    assert "no job is given; name a JOB.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more",
    ["--cuda-graph-impl local", "--inprocess-restart", "--num-distributed-optimizer-instances 2"],
)
def test_flags_that_the_runtime_refuses_leave_the_frameworks_schedules(more: str) -> None:
    search = {"pipeline_parallel": 2, "schedule": ["stock", "zb-h1", "searched"]}
    sections = {"cluster": CLUSTER, "search": search}

    def planned(flags: str) -> Ranking:
        return planned_ranking(
            job_of_command(parse_command(words(flags)), sections=sections).request, top=100
        )

    free, kept = planned(""), planned(more)
    assert "zb-h1" in {ranked.schedule_label for ranked in free.best}
    assert {ranked.schedule_label.partition(" ")[0] for ranked in kept.best} <= {"1f1b", "interleaved"}
    (line,) = set(kept.limits) - set(free.limits)
    assert line.startswith(f"custom schedules: none, because of {more.partition(' ')[0]}: ")
