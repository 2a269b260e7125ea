"""What ran is compared with the plan: any difference is none of its measurements."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.model.plan import Plan, ScheduleChoice, Split
from quartet_plugin.model.shape import LayerKinds
from quartet_plugin.model.tensor_partition import partition_from_label
from quartet_plugin.protocol.execution import Execution
from quartet_plugin.protocol.rank_files import RankReport
from quartet_plugin.schedule.choice import choice_of
from quartet_plugin.schedule.named import named
from quartet_plugin.space.knobs.registry import LAYOUT_KNOBS, OPTIONS
from quartet_plugin.trial.as_planned import difference_from, ran_modules
from quartet_plugin.trial.outcome import Cause, classify
from quartet_plugin.trial.request import Outcome
from tests.megatron.entry_launch import SHAPE, make_plan
from tests.schedule.orders import unit_costs
from tests.trial.executions import executed
from tests.trial.factory import evidence, report

UNTIED = replace(SHAPE, tied_embeddings=False)


def stock_plan(**changes: Any) -> Plan:
    """1F1B on two pipeline ranks."""
    return make_plan(**{"split": (4, 2), "pipeline": 2, "hosts": ("node-a",), **changes})


def custom_plan(name: str = "zb-v") -> Plan:
    """A schedule of the plugin's runtime on two pipeline ranks."""
    schedule = named(name, num_devices=2, num_microbatches=4)
    chunks = len(schedule.placement) // 2
    custom = choice_of(schedule, unit_costs(schedule))
    plan = make_plan(
        split=(2, 2, 1, 1) if chunks == 2 else (4, 2),
        pipeline=2,
        chunks=chunks,
        group=2 if chunks == 2 else None,
        hosts=("node-a",),
    )
    return replace(plan, schedule=ScheduleChoice(name="custom", custom=custom))


def reports_of(plan: Plan, change: Callable[[Execution], Execution] = lambda done: done) -> list[RankReport]:
    """Reports of all ranks, where the last one did something else."""
    done = [executed(plan, rank) for rank in range(plan.layout.world_size)]
    done[-1] = change(done[-1])
    return [
        report(
            slot.local,
            rank=rank,
            local_rank=slot.local,
            plan_key=plan.key,
            execution=done[rank],
        )
        for rank, slot in enumerate(plan.mapping.slots)
    ]


PLANS: dict[str, Callable[[], Plan]] = {
    "one device": lambda: make_plan(split=(6,), hosts=("node-a",)),
    "1f1b": stock_plan,
    "interleaved": lambda: stock_plan(split=(2, 2, 1, 1), chunks=2, group=2),
    "moved ranks": lambda: stock_plan(order=(1, 0)),
    "copies": lambda: stock_plan(data=2),
    "zb-v": custom_plan,
    "zb-h1": lambda: custom_plan("zb-h1"),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_ran_as_planned_is_no_difference(name: str) -> None:
    plan = PLANS[name]()
    assert difference_from(plan, reports_of(plan)) is None


def test_a_rank_without_layers_cuts_none() -> None:
    plan = stock_plan(split=(6, 0))

    def without_partition(done: Execution) -> Execution:
        knobs = {name: value for name, value in done.knobs.items() if name != "tensor_partition"}
        return replace(done, knobs=knobs)

    assert difference_from(plan, reports_of(plan, without_partition)) is None


def test_a_stage_of_a_hybrid_model_need_not_say_how_it_is_cut() -> None:
    shape = replace(SHAPE, layer_kinds=LayerKinds(attention=3, mlp=3, experts=0, state_space=0))
    plan = stock_plan(split=(1, 5), shape=shape, made_for_shape=shape)

    def without_partition(done: Execution) -> Execution:
        return replace(done, knobs={k: value for k, value in done.knobs.items() if k != "tensor_partition"})

    assert difference_from(plan, reports_of(plan, without_partition)) is None
    assert difference_from(stock_plan(), reports_of(stock_plan(), without_partition)) is not None


CHECKED = [knob for knob in LAYOUT_KNOBS if knob.name in executed(stock_plan(), 0).knobs]


def test_every_knob_of_a_layout_is_checked() -> None:
    left_out = {knob.name for knob in LAYOUT_KNOBS} - {knob.name for knob in CHECKED}
    assert left_out == {knob.name for knob in OPTIONS} | {"zero_stage"}


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
@pytest.mark.parametrize("knob", CHECKED, ids=lambda knob: knob.name)
def test_every_knob_counts(knob: Any, name: str) -> None:
    plan = PLANS[name]()
    planned = executed(plan, 0).knobs
    value = planned[knob.name]
    other: Any = "full" if isinstance(value, str) else not value if isinstance(value, bool) else value + 1
    for knobs in ({**planned, knob.name: other}, {k: v for k, v in planned.items() if k != knob.name}):
        found = difference_from(plan, reports_of(plan, lambda done: replace(done, knobs=knobs)))  # noqa: B023
        assert found is not None
        assert knob.title in found


def changed_actions(**changes: Any) -> Callable[[Execution], Execution]:
    def change(done: Execution) -> Execution:
        assert done.actions is not None
        return replace(done, actions=replace(done.actions, **changes))

    return change


def changed_ends(**changes: Any) -> Callable[[Execution], Execution]:
    def change(done: Execution) -> Execution:
        assert done.ends is not None
        return replace(done, ends=replace(done.ends, **changes))

    return change


def changed_stage(**changes: Any) -> Callable[[Execution], Execution]:
    return lambda done: replace(done, stages=(replace(done.stages[0], **changes), *done.stages[1:]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda done: replace(done, schedule="interleaved", actions=None), "executed schedule interleaved"),
        (lambda done: replace(done, actions=None), "planned zb-v"),
        (changed_actions(digest="0" * 64), "pipeline rank 1: the executed actions differ"),
        (changed_actions(num_split_backwards=0), "0 split backwards in 5 steps; zb-v plans 8 per step"),
        (changed_actions(num_full_backwards=40), "40 full backwards in 5 steps; zb-v plans 0 per step"),
        (lambda done: replace(done, num_microbatches=2), "2 microbatches ran, the plan has 4"),
        (lambda done: replace(done, stages=done.stages[:1]), "1 stages were built, the plan has 2"),
        (changed_stage(first_layer=0), "split: layers 0 to 2 were built, stage 1 of the plan has 2 to 4"),
        (changed_stage(num_layers=3), "split: layers 2 to 5 were built"),
        (changed_stage(has_head=True), "the embedding or the head is on another stage"),
        (changed_ends(last_device=1), "takes pipeline rank 1 for the last one, the plan has 0"),
        (changed_ends(is_last=True), "takes pipeline rank 0 for the last one"),
    ],
)
def test_any_difference_is_said(change: Callable[[Execution], Execution], words: str) -> None:
    plan = custom_plan()
    found = difference_from(plan, reports_of(plan, change))
    assert found is not None
    assert words in found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            changed_ends(embedding_devices=(0, 1)),
            "ranks [0, 1] share the embedding, the plan has [0]",
        ),
        (changed_ends(tied_copies_agree=False), "the two copies of the tied embedding are not equal"),
    ],
)
def test_the_ends_on_one_device_are_tied(change: Callable[[Execution], Execution], words: str) -> None:
    plan = custom_plan()
    reports = reports_of(plan)
    assert reports[0].execution is not None
    reports[0] = replace(reports[0], execution=change(reports[0].execution))
    assert words in str(difference_from(plan, reports))


def test_multi_token_prediction_and_its_copy_of_the_embedding_are_on_the_planned_stage() -> None:
    """Megatron's groups of a script that does not name that rank would sum the head's gradients with it."""
    plan = stock_plan(split=(2, 2, 1, 1), pipeline=4, shape=UNTIED, made_for_shape=UNTIED)
    split = Split(transformer_layers_per_stage=(3, 3, 0, 0), mtp_before_last=True)
    plan = replace(plan, split=split, made_for=replace(plan.made_for, mtp_layers=1))
    done = [executed(plan, rank) for rank in range(4)]
    assert difference_from(plan, ran_by(plan, done)) is None
    default = [changed_ends(embedding_devices=(0, 3))(done[0]), *done[1:]]
    words = "pipeline ranks [0, 3] share the embedding, the plan has [0, 2]"
    assert words in str(difference_from(plan, ran_by(plan, default)))
    (further,) = done[2].stages
    without = [*done[:2], replace(done[2], stages=(replace(further, mtp_layers=None),)), done[3]]
    words = "no layers of multi-token prediction were built on stage 2, the plan has 1 there"
    assert words in str(difference_from(plan, ran_by(plan, without)))


def test_an_untied_head_shares_nothing() -> None:
    """Megatron's own script then names the first rank alone."""
    plan = stock_plan(shape=UNTIED, made_for_shape=UNTIED)
    groups = ((0,), ())
    done = [
        changed_ends(embedding_devices=shared)(executed(plan, rank)) for rank, shared in enumerate(groups)
    ]
    assert difference_from(plan, ran_by(plan, done)) is None
    tied = stock_plan()
    assert "share the embedding, the plan has [0, 1]" in str(difference_from(tied, ran_by(tied, done)))


def test_ranks_on_other_slots_or_missing_are_a_difference() -> None:
    plan, moved = stock_plan(), stock_plan(order=(1, 0))
    assert "mapping: rank 0 ran on node-a:0" in str(difference_from(moved, reports_of(plan)))
    assert "1 ranks ran, the plan has 2" in str(difference_from(plan, reports_of(plan)[:1]))


@pytest.mark.parametrize("is_recorded", [True, False])
def test_only_what_ran_as_planned_is_a_measurement(is_recorded: bool) -> None:
    plan = stock_plan()
    reports = reports_of(plan)
    if not is_recorded:
        reports[1] = replace(reports[1], execution=None)
    given = evidence(reports=tuple(reports))
    verdict = classify(replace(given, spec=replace(given.spec, plan_key=plan.key), plan=plan))
    if is_recorded:
        assert verdict.outcome is Outcome.OK
    else:
        assert (verdict.outcome, verdict.cause) == (Outcome.NOT_AS_PLANNED, Cause.NOT_AS_PLANNED)
        assert verdict.reason == "rank 1 recorded no plan that it ran"
        assert verdict.iteration_s == ()


def test_a_plan_that_cannot_be_read_is_not_measured() -> None:
    plan = stock_plan()
    given = evidence(reports=tuple(reports_of(plan)))
    verdict = classify(replace(given, spec=replace(given.spec, plan_key=plan.key)))
    assert verdict.outcome is Outcome.NOT_AS_PLANNED


def on_the_way(plan: Plan, rank: int) -> Execution:
    """What a rank of the plan does while the batch is half of what it becomes."""
    made_for = replace(plan.made_for, global_batch_size=plan.made_for.global_batch_size // 2)
    custom = plan.schedule.custom
    name = custom.named if custom is not None else None
    schedule = plan.schedule if name is None else custom_plan_of(name, plan.num_microbatches // 2)
    return executed(replace(plan, made_for=made_for, schedule=schedule), rank)


def custom_plan_of(name: str, num_microbatches: int) -> ScheduleChoice:
    """The named schedule for so many microbatches."""
    schedule = named(name, num_devices=2, num_microbatches=num_microbatches)
    return ScheduleChoice(name="custom", custom=choice_of(schedule, unit_costs(schedule)))


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_batch_that_grows_is_planned_only_where_the_job_says_so(name: str) -> None:
    plan = PLANS[name]()
    done = [on_the_way(plan, rank) for rank in (0, 1)]
    grows = [replace(rank, ramps_batch=True) for rank in done]
    assert difference_from(plan, ran_by(plan, grows)) is None
    assert "2 microbatches ran, the plan has 4" in str(difference_from(plan, ran_by(plan, done)))


def test_other_actions_while_the_batch_grows_are_a_difference() -> None:
    plan = custom_plan()
    done = [replace(on_the_way(plan, rank), ramps_batch=True) for rank in (0, 1)]
    wrong = [done[0], changed_actions(digest="0" * 64)(done[1])]
    assert "the executed actions differ" in str(difference_from(plan, ran_by(plan, wrong)))


def ran_by(plan: Plan, done: list[Execution]) -> list[RankReport]:
    """Reports of ranks that did this."""
    return [
        report(slot.local, rank=rank, local_rank=slot.local, plan_key=plan.key, execution=done[rank])
        for rank, slot in enumerate(plan.mapping.slots)
    ]


MODULES = ("ColumnParallelLinear", "DotProductAttention", "VocabParallelEmbedding")


@pytest.mark.parametrize(
    ("ran", "words"),
    [
        ((MODULES[:2], MODULES[1:]), None),
        ((MODULES, (*MODULES, "Softmax", "FlashAttention")), None),
        ((MODULES[:2], MODULES[:2]), "VocabParallelEmbedding did not run"),
        ((MODULES, (*MODULES, "TEDotProductAttention")), "TEDotProductAttention ran"),
    ],
)
def test_the_modules_of_all_ranks_are_those_of_the_command(
    ran: tuple[tuple[str, ...], ...], words: str | None
) -> None:
    plan = stock_plan()
    done = [replace(executed(plan, rank), modules=ran[rank]) for rank in (0, 1)]
    difference = difference_from(plan, ran_by(plan, done), modules=MODULES)
    assert difference is None if words is None else words in str(difference)
    assert difference_from(plan, ran_by(plan, done)) is None


@pytest.mark.parametrize(
    ("ran", "words"),
    [
        (("GridLinear", "GridMlp", *MODULES[1:]), None),
        (("RingColumnLinear", "RingRowLinear", *MODULES), None),
        (("GridLinear", MODULES[2]), "DotProductAttention did not run"),
        (("GridLinear", "TEDotProductAttention", *MODULES), "TEDotProductAttention ran"),
    ],
)
def test_layers_of_a_partition_stand_for_the_commands(ran: tuple[str, ...], words: str | None) -> None:
    stock = make_plan(split=(6,), tensor=2, hosts=("node-a",))
    layout = replace(stock.layout, sequence_parallel=True, tensor_partition=partition_from_label("rings"))
    plan = replace(stock, layout=layout)
    done = [replace(executed(plan, rank), modules=ran) for rank in (0, 1)]
    difference = difference_from(plan, ran_by(plan, done), modules=(*MODULES, "RowParallelLinear", "MLP"))
    assert difference is None if words is None else words in str(difference)


def test_a_partitions_layers_in_a_plan_without_one_are_a_difference() -> None:
    plan = stock_plan()
    done = [replace(executed(plan, rank), modules=(*MODULES, "GridLinear")) for rank in (0, 1)]
    assert "GridLinear ran" in str(difference_from(plan, ran_by(plan, done), modules=MODULES))


def test_a_plan_that_turns_megatron_fsdp_on_has_its_wrapper() -> None:
    stock = make_plan(split=(6,), data=2, hosts=("node-a",))
    ran = (*MODULES, "FullyShardedDataParallel", "MegatronFSDP")
    usual = (*MODULES, "DistributedDataParallel")
    plan = replace(stock, layout=stock.layout.with_setting("use_megatron_fsdp", True))
    knobs = {"use_megatron_fsdp": True}
    done = [executed(plan, rank) for rank in (0, 1)]
    done = [replace(rank, modules=ran, knobs={**rank.knobs, **knobs}) for rank in done]
    assert difference_from(plan, ran_by(plan, done), modules=usual) is None
    as_before = [replace(rank, modules=ran) for rank in (executed(stock, 0), executed(stock, 1))]
    assert "MegatronFSDP ran" in str(difference_from(stock, ran_by(stock, as_before), modules=usual))
    wrong = [replace(rank, knobs={**rank.knobs, "use_megatron_fsdp": False}) for rank in done]
    words = "use megatron fsdp off ran, the plan has on"
    assert words in str(difference_from(plan, ran_by(plan, wrong), modules=usual))


def test_modules_are_not_compared_where_they_are_not_known_or_the_shape_differs() -> None:
    plan = stock_plan()
    assert ran_modules(reports_of(plan)) is None
    assert difference_from(plan, reports_of(plan), modules=MODULES) is None
    shape = replace(plan.made_for.shape, ffn_hidden_size=plan.shape.ffn_hidden_size + 8)
    deeper = replace(plan, made_for=replace(plan.made_for, shape=shape))
    done = [replace(executed(deeper, rank), modules=("Other",)) for rank in (0, 1)]
    assert difference_from(deeper, ran_by(deeper, done), modules=MODULES) is None
