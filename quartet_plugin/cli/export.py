"""`quartet export`: a plan as Megatron's own flags or a ds_config, without the plugin as far as they go."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quartet_plugin.cli.invocation import refuse_user_command
from quartet_plugin.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from quartet_plugin.model.plan import Plan


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @app.command("export")
    def _export(
        ctx: typer.Context,
        plan: Annotated[Path, typer.Argument(help="A plan file.", show_default=False)],
        as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
        ds_config: Annotated[
            Path | None, typer.Option(help="Of a DeepSpeed plan: print this ds_config with the plan in it.")
        ] = None,
    ) -> None:
        """Print a plan as Megatron's own flags, one a line, and the order of RANKs; or as a ds_config."""
        from quartet_plugin.model.plan import read_plan

        refuse_user_command(ctx)
        known = read_plan(plan)
        if ds_config is not None:
            typer.echo(json.dumps(merged_ds_config(known, ds_config), indent=1))
            return
        content = export(known)
        typer.echo(json.dumps(content, indent=1) if as_json else "\n".join(lines(content)))


# What divides the layers otherwise than a layout does; Megatron refuses both together.
_SPLIT_FLAGS = (
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
_RECOMPUTE_FLAGS = (
    "--recompute-granularity",
    "--recompute-activations",
    "--recompute-method",
    "--recompute-num-layers",
    "--recompute-modules",
    "--distribute-saved-activations",
)


def export(plan: "Plan") -> dict[str, Any]:
    """What to add to the user's command and what to leave out of it.

    `flags` (name -> value, True for a switch), `leave_out` (the command's own flags that contradict them)
    and `ranks`: where each RANK runs. Raises PlanError for a schedule that stock Megatron has no flags for.
    """
    from quartet_plugin.model.frameworks import capabilities
    from quartet_plugin.model.receipt import needs_receipt

    if not capabilities(plan.made_for.framework).has_flags:
        return _about(plan) | {
            "ds_config": ds_config_of(plan),
            "num_stages": plan.layout.pipeline_parallel,
            "split": list(plan.split.transformer_layers_per_stage),
            "schedule": plan.schedule.label,
        }
    if needs_receipt(plan):
        raise PlanError(
            f"schedule {plan.schedule.label}: stock Megatron has no flags for it; train with "
            "`quartet train --plan`"
        )
    return _about(plan) | {"flags": flags_of(plan), "leave_out": left_out(plan)}


def _about(plan: "Plan") -> dict[str, Any]:
    nodes = plan.made_for.nodes
    return {
        "schema_version": 1,
        "framework": plan.made_for.framework,
        "framework_version": plan.made_for.framework_version,
        "plan_digest": plan.digest,
        "is_stock_order": plan.mapping.is_stock,
        "ranks": [
            {"rank": rank, "host": nodes[slot.node].host, "node": slot.node, "local_rank": slot.local}
            for rank, slot in enumerate(plan.mapping.slots)
        ],
    }


def ds_config_of(plan: "Plan") -> dict[str, Any]:
    """The keys of a plain ds_config that say the plan's batch sizes and optimizer."""
    batch, layout = plan.made_for.global_batch_size, plan.layout
    buckets = {
        "reduce_bucket_size": layout.reduce_bucket_size,
        "allgather_bucket_size": layout.allgather_bucket_size,
    }
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.num_microbatches(batch),
        "zero_optimization": {
            "stage": 1 if layout.distributed_optimizer else 0,
            **{name: size for name, size in buckets.items() if size is not None},
        },
    }


def merged_ds_config(plan: "Plan", path: Path) -> dict[str, Any]:
    """The ds_config at `path` with the plan's sizes in it: a plain one of DeepSpeed's.

    Raises PlanError for a plan of another framework, ConfigError for a file that is no ds_config.
    """
    from quartet_plugin.model.files import read_json
    from quartet_plugin.model.frameworks import capabilities

    if capabilities(plan.made_for.framework).has_flags:
        raise PlanError(f"--ds-config: the plan is for {plan.made_for.framework}, which has no ds_config")
    config = read_json(path)
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: a ds_config is a JSON object; this is a {type(config).__name__}")
    planned = ds_config_of(plan)
    own = config.get("zero_optimization")
    zero = {**(own if isinstance(own, dict) else {}), **planned["zero_optimization"]}
    merged = {**config, **planned, "zero_optimization": zero}
    # A plain ds_config trains without the plugin.
    merged.pop("quartet", None)
    return merged


def flags_of(plan: "Plan") -> dict[str, str | int | bool]:
    """Megatron's flags that say the same as the plan's shape, layout, split and schedule."""
    shape, layout = plan.shape, plan.layout
    flags: dict[str, str | int | bool] = {
        "--num-layers": shape.num_layers,
        "--hidden-size": shape.hidden_size,
        "--ffn-hidden-size": shape.ffn_hidden_size,
        "--num-attention-heads": shape.num_attention_heads,
        "--kv-channels": shape.kv_channels,
    }
    if shape.num_query_groups != shape.num_attention_heads:
        flags |= {"--group-query-attention": True, "--num-query-groups": shape.num_query_groups}
    flags |= {
        "--seq-length": shape.seq_length,
        "--global-batch-size": plan.made_for.global_batch_size,
        "--micro-batch-size": layout.micro_batch_size,
        "--tensor-model-parallel-size": layout.tensor_parallel,
        "--pipeline-model-parallel-size": layout.pipeline_parallel,
        "--context-parallel-size": layout.context_parallel,
        "--expert-model-parallel-size": layout.expert_parallel,
    }
    if layout.sequence_parallel:
        flags["--sequence-parallel"] = True
    if layout.distributed_optimizer:
        flags["--use-distributed-optimizer"] = True
    baseline = plan.made_for.baseline.layout
    if layout.recompute not in ("none", baseline.recompute):
        flags["--recompute-granularity"] = layout.recompute
        if layout.recompute == "full":
            flags |= {"--recompute-method": "uniform", "--recompute-num-layers": 1}
    if layout.tensor_parallel != baseline.tensor_parallel:
        # Megatron pads by the tensor-parallel size: without this it would be another model.
        flags["--padded-vocab-size"] = shape.vocab_size
    if layout.pipeline_parallel > 1:
        flags["--pipeline-model-parallel-layout"] = plan.split.megatron_layout
    if plan.schedule.group is not None:
        flags["--microbatch-group-size-per-virtual-pipeline-stage"] = plan.schedule.group
    return flags


def left_out(plan: "Plan") -> list[str]:
    """Flags of the user's command, where it has them, that the plan does not go with."""
    baseline, layout = plan.made_for.baseline, plan.layout
    found = list(_SPLIT_FLAGS)
    if layout.pipeline_parallel == 1:
        found.append("--pipeline-model-parallel-layout")
    if plan.schedule.group is None and baseline.schedule.group is not None:
        found.append("--microbatch-group-size-per-virtual-pipeline-stage")
    if layout.recompute != baseline.layout.recompute:
        found += [flag for flag in _RECOMPUTE_FLAGS if flag not in flags_of(plan)]
    if baseline.layout.sequence_parallel and not layout.sequence_parallel:
        found.append("--sequence-parallel")
    if baseline.layout.distributed_optimizer and not layout.distributed_optimizer:
        found.append("--use-distributed-optimizer")
    own, shape = plan.made_for.shape, plan.shape
    if shape.num_query_groups == shape.num_attention_heads and own.num_query_groups < own.num_attention_heads:
        found += ["--group-query-attention", "--num-query-groups"]
    return found


def lines(content: dict[str, Any]) -> list[str]:
    """The flags one a line, ready for a shell, and the order of RANKs as comments; or a ds_config."""
    found = []
    if "ds_config" in content:
        counts = "+".join(str(count) for count in content["split"])
        found = json.dumps(content["ds_config"], indent=1).splitlines()
        found.append(
            f"# PipelineModule(num_stages={content['num_stages']}); a ds_config cannot say its split"
        )
        found.append(f"# ({counts} layers), schedule ({content['schedule']}) and order: name the plan in one")
        return found
    for name, value in content["flags"].items():
        # The layout's bars are a pipe to a shell.
        shown = f"'{value}'" if isinstance(value, str) and "|" in value else str(value)
        found.append(name if value is True else f"{name} {shown}")
    found.append(f"# leave out of the command, where given: {' '.join(content['leave_out'])}")
    order = (
        "the launcher's own" if content["is_stock_order"] else "not the launcher's: set RANK before the start"
    )
    found.append(f"# order of RANKs: {order}")
    found += [
        f"# RANK {row['rank']}: {row['host']}, LOCAL_RANK {row['local_rank']}" for row in content["ranks"]
    ]
    return found
