"""A plan whose schedule is ours: applied by the entry as any other, or left to Megatron's own with a line."""

import socket
from argparse import Namespace
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.errors import PlanError
from quartet_plugin.megatron.runtime.install import prepare_plan
from quartet_plugin.megatron.runtime.refusals import (
    layers_need_full_backwards,
    needs_full_backwards,
    without_alignment,
)
from quartet_plugin.model.custom_schedule import CustomSchedule
from quartet_plugin.model.plan import Plan, ScheduleChoice, write_plan
from quartet_plugin.protocol.attempt_files import read_shared
from quartet_plugin.protocol.rank_files import RankReport
from quartet_plugin.runtime.activation_tracker import SavedTensorTracker
from quartet_plugin.runtime.programs import make_schedule, schedule_spec_of
from quartet_plugin.runtime.records import NullRecorder, Recorder
from quartet_plugin.schedule.choice import choice_of
from quartet_plugin.schedule.named import named
from quartet_plugin.space.runtime_refusals import REFUSED, refusal
from quartet_plugin.trial.as_planned import difference_from
from tests.megatron.entry_launch import MEGATRON_FLAGS, SCRIPT, Launch, launch, make_plan, write_trial
from tests.megatron.native import native_flags
from tests.megatron.same_training import train_alone
from tests.runtime.pipelines import stage_costs

STRICT_SCRIPT = Path(__file__).parents[1] / "nccl_pretrain.py"
V = (0, 1, 1, 0)
ON = {"cuda_graph_impl": "local", "optimizer": "dist_muon"}


def custom_plan(**changes: Any) -> Plan:
    """ZB-V on two ranks, written as a named schedule unless `changes` say otherwise."""
    choice = choice_of(named("zb-v", num_devices=2, num_microbatches=4), stage_costs(V))
    plan = make_plan(split=(2, 2, 1, 1), pipeline=2, chunks=2, group=2)
    return replace(plan, schedule=ScheduleChoice(name="custom", custom=replace(choice, **changes)))


def choice(**changes: Any) -> CustomSchedule:
    made = custom_plan(**changes).schedule.custom
    assert made is not None
    return made


@pytest.mark.parametrize("feature", REFUSED, ids=lambda feature: feature.dest)
def test_a_feature_keeps_megatrons_own_schedule_and_is_named_by_its_flag(feature: Any) -> None:
    args = Namespace(**{feature.dest: ON.get(feature.dest, 2)})
    line = refusal(args)
    assert line is not None
    assert line.startswith(f"{feature.flag}: ")
    prepared, notes = prepare_plan(custom_plan(), args, on_cpu=True)
    assert prepared is None
    assert len(notes) == 1
    assert "zb-v" in notes[0]


@pytest.mark.parametrize(("num_microbatches", "group", "is_refused"), [
    (4, None, False), (5, None, True), (1, None, True), (5, 3, False), (4, 3, True), (4, 4, False),
])  # fmt: skip
def test_virtual_stages_need_microbatches_that_megatron_interleaves(
    num_microbatches: int, group: int | None, is_refused: bool
) -> None:
    """The rule is Megatron's: the group's size, PP at least, and what is left over."""
    plan = custom_plan()
    made_for = replace(plan.made_for, global_batch_size=num_microbatches * plan.layout.micro_batch_size)
    planned = replace(plan, made_for=made_for)
    assert planned.num_microbatches == num_microbatches
    args = Namespace(inprocess_restart=True, microbatch_group_size_per_vp_stage=group)
    if not is_refused:
        assert prepare_plan(planned, args, on_cpu=True)[0] is None
        return
    with pytest.raises(
        PlanError, match=f"^--inprocess-restart: .* {num_microbatches} microbatches in groups"
    ):
        prepare_plan(planned, args, on_cpu=True)


def test_one_stage_a_device_gives_way_for_any_number_of_microbatches() -> None:
    made = choice_of(named("zb-h1", num_devices=2, num_microbatches=3), stage_costs((0, 1)))
    plan = make_plan(split=(3, 3), pipeline=2, global_batch_size=6)
    plan = replace(plan, schedule=ScheduleChoice(name="custom", custom=made))
    assert plan.num_microbatches % 2 == 1
    assert prepare_plan(plan, Namespace(inprocess_restart=True), on_cpu=True)[0] is None


def test_no_feature_refuses_what_megatron_defaults_to() -> None:
    defaults = Namespace(
        cuda_graph_impl="none", optimizer="adam", num_distributed_optimizer_instances=1, mtp_num_layers=1,
        gtp_weight_remat_size=1, expert_gtp_weight_remat_size=1, transformer_impl="local", num_experts=None,
        align_grad_reduce=True, align_param_gather=True, recompute_granularity="selective",
    )  # fmt: skip
    assert refusal(defaults) is None
    assert needs_full_backwards(defaults) is None


@pytest.mark.parametrize("feature", REFUSED, ids=lambda feature: feature.dest)
def test_a_refused_feature_is_one_of_this_megatron(feature: Any) -> None:
    """Its argument is one that the parser makes, or that Megatron derives; its flag sets something."""
    from megatron.core.transformer import TransformerConfig

    flags = native_flags()
    derived = {field.name for field in fields(TransformerConfig)}
    has_flag = feature.dest in {action.dest for action in flags._parser._actions}
    assert has_flag or feature.dest in derived
    if has_flag:
        assert feature.flag == flags.flag_of(feature.dest)


def words_of(*flags: str) -> Namespace:
    return native_flags().values([*MEGATRON_FLAGS, *flags])


REFUSED_WORDS = {
    "--cuda-graph-impl local": "--cuda-graph-impl",
    "--overlap-moe-expert-parallel-comm": "--overlap-moe-expert-parallel-comm",
    "--use-megatron-fsdp": "--use-megatron-fsdp",
    "--use-torch-fsdp2": "--use-torch-fsdp2",
    "--hybrid-context-parallel": "--hybrid-context-parallel",
    "--defer-embedding-wgrad-compute": "--defer-embedding-wgrad-compute",
    "--delay-wgrad-compute": "--delay-wgrad-compute",
    "--tensor-parallel-num-weight-shards 2": "--tensor-parallel-num-weight-shards",
}


@pytest.mark.parametrize("words", REFUSED_WORDS)
def test_megatrons_own_words_turn_it_on(words: str) -> None:
    assert refusal(words_of()) is None
    line = refusal(words_of(*words.split()))
    assert line is not None
    assert line.startswith(f"{REFUSED_WORDS[words]}: ")


def test_only_the_alignment_of_reductions_is_turned_off_and_said() -> None:
    # Both are on unless turned off, and act only with the overlaps.
    assert without_alignment(words_of()) == {}
    overlapped = words_of("--overlap-grad-reduce", "--overlap-param-gather", "--use-distributed-optimizer")
    assert refusal(overlapped) is None
    assert (overlapped.align_grad_reduce, overlapped.align_param_gather) == (True, True)
    assert without_alignment(overlapped) == {"align_grad_reduce": False}
    assert native_flags().words_for({"align_grad_reduce": False}) == ["--no-align-grad-reduce"]
    assert without_alignment(words_of("--overlap-grad-reduce", "--no-align-grad-reduce")) == {}
    prepared, notes = prepare_plan(custom_plan(), overlapped, on_cpu=True)
    assert prepared is not None
    assert [note for note in notes if "--no-align-grad-reduce is set" in note]


def test_timers_that_synchronize_the_device_are_said() -> None:
    for level, is_said in ((0, False), (1, False), (2, True)):
        prepared, notes = prepare_plan(custom_plan(), words_of("--timing-log-level", str(level)), on_cpu=True)
        assert prepared is not None
        assert any("--timing-log-level 2: " in note for note in notes) is is_said


def test_marks_are_taken_in_trials_alone() -> None:
    prepared, _ = prepare_plan(custom_plan(), words_of(), on_cpu=True)
    assert prepared is not None
    runtime = prepared.runtime
    assert [type(runtime.recorder), type(runtime.tracker)] == [NullRecorder, type(None)]
    runtime.measure(on_cpu=True)
    assert [type(runtime.recorder), type(runtime.tracker)] == [Recorder, SavedTensorTracker]


@pytest.mark.parametrize(
    "arguments",
    [
        {"recompute_granularity": "full"},
        {"num_experts": 8, "transformer_impl": "transformer_engine"},
        {"hybrid_layer_pattern": "M*|-*", "transformer_impl": "transformer_engine"},
        {"transformer_impl": "transformer_engine"},
    ],
    ids=("recompute", "experts", "state space", "engine"),
)
def test_backwards_stay_whole_where_splitting_does_not_pay_or_is_not_possible(
    arguments: dict[str, Any],
) -> None:
    assert needs_full_backwards(Namespace(**arguments)) is not None
    spec = schedule_spec_of(choice(), num_microbatches=4, full_backward=True)
    schedule = make_schedule(spec, 4)
    assert {a.kind.name for d in range(2) for a in schedule.actions(d)} == {"F", "B"}


def test_the_report_of_a_job_has_the_reason_of_its_layers_and_leaves_recomputation_to_the_plan() -> None:
    assert layers_need_full_backwards(Namespace(recompute_granularity="full")) is None
    reason = layers_need_full_backwards(Namespace(transformer_impl="transformer_engine", fp8="hybrid"))
    assert reason is not None
    assert reason.startswith("--fp8-format")


@pytest.mark.parametrize(("name", "words"), [("no-such", "no-such"), ("chimera", "two copies")])
def test_a_schedule_that_nothing_executes_is_refused(name: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        schedule_spec_of(choice(named=name), num_microbatches=4)


def difference_of(plan: Plan, folder: Path) -> str | None:
    """What the records that a training left in a folder say of a plan."""
    reports = [read_shared(RankReport, folder / f"rank-{k}.json") for k in range(plan.layout.world_size)]
    return difference_from(plan, reports)


def train(plan: Plan, folder: Path, weights: Path | None, *, script: Path = SCRIPT) -> Launch:
    trial = write_trial(folder, measure=5, plan=plan, weights=weights)
    write_plan(plan, path=folder / "plan.json")
    ours = ["--quartet-plan", str(folder / "plan.json"), "--quartet-trial", str(trial)]
    return launch(
        plan.layout.world_size,
        [*MEGATRON_FLAGS, *ours, "--quartet-device", "cpu"],
        folder=folder,
        script=script,
    )


def test_the_entry_applies_it_on_moved_ranks(tmp_path: Path) -> None:
    """On groups as strict as NCCL: without a device, a moved rank's first barrier takes another's."""
    alone = train_alone(make_plan(split=(6,)), folder=tmp_path / "one", command=MEGATRON_FLAGS)
    reference = alone.launch
    mapping = make_plan(split=(2, 4), pipeline=2, order=(1, 0)).mapping
    planned = replace(custom_plan(), mapping=mapping)
    done = train(planned, tmp_path / "v", alone.weights, script=STRICT_SCRIPT)
    assert any(line.startswith("quartet: mapping: rank 0 on ") for line in done.told)
    assert done.code == 0, done.output[-3000:]
    assert difference_of(planned, tmp_path / "v") is None
    assert difference_of(make_plan(split=(6,)), tmp_path / "one") is None
    assert difference_of(custom_plan(), tmp_path / "v") == (
        f"mapping: rank 0 ran on {socket.gethostname()}:1, the plan has it on slot 0 of node 0"
    )
    assert done.losses() == pytest.approx(reference.losses(), rel=1e-6)
    assert done.grad_norms() == pytest.approx(reference.grad_norms(), rel=1e-6)
    # The last stage is on rank 0; Megatron prints on the last rank, which has the loss all the same.
    assert all(None not in [s["loss"] for s in ranks["iterations"]] for ranks in done.ranks.values())


@pytest.mark.parametrize(
    ("drop", "words"), [("1F1", "1F1 of device 1: missing"), ("2W3", "2W3 of device 1: missing")]
)
def test_a_missing_action_is_refused_before_any_process_group(drop: str, words: str, tmp_path: Path) -> None:
    schedule = named("zb-v", num_devices=2, num_microbatches=4)
    rows = tuple(tuple(str(a) for a in schedule.actions(device) if str(a) != drop) for device in range(2))
    done = train(custom_plan(orders=rows), tmp_path / "bad", None)
    assert done.code != 0
    assert any(words in line for line in done.told), done.output[-2000:]
    assert all(failure["kind"] == "plan" for failure in done.failures.values())
    assert done.failures
