"""Prepares the runtime of a plan: Megatron calls it as its schedule, with the plan's placement and split.

The entry collects the wrappers of all its parts and installs them together; `prepare` makes the runtime's.
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from quartet_plugin.megatron.runtime.refusals import needs_full_backwards, refusal, without_alignment
from quartet_plugin.megatron.seams import TRAIN_STEP, Seam, Wrapper, resolve
from quartet_plugin.model.plan import Plan
from quartet_plugin.runtime.programs import ProgramCache, ScheduleSpec, schedule_spec_of, splits_backward
from quartet_plugin.runtime.records import Clock, CudaClock, HostClock, Recorder
from quartet_plugin.schedule.channels import Backend, check_program

# Lowering cannot dead-lock by its construction; running the program once more under a library's rules is a
# second look, which takes about half a minute a million instructions.
_CHECKED_INSTRUCTIONS = 500_000

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_PARAMETERS = (
    "forward_step_func data_iterator model num_microbatches seq_length micro_batch_size "
    "decoder_seq_length forward_only collect_non_loss_data first_val_step adjust_tensor_shapes_fn "
    "p2p_communicator pg_collection force_all_reduce"
)
# get_forward_backward_func looks both up when it is called, for training and for every evaluation.
SCHEDULES = tuple(
    Seam(
        _SCHEDULES,
        f"forward_backward_pipelining_{how}_interleaving",
        _PARAMETERS,
        {"0.19.2": source},
        use_sites=(f"{_SCHEDULES}:get_forward_backward_func",),
    )
    for how, source in (("with", "56b43eb5f2ad6e2a"), ("without", "e595617e6f13ec33"))
)
_WITH, _WITHOUT = (f"{_SCHEDULES}:{seam.name}" for seam in SCHEDULES)
_NO_PIPELINING = f"{_SCHEDULES}:forward_backward_no_pipelining"
_DDP = "megatron.core.distributed.distributed_data_parallel"
# Called, not replaced: the runtime relies on them, so their sources are pinned too.
CALLED = (
    Seam(
        _SCHEDULES,
        "forward_step",
        "forward_step_func data_iterator model num_microbatches input_tensor forward_data_store "
        "config cp_group_size collect_non_loss_data checkpoint_activations_microbatch "
        "is_first_microbatch current_microbatch vp_stage is_last_stage",
        {"0.19.2": "1dd0a96de3f402ea"},
        use_sites=(_NO_PIPELINING, f"{_WITH}.forward_step_helper", _WITHOUT),
    ),
    Seam(
        _SCHEDULES,
        "backward_step",
        "input_tensor output_tensor output_tensor_grad config",
        {"0.19.2": "3b4d923349ae4ce9"},
        use_sites=(_NO_PIPELINING, f"{_WITH}.backward_step_helper", _WITHOUT),
    ),
    Seam(
        _SCHEDULES,
        "deallocate_output_tensor",
        "out deallocate_pipeline_outputs",
        {"0.19.2": "2cc0990e5a5657e8"},
        use_sites=(_WITH, _WITHOUT),
    ),
    Seam(
        _SCHEDULES,
        "get_tensor_shapes",
        "seq_length micro_batch_size decoder_seq_length config tp_group cp_group",
        {"0.19.2": "f281c8574ec324a0"},
        use_sites=(_WITHOUT,),
    ),
    Seam(
        _SCHEDULES,
        "_build_default_pg_collection",
        "",
        {"0.19.2": "969089c6f542b267"},
        use_sites=(_NO_PIPELINING, _WITH, _WITHOUT),
    ),
    Seam(
        _SCHEDULES,
        "check_first_val_step",
        "first_val_step forward_only cond",
        {"0.19.2": "480ae12f2fdce899"},
        use_sites=(_NO_PIPELINING, _WITHOUT),
    ),
    # The reduction of a chunk's gradients, started when its last microbatch is through.
    Seam(
        _DDP,
        "DistributedDataParallel.start_grad_sync",
        "self unused",
        {"0.19.2": "c6d70fc248dead30"},
        use_sites=("megatron.training.training:train",),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A runtime that is ready to be installed, by its `wrappers`, before models are built."""

    runtime: Any
    wrappers: dict[Seam, Wrapper]


def prepare_plan(plan: Plan, args: Namespace, *, on_cpu: bool) -> tuple[Prepared | None, list[str]]:
    """The runtime of a plan with a custom schedule, and lines for the user.

    `args` are the arguments with the plan in them. None where a feature of the command keeps Megatron's
    schedule. Raises PlanError for a schedule that could not run, before any process group exists.
    """
    choice = plan.schedule.custom
    assert choice is not None
    reason = refusal(args)
    if reason is not None:
        return None, [
            f"{reason}; Megatron's own schedule stays instead of {choice.label}, the rest of the plan applies"
        ]
    spec = schedule_spec_of(choice, num_microbatches=plan.num_microbatches)
    full_backward = needs_full_backwards(args)
    notes = []
    if full_backward is not None and splits_backward(spec, plan.num_microbatches):
        spec = schedule_spec_of(choice, num_microbatches=plan.num_microbatches, full_backward=True)
        notes.append(full_backward)
    if without_alignment(args):
        notes.append(
            "--no-align-grad-reduce is set: each chunk's gradients are reduced when its last microbatch is "
            "through"
        )
    clock: Clock = HostClock() if on_cpu else CudaClock()
    prepared = prepare(
        spec,
        num_microbatches=plan.num_microbatches,
        recorder=Recorder(clock),
        # gloo cannot take GPU memory: several processes on one GPU meet in host memory.
        host_transport=not on_cpu and getattr(args, "distributed_backend", None) == "gloo",
        delays_te=getattr(args, "transformer_impl", "local") == "transformer_engine",
        timeout=timedelta(minutes=getattr(args, "distributed_timeout_minutes", None) or 10),
    )
    return prepared, notes


def prepare(
    spec: ScheduleSpec,
    *,
    num_microbatches: int,
    recorder: Recorder | None = None,
    host_transport: bool = False,
    timeout: timedelta | None = None,
    delays_te: bool = False,
) -> Prepared:
    """Check the schedule for this number of microbatches, by NCCL's and gloo's rules too; make the runtime.

    `delays_te`: the model has Transformer Engine's layers. No process group exists yet. Raises PlanError for
    an order that is not valid or could dead-lock, SeamError where Megatron is not as known.
    """
    programs = ProgramCache(spec)
    program = programs.program(num_microbatches)
    if sum(map(len, program.instructions)) <= _CHECKED_INSTRUCTIONS:
        for backend in Backend:
            check_program(program, backend=backend)
    for seam in CALLED:
        resolve(seam)
    # Only from here on is Megatron imported.
    from quartet_plugin.megatron import split_backward
    from quartet_plugin.megatron.placement import end_stages, layout
    from quartet_plugin.megatron.placement.state import StagePlacement
    from quartet_plugin.megatron.runtime.binding import Runtime

    placement = StagePlacement(spec.placement)
    gradients = split_backward.WeightGradients()
    runtime = Runtime(
        programs,
        placement=placement,
        gradients=gradients,
        recorder=recorder,
        host_transport=host_transport,
        timeout=timeout,
    )
    wrappers: dict[Seam, Wrapper] = dict.fromkeys(SCHEDULES, lambda _: runtime.forward_backward)
    wrappers |= end_stages.wrappers(placement) | layout.wrappers(placement)
    if splits_backward(spec, num_microbatches):
        wrappers |= split_backward.wrappers(gradients, delays_te=delays_te)
    for seam in (*layout.CALLED, *split_backward.CALLED):
        resolve(seam)
    return Prepared(runtime=runtime, wrappers=wrappers)


def declared() -> Iterator[Seam]:
    """Every seam of the runtime, those included that only some schedules and placements need."""
    from quartet_plugin.megatron import split_backward
    from quartet_plugin.megatron.placement import end_stages, layout

    yield from (*SCHEDULES, *CALLED, *split_backward.CALLED)
    for module in (end_stages, layout, split_backward):
        values = vars(module).values()
        yield from (value for value in values if isinstance(value, Seam) and value != TRAIN_STEP)
