"""Puts the runtime where Megatron looks for its schedules, with the placement and the split that it needs.

Two steps, because the entry gathers the wrappers of all its parts before it installs any: `prepare` makes
ours, and `Prepared.apply` replaces the few things that are not module globals.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from quartet_plugin.megatron.seams import Seam, Wrapper, resolve
from quartet_plugin.runtime.programs import Library, Recipe
from quartet_plugin.runtime.records import Recorder
from quartet_plugin.schedule.action import Kind
from quartet_plugin.schedule.channels import Backend, check_program

# Lowering cannot dead-lock by its construction; running the program once more under a library's rules is a
# second look, which takes about half a minute a million instructions.
_CHECKED_INSTRUCTIONS = 500_000

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_PARAMETERS = (
    "forward_step_func",
    "data_iterator",
    "model",
    "num_microbatches",
    "seq_length",
    "micro_batch_size",
    "decoder_seq_length",
    "forward_only",
    "collect_non_loss_data",
    "first_val_step",
    "adjust_tensor_shapes_fn",
    "p2p_communicator",
    "pg_collection",
    "force_all_reduce",
)
# get_forward_backward_func looks both up when it is called, for training and for every evaluation.
SCHEDULES = tuple(
    Seam(module=_SCHEDULES, name=f"forward_backward_pipelining_{how}_interleaving", parameters=_PARAMETERS)
    for how in ("with", "without")
)
# Called, not replaced: what the runtime relies on is pinned all the same.
CALLED = (
    Seam(
        module=_SCHEDULES,
        name="forward_step",
        parameters=(
            "forward_step_func",
            "data_iterator",
            "model",
            "num_microbatches",
            "input_tensor",
            "forward_data_store",
            "config",
            "cp_group_size",
            "collect_non_loss_data",
            "checkpoint_activations_microbatch",
            "is_first_microbatch",
            "current_microbatch",
            "vp_stage",
            "is_last_stage",
        ),
    ),
    Seam(
        module=_SCHEDULES,
        name="backward_step",
        parameters=("input_tensor", "output_tensor", "output_tensor_grad", "config"),
    ),
    Seam(
        module=_SCHEDULES,
        name="deallocate_output_tensor",
        parameters=("out", "deallocate_pipeline_outputs"),
    ),
    Seam(
        module=_SCHEDULES,
        name="get_tensor_shapes",
        parameters=(
            "seq_length",
            "micro_batch_size",
            "decoder_seq_length",
            "config",
            "tp_group",
            "cp_group",
        ),
    ),
    Seam(module=_SCHEDULES, name="_build_default_pg_collection", parameters=()),
    Seam(
        module=_SCHEDULES,
        name="check_first_val_step",
        parameters=("first_val_step", "forward_only", "cond"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A runtime that is ready to be installed: `wrappers` for the module globals, `apply` for the rest."""

    runtime: Any
    wrappers: dict[Seam, Wrapper]
    apply: Callable[[], Callable[[], None]]


def prepare(
    recipe: Recipe,
    *,
    num_microbatches: int,
    recorder: Recorder | None = None,
    host_transport: bool = False,
    timeout: timedelta | None = None,
) -> Prepared:
    """Check the schedule for this number of microbatches, by both libraries' rules too; make the runtime.

    No process group exists yet. Raises PlanError for an order that is not valid or could dead-lock, SeamError
    where Megatron is not as known.
    """
    library = Library(recipe)
    program = library.program(num_microbatches)
    if sum(map(len, program.instructions)) <= _CHECKED_INSTRUCTIONS:
        for backend in Backend:
            check_program(program, backend=backend)
    for seam in CALLED:
        resolve(seam)
    # Only from here on is Megatron imported.
    from quartet_plugin.megatron import split_backward
    from quartet_plugin.megatron.placement import ends, layout, losses, tied
    from quartet_plugin.megatron.placement.state import Placed
    from quartet_plugin.megatron.runtime.binding import Runtime

    placed = Placed(recipe.placement)
    gradients = split_backward.WeightGradients()
    runtime = Runtime(
        library,
        placed=placed,
        gradients=gradients,
        recorder=recorder,
        host_transport=host_transport,
        timeout=timeout,
    )
    wrappers: dict[Seam, Wrapper] = dict.fromkeys(SCHEDULES, _instead(runtime.forward_backward))
    wrappers |= ends.wrappers(placed)
    if placed.has_both_ends_on_one_device:
        wrappers |= tied.wrappers()
    if placed.last_device != placed.num_devices - 1:
        wrappers |= losses.wrappers(placed)
    splits = _splits(library, num_microbatches)

    def apply() -> Callable[[], None]:
        undo = [layout.install(placed)]
        if splits:
            undo.append(split_backward.install(gradients))

        def undo_all() -> None:
            for one in reversed(undo):
                one()

        return undo_all

    return Prepared(runtime=runtime, wrappers=wrappers, apply=apply)


def _splits(library: Library, num_microbatches: int) -> bool:
    from quartet_plugin.schedule.instruction import Compute

    return any(
        isinstance(instruction, Compute) and instruction.action.kind is Kind.I
        for row in library.program(num_microbatches).instructions
        for instruction in row
    )


def _instead(function: Callable[..., Any]) -> Wrapper:
    def wrap(_original: Callable[..., Any]) -> Callable[..., Any]:
        def forward_backward(**call: Any) -> Any:
            return function(**call)

        return forward_backward

    return wrap
