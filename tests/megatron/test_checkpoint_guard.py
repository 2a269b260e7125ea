"""Which checkpoints may be loaded onto which stages."""

from argparse import Namespace
from typing import Any

import pytest

from quartet_plugin.errors import PlanError
from quartet_plugin.megatron.checkpoints import (
    ATTRIBUTE,
    CheckpointGuard,
    Stages,
    loop,
    stages_kept,
    stages_of,
)
from quartet_plugin.megatron.seams import resolve
from quartet_plugin.megatron.seams.declared import LOAD, SAVE
from tests.megatron.entry_launch import MEGATRON_FLAGS
from tests.megatron.native import native_flags


def arguments(*flags: str, **changes: Any) -> Namespace:
    """Megatron's arguments for six layers, as flags give them."""
    values = vars(native_flags().values([*MEGATRON_FLAGS, *flags]))
    return Namespace(**{**values, "use_distributed_optimizer": True, **changes})


EVEN = ("--pipeline-model-parallel-size", "2")
UNEVEN = (*EVEN, "--pipeline-model-parallel-layout", "Etttt|ttL")
SNAKE = (0, 1, 1, 0, 0, 1)
CHUNKS = (*EVEN, "--pipeline-model-parallel-layout", "Et|t|t|t|t|tL")


def state(saved: Namespace, sharding: str | None = "dp_reshardable") -> dict[str, Any]:
    return {"args": saved, "content_metadata": {"distrib_optim_sharding_type": sharding}}


def check(
    saved: Namespace,
    now: Namespace,
    *,
    form: str = "GLOBAL",
    sharding: str | None = "dp_reshardable",
    guard: CheckpointGuard | None = None,
) -> None:
    (guard or CheckpointGuard(has_plan=True)).check(state(saved, sharding), now, name="/ckpt", form=form)


def kept(saved: Namespace, *, placement: tuple[int, ...], slots: Any = None) -> Namespace:
    """The arguments as the guard of a run with this placement leaves them in the checkpoint."""
    stages = CheckpointGuard(placement=placement, slots=slots).stages(saved)
    assert stages is not None
    return Namespace(**{**vars(saved), ATTRIBUTE: stages.to_json()})


def test_the_seams_are_where_they_are_declared() -> None:
    for seam in (SAVE, LOAD):
        resolve(seam)


def test_stock_stages_are_read_from_arguments() -> None:
    assert stages_of(arguments(*UNEVEN)) == Stages(
        tensor_parallel=1, pipeline_parallel=2, layers=(4, 2), placement=(0, 1)
    )
    chunks = stages_of(arguments(*CHUNKS))
    assert chunks is not None
    assert chunks.placement == loop(6, 2) == (0, 1, 0, 1, 0, 1)
    assert stages_of(Namespace(num_layers=6)) is None


def test_a_hybrid_pattern_without_pipes_is_one_stage_of_all_ranks() -> None:
    stages = stages_of(arguments(*EVEN, hybrid_layer_pattern="M*M-"))
    assert stages is not None
    assert (stages.layers, stages.placement) == ("M*M-", (0,))
    assert "placed" not in stages.text


def test_what_is_kept_is_read_back() -> None:
    saved = kept(arguments(*CHUNKS), placement=SNAKE, slots=[(0, 1), (0, 0)])
    assert stages_kept(saved) == Stages(
        tensor_parallel=1,
        pipeline_parallel=2,
        layers=(1,) * 6,
        placement=SNAKE,
        slots=((0, 1), (0, 0)),
    )
    setattr(saved, ATTRIBUTE, {"layers": "torn"})
    assert stages_kept(saved) is None


def test_multi_token_prediction_on_another_stage_is_another_digest() -> None:
    layout, words = "pipeline_model_parallel_layout", {"mtp_num_layers": 1}
    last, before = (
        stages_of(arguments(*EVEN, **{**words, "pipeline_model_parallel_size": 3, layout: text}))
        for text in ("Ettt|ttt|mL", "Ettt|tttm|L")
    )
    assert last is not None
    assert before is not None
    assert last.layers == before.layers == (3, 3, 0)
    assert last.digest != before.digest
    assert before.text.endswith("multi-token prediction before the last stage")
    saved = kept(
        arguments(*EVEN, **{**words, "pipeline_model_parallel_size": 3, layout: "Ettt|tttm|L"}),
        placement=(0, 1, 2),
    )
    assert stages_kept(saved) == before


def test_the_digest_is_of_the_stages_alone() -> None:
    one, other = (stages_kept(kept(arguments(*CHUNKS), placement=SNAKE, slots=s)) for s in (None, [(0, 0)]))
    assert one is not None
    assert other is not None
    assert one.digest == other.digest
    assert one.digest != stages_of(arguments(*CHUNKS)).digest  # type: ignore[union-attr]


def test_the_same_stages_load_in_any_form() -> None:
    for form in ("GLOBAL", "LEGACY", "LOCAL"):
        check(arguments(*UNEVEN), arguments(*UNEVEN), form=form)


@pytest.mark.parametrize(
    ("form", "sharding", "cure"),
    [
        ("GLOBAL", "dp_reshardable", "--dist-ckpt-optim-fully-reshardable"),
        ("GLOBAL", "dp_zero_gather_scatter", "--no-load-optim"),
        ("GLOBAL", None, "--dist-ckpt-optim-fully-reshardable"),
        ("LEGACY", None, "--ckpt-format torch_dist"),
        ("LOCAL", "fully_reshardable", "--load"),
    ],
)
def test_another_split_is_refused_with_the_cure(form: str, sharding: str | None, cure: str) -> None:
    saved = arguments(*EVEN, ckpt_fully_parallel_save=False)
    with pytest.raises(PlanError, match=cure) as caught:
        check(saved, arguments(*UNEVEN), form=form, sharding=sharding)
    assert "split 3+3" in str(caught.value)
    assert "split 4+2" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_equal_split_on_another_placement_is_refused() -> None:
    # Equal sizes everywhere: Megatron itself would load it without a word.
    with pytest.raises(PlanError, match=r"placed on 0,1,1,0,0,1"):
        check(kept(arguments(*CHUNKS), placement=SNAKE), arguments(*CHUNKS))
    check(
        kept(arguments(*CHUNKS), placement=SNAKE),
        arguments(*CHUNKS),
        guard=CheckpointGuard(placement=SNAKE, has_plan=True),
    )


def test_what_names_its_weights_loads_anywhere() -> None:
    check(arguments(*EVEN), arguments(*UNEVEN), sharding="fully_reshardable")
    check(arguments(*EVEN, ckpt_fully_parallel_save=True), arguments(*UNEVEN), sharding=None)
    for change in ({"finetune": True}, {"no_load_optim": True}, {"use_distributed_optimizer": False}):
        check(arguments(*EVEN), arguments(*UNEVEN, **change))
    check(arguments(*EVEN, no_save_optim=True), arguments(*UNEVEN))


def test_a_local_checkpoint_needs_the_same_mapping() -> None:
    here = CheckpointGuard(slots=[(0, 0), (0, 1)], has_plan=True)
    saved = kept(arguments(*EVEN), placement=(0, 1), slots=[(0, 1), (0, 0)])
    with pytest.raises(PlanError, match="mapping"):
        check(saved, arguments(*EVEN), form="LOCAL", guard=here)
    check(saved, arguments(*EVEN), form="GLOBAL", guard=here)


def test_state_of_experts_in_another_order_is_refused() -> None:
    experts = ("--num-experts", "8", "--transformer-impl", "transformer_engine")
    alone, grouped = arguments(*EVEN, *experts), arguments(*EVEN, *experts, "--moe-grouped-gemm")
    for saved, now, order in (
        (grouped, alone, "grouped by product"),
        (alone, grouped, "one expert after the other"),
    ):
        with pytest.raises(
            PlanError, match=f"stores expert weights {order}; .* --dist-ckpt-optim-fully-reshardable"
        ):
            check(saved, now)
        check(saved, saved)
        check(saved, now, sharding="fully_reshardable")
        check(saved, Namespace(**{**vars(now), "no_load_optim": True}))


PARALLEL = ("--tensor-model-parallel-size", "2", "--num-experts", "8", "--expert-model-parallel-size")


def test_ranks_with_other_experts_are_refused_where_state_is_by_rank() -> None:
    """Four half experts a rank and two whole ones are of one size: Megatron itself would load them."""
    shared, whole = (
        arguments(*PARALLEL, "2"),
        arguments(*PARALLEL, "4", "--expert-tensor-parallel-size", "1"),
    )
    words = r"EP2 expert TP2.*EP4 expert TP1.*--dist-ckpt-optim-fully-reshardable"
    with pytest.raises(PlanError, match=words):
        check(shared, whole)
    check(shared, whole, sharding="fully_reshardable")
    check(shared, arguments(*PARALLEL, "2", "--expert-tensor-parallel-size", "2"))
    kept_before = kept(shared, placement=(0,))
    getattr(kept_before, ATTRIBUTE).pop("experts")
    with pytest.raises(PlanError, match="EP4 expert TP1"):
        check(kept_before, whole)


def test_another_tensor_partition_is_refused_where_state_is_by_rank() -> None:
    """A block of a grid has as many weights as one of stock's."""
    stock = arguments("--tensor-model-parallel-size", "4", "--sequence-parallel")
    of_grid = CheckpointGuard(partition="grid", has_plan=True)
    stages = of_grid.stages(stock)
    assert stages is not None
    grid = Namespace(**{**vars(stock), ATTRIBUTE: stages.to_json()})
    with pytest.raises(PlanError, match="this run has TP4 PP1 split 6 partition grid"):
        check(stock, stock, guard=of_grid)
    with pytest.raises(PlanError, match=r"partition grid\); this run has TP4 PP1 split 6, "):
        check(grid, stock, guard=CheckpointGuard())
    check(grid, stock, guard=of_grid)
    check(grid, stock, sharding="fully_reshardable")
    check(grid, Namespace(**{**vars(stock), "no_load_optim": True}))


def test_stages_that_nobody_knows_stop_a_plan_and_not_a_user() -> None:
    saved = Namespace(use_distributed_optimizer=True)
    check(saved, arguments(*EVEN), guard=CheckpointGuard())
    with pytest.raises(PlanError, match="does not record those stages"):
        check(saved, arguments(*EVEN))


@pytest.mark.parametrize("form", ["LEGACY", "LOCAL"])
def test_a_checkpoint_by_rank_without_arguments_stops_a_plan(form: str) -> None:
    without: dict[str, Any] = {"iteration": 3}
    with pytest.raises(PlanError, match=r"checkpoint /ckpt: .* does not record those stages"):
        CheckpointGuard(has_plan=True).check(without, arguments(*EVEN), name="/ckpt", form=form)
    CheckpointGuard().check(without, arguments(*EVEN), name="/ckpt", form=form)
    CheckpointGuard(has_plan=True).check(without, arguments(*EVEN), name="/ckpt", form="GLOBAL")


@pytest.mark.parametrize(
    ("is_sharded", "form", "words"),
    [
        (True, "FSDP_DTENSOR", None),
        (True, "GLOBAL", "its format is torch_dist; --use-megatron-fsdp loads only fsdp_dtensor"),
        (True, "LEGACY", "its format is torch; --use-megatron-fsdp loads only fsdp_dtensor"),
        (True, "NEW", "its format is not known; --use-megatron-fsdp loads only fsdp_dtensor"),
        # So Megatron calls fsdp_dtensor without the switch.
        (False, "TORCH_DCP", "its format is fsdp_dtensor, which loads only with --use-megatron-fsdp"),
        (False, "GLOBAL", None),
    ],
)
def test_a_plan_loads_only_the_checkpoint_formats_of_its_megatron_fsdp(
    is_sharded: bool, form: str, words: str | None
) -> None:
    now = arguments(use_megatron_fsdp=is_sharded)
    if words is None:
        check(now, now, form=form)
        return
    with pytest.raises(PlanError, match=f"checkpoint /ckpt: {words}.*or start without --load$"):
        check(now, now, form=form)
    # A command without a plan is left to Megatron.
    check(now, now, form=form, guard=CheckpointGuard())


def test_checkpoints_of_pytorchs_fsdp_load_under_a_plan() -> None:
    now = arguments(use_torch_fsdp2=True)
    check(now, now, form="TORCH_DCP")
