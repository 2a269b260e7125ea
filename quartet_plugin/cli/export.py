"""`quartet export`: a plan as Megatron's own flags, to be used without the plugin as far as flags go."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quartet_plugin.cli.invocation import refuse_user_command

if TYPE_CHECKING:
    from quartet_plugin.model.plan import Plan, Split


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @app.command("export")
    def _export(
        ctx: typer.Context,
        plan: Annotated[Path, typer.Argument(help="A plan file.", show_default=False)],
        as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    ) -> None:
        """Print a plan as Megatron's own flags, one a line, and the order of RANKs."""
        from quartet_plugin.model.plan import read_plan

        refuse_user_command(ctx)
        content = export(read_plan(plan))
        typer.echo(json.dumps(content, indent=1) if as_json else "\n".join(lines(content)))


def export(plan: "Plan") -> dict[str, Any]:
    """`flags` (name -> value, True for a switch) and `ranks`: where each RANK runs."""
    nodes = plan.made_for.nodes
    return {
        "schema_version": 1,
        "framework": plan.made_for.framework,
        "framework_version": plan.made_for.framework_version,
        "plan_digest": plan.digest,
        "flags": flags_of(plan),
        "is_stock_order": plan.mapping.is_stock,
        "ranks": [
            {"rank": rank, "host": nodes[slot.node].host, "node": slot.node, "local_rank": slot.local}
            for rank, slot in enumerate(plan.mapping.slots)
        ],
    }


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
    if layout.recompute != "none":
        flags["--recompute-granularity"] = layout.recompute
    if layout.recompute == "full":
        flags |= {"--recompute-method": "uniform", "--recompute-num-layers": 1}
    if layout.pipeline_parallel > 1:
        flags["--pipeline-model-parallel-layout"] = layout_string(plan.split)
    if plan.schedule.group is not None:
        flags["--microbatch-group-size-per-virtual-pipeline-stage"] = plan.schedule.group
    return flags


def layout_string(split: "Split") -> str:
    """The split with every layer written out: `Ettt|tt|tL`."""
    stages = ["t" * count for count in split.transformer_layers_per_stage]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}L"
    return "|".join(stages)


def lines(content: dict[str, Any]) -> list[str]:
    """The flags one a line, ready for a shell, and the order of RANKs as comments."""
    found = []
    for name, value in content["flags"].items():
        # The layout's bars are a pipe to a shell.
        shown = f"'{value}'" if isinstance(value, str) and "|" in value else str(value)
        found.append(name if value is True else f"{name} {shown}")
    order = (
        "the launcher's own" if content["is_stock_order"] else "not the launcher's: set RANK before the start"
    )
    found.append(f"# order of RANKs: {order}")
    found += [
        f"# RANK {row['rank']}: {row['host']}, LOCAL_RANK {row['local_rank']}" for row in content["ranks"]
    ]
    return found
