"""`quartet show` and `quartet export`: a plan for reading, as flags, and as the script best/native.sh."""

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli.export import export, flags_of, lines, native_path, native_text, write_native
from quartet_plugin.cli.main import main
from quartet_plugin.errors import PlanError
from quartet_plugin.model.measurement import Comparison, Interval, Measurement
from quartet_plugin.model.plan import Mapping, Plan, ScheduleChoice, Slot, Split, write_plan
from quartet_plugin.model.shape import LayerKinds
from quartet_plugin.report.tables import changes, plan_lines
from quartet_plugin.space.knobs import registry
from tests.model.plans import PLAN
from tests.report.histories import WINNER
from tests.short_searches import short_searches as short_searches
from tests.space.jobs import make_layout, make_shape
from tests.space.knobs.made_up import ROPE_FUSION
from tests.tuner.fakes import begin


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
    write_plan(replace(PLAN, mapping=Mapping(slots=tuple(sorted(PLAN.mapping.slots)))), path=path)
    assert main(["export", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "# order of RANKs: the launcher's own"


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


def test_a_flag_that_turns_a_switch_off_has_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "SETTINGS", (ROPE_FUSION,))
    off, on = (
        export(replace(PLAN, layout=PLAN.layout.with_setting("rope_fusion", value)))
        for value in (False, True)
    )
    assert ROPE_FUSION.flag in lines(off)
    assert ROPE_FUSION.flag not in off["leave_out"]
    assert ROPE_FUSION.flag not in on["flags"]
    assert ROPE_FUSION.flag in on["leave_out"]


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


def test_the_stages_of_a_hybrid_model_are_in_its_pattern_alone() -> None:
    kinds = LayerKinds(attention=1, mlp=3, experts=0, state_space=2)
    with pytest.raises(PlanError, match=r"--hybrid-layer-pattern.*`quartet train`"):
        export(replace(PLAN, shape=replace(PLAN.shape, layer_kinds=kinds)))


def hybrid_plan(pattern: str, framework_pattern: str | None = None, **layout: Any) -> Plan:
    kinds = LayerKinds(attention=0, mlp=0, experts=0, state_space=0).with_pattern(pattern)
    kinds = replace(kinds, framework_pattern=framework_pattern)
    shape = make_shape(num_layers=len(pattern), layer_kinds=kinds)
    plan = replace(PLAN, shape=shape, made_for=replace(PLAN.made_for, shape=shape))
    if not layout:
        return plan
    split = Split(transformer_layers_per_stage=(len(pattern),))
    schedule = ScheduleChoice(name="no-pipelining")
    return replace(plan, layout=make_layout(**layout), split=split, schedule=schedule)


def test_a_hybrid_models_pattern_has_the_plans_stages() -> None:
    """Also one whose first letter would be taken for a flag, and one with a single stage of several."""
    for pattern, written, flag in (
        ("M-*M-*M-", None, "--hybrid-layer-pattern 'M-*M-*|M-'"),
        ("-M*-M-*M", None, "'--hybrid-layer-pattern=-M*-M-|*M'"),
        ("M-*M-*M-", "M-+M-+M-/+-/+-", "--hybrid-layer-pattern 'M-+M-+|M-/+-/+-'"),
    ):
        content = export(hybrid_plan(pattern, written))
        assert flag in lines(content)
        assert "--pipeline-model-parallel-layout" not in content["flags"]
        assert "--hybrid-override-pattern" in content["leave_out"]
    single = export(hybrid_plan("M-*M-*M-", pipeline_parallel=1, data_parallel=2))
    assert single["flags"]["--hybrid-layer-pattern"] == "M-*M-*M-"


def test_a_script_takes_a_pattern_that_begins_with_a_dash() -> None:
    plan = hybrid_plan("-M*-M-*M")
    plan = replace(plan, mapping=Mapping(slots=tuple(sorted(plan.mapping.slots))))
    command = ("torchrun", "pretrain.py", "--hybrid-layer-pattern=-M*-M-*M")
    text = native_text(plan, command=command, cwd=Path())
    assert "'--hybrid-layer-pattern=-M*-M-|*M'" in text


def test_what_the_plan_keeps_of_recomputation_is_not_written() -> None:
    """The command may say more than a plan can: how many layers, and by which method."""
    base = replace(PLAN.made_for.baseline, layout=make_layout(recompute="full"))
    plan = replace(PLAN, made_for=replace(PLAN.made_for, baseline=base), layout=make_layout(recompute="full"))
    assert not [flag for flag in [*flags_of(plan), *export(plan)["leave_out"]] if "recompute" in flag]


def with_baseline(plan: Plan, **layout: Any) -> Plan:
    baseline = replace(plan.made_for.baseline, layout=make_layout(**layout))
    return replace(plan, made_for=replace(plan.made_for, baseline=baseline))


def test_modules_of_a_plan_take_the_place_of_a_layer_recompute_of_experts() -> None:
    """The command's --moe-layer-recompute would add a module, and may be what makes it selective."""
    selective = make_layout(recompute="selective")
    kept = with_baseline(replace(PLAN, layout=selective), recompute="selective")
    assert "--moe-layer-recompute" not in export(kept)["leave_out"]
    layout = selective.with_setting("recompute_modules", "moe_act")
    changed = with_baseline(replace(PLAN, layout=layout), recompute="selective")
    assert "--moe-layer-recompute" in export(changed)["leave_out"]
    assert flags_of(changed)["--recompute-granularity"] == "selective"
    assert "--moe-layer-recompute" in export(with_baseline(PLAN, recompute="selective"))["leave_out"]


@pytest.mark.parametrize(
    ("changed", "is_named"),
    [({}, False), ({"sequence_parallel": True}, True), ({"tensor_parallel": 1, "data_parallel": 2}, True)],
)
def test_activations_are_not_distributed_over_a_single_device_or_with_divided_sequences(
    changed: dict[str, Any], is_named: bool
) -> None:
    full: dict[str, Any] = {"recompute": "full", "tensor_parallel": 2, "pipeline_parallel": 1}
    plan = replace(
        PLAN,
        layout=make_layout(**{**full, **changed}),
        split=Split(transformer_layers_per_stage=(8,)),
        schedule=ScheduleChoice(name="no-pipelining"),
    )
    left_out = export(with_baseline(plan, **full))["leave_out"]
    assert ("--distribute-saved-activations" in left_out) == is_named


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


def test_a_ds_config_with_comments_is_exported_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hjson")
    path, config = tmp_path / "plan.json", tmp_path / "ds.json"
    write_plan(replace(PLAN, made_for=replace(PLAN.made_for, framework="deepspeed")), path=path)
    config.write_text('{"steps_per_print": 5, // A comment\n}')
    assert main(["export", str(path), "--ds-config", str(config)]) == 0
    assert json.loads(capsys.readouterr().out)["steps_per_print"] == 5


STOCK_MAPPING = Mapping(slots=(Slot(node=0, local=0), Slot(node=0, local=1)))
BASELINE = replace(PLAN, split=PLAN.made_for.baseline.split, mapping=STOCK_MAPPING)


def measured(median: float) -> Measurement:
    return Measurement(
        iteration_s=Interval(median=median, low=median * 0.9, high=median * 1.1),
        tokens_per_s=8192 / median,
        model_flops_per_s_per_device=1e10 / median,
        peak_memory_bytes=1 << 30,
        num_launches=5,
        num_iterations=50,
    )


def with_gain(plan: Plan) -> Plan:
    comparison = Comparison(
        objective="tokens_per_s",
        plan=measured(0.5),
        baseline=measured(0.65),
        speedup=Interval(median=1.3, low=1.24, high=1.37),
    )
    return replace(plan, measurement=comparison)


def test_programs_get_a_plan_with_its_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(WINNER, path=tmp_path / "plan.json")
    assert main(["show", str(tmp_path / "plan.json"), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["schema_version"] == 1
    assert content["plan"] == json.loads((tmp_path / "plan.json").read_text())
    assert content["changes"] == [
        {"part": "split", "before": "4+4", "after": "6+2", "class": "A"},
        {"part": "mapping", "before": "stock", "after": "1,0", "class": "A"},
    ]
    assert content["speedup"]["median"] == pytest.approx(1.25)
    assert content["predicted_speedup"] == pytest.approx(1.25)
    assert content["trial_iteration_s"] is None


def test_a_plan_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    write_plan(with_gain(PLAN), path=path)
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    for words in ("6+2", "1f1b", "1,0", "made for", "1.30x (1.24x to 1.37x)", "class A"):
        assert words in shown


def test_every_change_has_its_class() -> None:
    found = {change.part: change.change_class for change in changes(PLAN)}
    assert found == {"split": "A", "mapping": "A"}
    assert changes(BASELINE) == ()
    smaller = replace(BASELINE, layout=make_layout(micro_batch_size=2))
    assert [c.change_class for c in changes(smaller)] == ["B"]
    deeper = replace(
        BASELINE, shape=make_shape(num_layers=10), split=Split(transformer_layers_per_stage=(5, 5))
    )
    assert {c.part: c.change_class for c in changes(deeper)} == {
        "shape": "D",
        "split": "A",
    }
    assert any("class D" in line for line in plan_lines(deeper))
    assert not any("class D" in line for line in plan_lines(PLAN))


def test_a_plan_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    for content in ("", "[]", "{}", '{"digest": 1}', "\x00"):
        path.write_text(content)
        assert main(["show", str(path)]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert main(["show", str(tmp_path / "none.json")]) == 2
    assert main(["show", str(path), "--", "torchrun", "x.py"]) == 2


NATIVE_PLAN = replace(PLAN, mapping=Mapping(slots=tuple(sorted(PLAN.mapping.slots))))
PROGRAM = '#!/bin/sh\npwd > seen\nprintf "%s\\n" "$@" >> seen\n'


def test_the_script_runs_the_command_with_the_plans_flags(tmp_path: Path) -> None:
    program = tmp_path / "a program"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    command = (str(program), "--num-layers", "4", "--lr", "3e-4", "it's; $(touch pwned)")
    script = tmp_path / "native.sh"
    script.write_text(native_text(NATIVE_PLAN, command=command, cwd=tmp_path))
    subprocess.run(["sh", str(script)], check=True, cwd="/", timeout=30)
    where, *words = (tmp_path / "seen").read_text().splitlines()
    assert where == str(tmp_path)
    assert words[:5] == list(command[1:])
    rest = words[5:]
    for name, value in flags_of(NATIVE_PLAN).items():
        at = rest.index(name)
        assert value is True or rest[at + 1] == str(value)
    assert "--pipeline-model-parallel-layout" in rest
    assert not (tmp_path / "pwned").exists()


def test_the_script_sets_what_megatron_needs_with_more_tensor_parallelism(tmp_path: Path) -> None:
    plan = replace(
        NATIVE_PLAN,
        layout=replace(NATIVE_PLAN.layout, tensor_parallel=2, pipeline_parallel=1),
        split=Split(transformer_layers_per_stage=(NATIVE_PLAN.shape.num_layers,)),
        schedule=ScheduleChoice(name="no-pipelining"),
    )
    line = "export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
    raised = native_text(plan, command=("torchrun", "x.py"), cwd=tmp_path)
    assert line in raised.splitlines()
    assert line not in native_text(NATIVE_PLAN, command=("torchrun", "x.py"), cwd=tmp_path)


def test_the_script_sets_what_transformer_engine_reads_where_modules_are_offloaded(tmp_path: Path) -> None:
    layout = NATIVE_PLAN.layout.with_setting("offload_modules", "core_attn")
    text = native_text(replace(NATIVE_PLAN, layout=layout), command=("torchrun", "x.py"), cwd=tmp_path)
    assert "export NVTE_CPU_OFFLOAD_V1=${NVTE_CPU_OFFLOAD_V1:-1}" in text.splitlines()
    assert "--fine-grained-activation-offloading --offload-modules core_attn" in text
    none = replace(NATIVE_PLAN, layout=NATIVE_PLAN.layout.with_setting("offload_modules", "none"))
    assert "export" not in native_text(none, command=("torchrun", "x.py"), cwd=tmp_path)


def test_the_script_of_a_plan_with_megatron_fsdp_unsets_what_that_refuses(tmp_path: Path) -> None:
    one_stage = replace(
        NATIVE_PLAN,
        layout=replace(NATIVE_PLAN.layout, tensor_parallel=2, pipeline_parallel=1),
        split=Split(transformer_layers_per_stage=(NATIVE_PLAN.shape.num_layers,)),
        schedule=ScheduleChoice(name="no-pipelining"),
    )
    texts = {}
    for value in (True, False):
        layout = one_stage.layout.with_setting("use_megatron_fsdp", value)
        plan = replace(one_stage, layout=layout)
        texts[value] = native_text(plan, command=("torchrun", "x.py"), cwd=tmp_path)
    assert "unset CUDA_DEVICE_MAX_CONNECTIONS" in texts[True].splitlines()
    assert "export" not in texts[True]
    assert "--ckpt-format fsdp_dtensor" in texts[True]
    assert "unset" not in texts[False]
    assert "export CUDA_DEVICE_MAX_CONNECTIONS" in texts[False]
    # A command that has it keeps it, and its own variable.
    kept = native_text(one_stage, command=("torchrun", "x.py", "--use-megatron-fsdp"), cwd=tmp_path)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in kept
    off = replace(one_stage, layout=one_stage.layout.with_setting("use_megatron_fsdp", False))
    assert {"--use-megatron-fsdp", "--ckpt-format"} <= set(export(off)["leave_out"])


@pytest.mark.parametrize(
    ("start", "refused"),
    [
        (("env", "CUDA_DEVICE_MAX_CONNECTIONS=1"), "CUDA_DEVICE_MAX_CONNECTIONS=1"),
        (
            ("srun", "--export=ALL,CUDA_DEVICE_MAX_CONNECTIONS=1"),
            "--export=ALL,CUDA_DEVICE_MAX_CONNECTIONS=1",
        ),
        (("env", "CUDA_DEVICE_MAX_CONNECTIONS=16"), None),
        ((), None),
    ],
)
def test_a_word_that_sets_what_megatron_fsdp_refuses_is_named(
    start: tuple[str, ...], refused: str | None
) -> None:
    command = (*start, "torchrun", "x.py")
    plan = replace(NATIVE_PLAN, layout=NATIVE_PLAN.layout.with_setting("use_megatron_fsdp", True))
    if refused is None:
        assert native_text(plan, command=command, cwd=Path("/"))
    else:
        with pytest.raises(PlanError, match=f"remove {refused} from the command: Megatron refuses 1 with"):
            native_text(plan, command=command, cwd=Path("/"))
    # A plan without it lets the command's variable be.
    assert native_text(NATIVE_PLAN, command=command, cwd=Path("/"))


@pytest.mark.parametrize(
    ("plan", "command", "says"),
    [
        (PLAN, ("torchrun", "x.py"), "changes the order of the ranks"),
        (NATIVE_PLAN, ("torchrun", "x.py", "--", "more"), "a -- of its own"),
        (
            NATIVE_PLAN,
            ("torchrun", "x.py", "--decoder-first-pipeline-num-layers=3"),
            "remove --decoder-first",
        ),
        (
            NATIVE_PLAN,
            ("torchrun", "x.py", "--account_for_loss_in_pipeline_split"),
            "remove --account-for-loss",
        ),
        (
            replace(NATIVE_PLAN, made_for=replace(NATIVE_PLAN.made_for, framework="deepspeed")),
            ("deepspeed", "x.py"),
            "takes no flags",
        ),
    ],
)
def test_what_flags_cannot_say_has_no_script(plan: Plan, command: tuple[str, ...], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        native_text(plan, command=command, cwd=Path("/"))


def test_a_type_that_needs_sizes_is_contradicted_and_no_other() -> None:
    """The command shares sequences and the plan does not."""
    plan = with_baseline(NATIVE_PLAN, context_parallel=2)
    assert "--cp-comm-type" in export(plan)["leave_out"]
    assert native_text(plan, command=("torchrun", "x.py", "--cp-comm-type", "p2p"), cwd=Path("/"))
    with pytest.raises(PlanError, match="remove --cp-comm-type from the command"):
        native_text(plan, command=("torchrun", "x.py", "--cp-comm-type=a2a+p2p"), cwd=Path("/"))


@pytest.mark.parametrize(
    ("command", "launcher", "says"),
    [
        (("bash", "train.sh"), "local", "bash may not give the words behind it to the training"),
        (("torchrun", "--nproc-per-node", "2", "bridged.py"), "local", "a Megatron-Bridge script takes no"),
        (("torchrun", "--nproc-per-node", "2", "x.py"), "slurm", "its trials ran on a launcher's nodes"),
    ],
)
def test_a_command_that_words_behind_it_do_not_reach_has_no_script(
    tmp_path: Path, command: tuple[str, ...], launcher: str, says: str
) -> None:
    (tmp_path / "bridged.py").write_text("import megatron.bridge\n")
    run = begin(tmp_path / "r")
    path = native_path(run.folder.path)
    path.parent.mkdir()
    path.touch()  # of an earlier version
    config = run.config.model_copy(update={"launcher": launcher})
    said = write_native(NATIVE_PLAN, run=replace(run, command=command, cwd=tmp_path, config=config))
    assert said.startswith(f"no native.sh: {says}")
    assert not path.exists()


def test_a_launcher_of_processes_gives_them_the_words(tmp_path: Path) -> None:
    run = begin(tmp_path / "r")
    native_path(run.folder.path).parent.mkdir()
    srun = replace(run, command=("srun", "python", "pretrain_gpt.py"))
    assert write_native(NATIVE_PLAN, run=srun) == f"sh {native_path(run.folder.path)}"


def test_a_script_is_written_replaced_and_removed(tmp_path: Path) -> None:
    run = begin(tmp_path / "r")
    path = native_path(run.folder.path)
    path.parent.mkdir()
    assert write_native(NATIVE_PLAN, run=run) == f"sh {path}"
    other = replace(NATIVE_PLAN, layout=make_layout(micro_batch_size=8))
    write_native(other, run=run)
    assert "--micro-batch-size 8" in path.read_text()
    assert write_native(PLAN, run=run).startswith("no native.sh: the plan changes the order of the ranks")
    assert not path.exists()
    assert write_native(None, run=run) == ""


def test_a_dispatcher_is_exported_with_its_back_end() -> None:
    layout = PLAN.layout.with_setting("moe_token_dispatcher", "flex-hybridep")
    exported = export(replace(PLAN, layout=layout))
    written = ["--moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend hybridep"]
    assert [line for line in lines(exported) if line.startswith("--moe")] == written
    assert "--moe-enable-deepep" in exported["leave_out"]
    plain = export(replace(PLAN, layout=PLAN.layout.with_setting("moe_token_dispatcher", "alltoall")))
    assert {"--moe-enable-deepep", "--moe-flex-dispatcher-backend"} <= set(plain["leave_out"])
