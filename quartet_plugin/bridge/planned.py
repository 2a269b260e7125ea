"""Sets a plan in a ConfigContainer before the Bridge builds anything of it."""

import os
from typing import Any

from quartet_plugin.bridge.fields import (
    NO_TENSOR_PARTITION,
    arguments_of,
    leave_out,
    set_argument,
    vocabulary_of,
)
from quartet_plugin.errors import PlanError, QuartetError
from quartet_plugin.megatron.apply import changes_of, check_fit, check_result
from quartet_plugin.model.megatron_arguments import expert_degrees_of, value_in_words
from quartet_plugin.model.plan import Plan
from quartet_plugin.rank.mapping import assign, gather_processes, table_of
from quartet_plugin.rank.nccl import keep_devices
from quartet_plugin.rank.rendezvous import RankEnv, Rendezvous
from quartet_plugin.rank.session import print_notes


def apply_plan(
    plan: Plan, config: Any, *, version: str, rendezvous: Rendezvous, rank_env: RankEnv, on_cpu: bool
) -> None:
    """Write the plan into the configuration, and RANK; one rank says what was changed.

    Raises AgreedRefusalError on all ranks when the plan does not fit on one of them.
    """
    processes = gather_processes(rendezvous, rank_env)
    refusal: QuartetError | None = None
    rank, notes, moves_ranks = rank_env.launch_rank, list[str](), False
    try:
        check_fit(plan, arguments_of(config), version=version, world_size=rank_env.world_size)
        notes = write_plan(plan, config)
        assignment = assign(plan, processes, args=arguments_of(config), is_trial=rank_env.is_trial)
        rank = assignment.rank_of[rank_env.launch_rank]
        if assignment.note is not None:
            notes.append(assignment.note)
        moves_ranks = not assignment.is_stock
        if moves_ranks:
            _check_no_process_group()
            notes.append(table_of(processes, assignment))
    except QuartetError as error:
        refusal = error
    rendezvous.agree_or_raise("fit", refusal)
    if moves_ranks:
        if not on_cpu:
            keep_devices(rank_env.local_rank or 0)
        os.environ["RANK"] = str(rank)
    print_notes(notes, rank_env=rank_env)


def write_plan(plan: Plan, config: Any) -> list[str]:
    """Set the fields that differ from the plan, and say so in at most one line.

    Raises PlanError for a part of the plan that the configuration cannot express.
    """
    if plan.schedule.custom is not None:
        raise PlanError(
            f"schedule: {plan.schedule.label}; Megatron-Bridge runs Megatron's own schedules: make a plan "
            "with `search: {schedule: stock}`"
        )
    if plan.layout.tensor_partition is not None:
        raise PlanError(
            f"layout.tensor_partition: {plan.layout.tensor_partition.label}; {NO_TENSOR_PARTITION}: make a "
            "plan with `search: {tensor_partition: stock}`"
        )
    user = arguments_of(config)
    values, remove = changes_of(plan, user)
    for name in remove - set(values):
        leave_out(config, name)
    # The degrees first: how the vocabulary is padded depends on them.
    for name, value in sorted(values.items(), key=lambda item: item[0] == "padded_vocab_size"):
        set_argument(config, name, value)
    if "pipeline_model_parallel_layout" in remove:
        chunks = plan.layout.virtual_stages
        config.model.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
    if plan.layout.pipeline_parallel > 1 and getattr(config.model, "pipeline_dtype", None) is None:
        config.model.pipeline_dtype = config.model.params_dtype
    result = arguments_of(config)
    check_result(plan, result)
    changed = [
        f"{name} {_shown(vars(user).get(name))} -> {_shown(vars(result).get(name))}"
        for name in sorted(remove | set(values))
        if vars(user).get(name) != vars(result).get(name)
    ]
    return [f"the plan replaces {', '.join(changed)}"] if changed else []


def division_of_experts(config: Any) -> tuple[object, ...]:
    """How ranks hold the experts of a configuration, in a form to compare."""
    args = arguments_of(config)
    return *expert_degrees_of(args), getattr(args, "moe_grouped_gemm", None)


def check_checkpoint(plan: Plan, config: Any, *, experts: tuple[object, ...]) -> None:
    """Raise PlanError where a checkpoint of other stages would give layers each other's optimizer state.

    The distributed optimizer's usual form is keyed by rank and buffer, and loading it checks sizes alone.
    `experts` is their division in the script's own configuration; `config` has the plan's.
    """
    checkpoint, baseline = config.checkpoint, plan.made_for.baseline
    names = ("tensor_parallel", "pipeline_parallel", "virtual_stages")
    is_same = (
        plan.split == baseline.split
        and all(getattr(plan.layout, name) == getattr(baseline.layout, name) for name in names)
        and division_of_experts(config) == experts
    )
    is_safe = not arguments_of(config).use_distributed_optimizer or not getattr(
        checkpoint, "load_optim", True
    )
    if is_same or is_safe or getattr(checkpoint, "load", None) is None:
        return
    if not getattr(checkpoint, "dist_ckpt_optim_fully_reshardable", False):
        raise PlanError(
            f"checkpoint.load: {checkpoint.load}: the plan has other stages, or divides experts otherwise, "
            "than the script's configuration, and the state of a distributed optimizer may be loaded into "
            "other layers or experts; save and load with "
            "checkpoint.dist_ckpt_optim_fully_reshardable"
        )


def vocabulary_callback(plan: Plan) -> Any:
    """A callback of the Bridge that compares the vocabulary before the first step."""
    from megatron.bridge.training.callbacks import Callback

    class CheckVocabulary(Callback):  # type: ignore[misc]
        """Stops a training of another job."""

        def on_train_start(self, context: Any) -> None:
            """Compare, now that the tokenizer is there."""
            check_vocabulary(plan, context.state.cfg)

    return CheckVocabulary()


def check_vocabulary(plan: Plan, config: Any) -> None:
    """Compare the vocabulary, which the tokenizer decides. Raises PlanError where the plan has another."""
    size = vocabulary_of(config)
    if size is not None and size != plan.shape.vocab_size and plan.made_for.job is None:
        raise PlanError(
            f"the plan was made for another job: vocab_size {size} (plan: {plan.shape.vocab_size}); "
            "make one with `quartet tune`"
        )


def _shown(value: Any) -> str:
    return "left out" if value is None else str(value_in_words(value))


def _check_no_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        raise PlanError(
            "mapping: the script has made its process group before `pretrain`, so the ranks cannot change; "
            "let the Bridge make the group, or use a plan with the stock order"
        )
