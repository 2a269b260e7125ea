"""`quartet show`: a plan for reading; `quartet export`: a plan as Megatron's flags or a ds_config.

With --sbp, --gspmd, --dtensor or --colossal the export says how the plan's tensor parallelism cuts a layer's
linears, in another system's words.

The flags also make best/native.sh, the user's command with them behind it, for machines without the plugin.
Megatron's parser takes the last of two, so nothing of the command is edited. Where flags do not say the whole
plan (a custom schedule, an order of ranks, a switch of the command that would have to go) there is no script,
and one line says why.
"""

import json
import math
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quartet_plugin.cli.command import (
    RUNS,
    JsonSwitch,
    PlanFile,
    PlanOrRun,
    RunsFolder,
    TrialOfRun,
    find_plan,
)
from quartet_plugin.cli.output import MAX_FLAG_LINE, show
from quartet_plugin.errors import PlanError, QuartetError, UsageError

if TYPE_CHECKING:
    from quartet_plugin.model.layout import Layout
    from quartet_plugin.model.plan import Plan
    from quartet_plugin.tuner.run_folder import TuningRun


def export_command(
    plan: PlanFile,
    as_json: JsonSwitch = False,
    ds_config: Annotated[
        Path | None, typer.Option(help="For a DeepSpeed plan: print this ds_config with the plan's values.")
    ] = None,
    sbp: Annotated[
        bool, typer.Option("--sbp", help="Print the partition of a layer's linear operators, for OneFlow.")
    ] = False,
    gspmd: Annotated[
        bool, typer.Option("--gspmd", help="Print the partition of a layer's linear operators, for XLA.")
    ] = False,
    dtensor: Annotated[
        bool,
        typer.Option(
            "--dtensor", help="Print the partition of a layer's linear operators, for PyTorch or veScale."
        ),
    ] = False,
    colossal: Annotated[
        bool, typer.Option("--colossal", help="Print the tensor-parallel settings for Colossal-AI.")
    ] = False,
    partition: Annotated[
        str | None,
        typer.Option(
            metavar="FORM",
            help="The partition that these four print: stock, stock-replicated, rings, grid, primepar, 2d, "
            "3d.  [default: the plan's own]",
        ),
    ] = None,
) -> None:
    """Print a plan as Megatron's own flags and the order of its RANKs, or as a ds_config."""
    from quartet_plugin.model.plan import read_plan

    known = read_plan(plan)
    wanted = {"sbp": sbp, "gspmd": gspmd, "dtensor": dtensor, "colossal": colossal}
    if partition is not None or any(wanted.values()):
        content = _in_notation(known, [name for name, is_wanted in wanted.items() if is_wanted], partition)
        if as_json:
            typer.echo(json.dumps(content, indent=1))
        else:
            from quartet_plugin.partition.notation.layer_notation import notation_lines

            show(*notation_lines(content), limit=MAX_FLAG_LINE)
        return
    if ds_config is not None:
        typer.echo(json.dumps(merged_ds_config(known, ds_config), indent=1))
        return
    content = export(known)
    if as_json:
        typer.echo(json.dumps(content, indent=1))
    else:
        show(*lines(content), limit=MAX_FLAG_LINE)


def _in_notation(plan: "Plan", notations: list[str], form: str | None) -> dict[str, Any]:
    """The linear operators of a plan's layer in one notation. Raises UsageError unless one is named."""
    from quartet_plugin.partition.layer import LAYER_FORMS, linears_of, partition_of, planned_layer
    from quartet_plugin.partition.notation.layer_notation import Notation, layer_notation

    if len(notations) != 1:
        raise UsageError("--sbp, --gspmd, --dtensor, --colossal: give one of them")
    layout = plan.layout
    own_form = "stock" if layout.sequence_parallel else "stock-replicated"
    planned = layout.tensor_partition
    if form is not None and form not in LAYER_FORMS:
        raise UsageError(f"--partition {form}: must be one of {', '.join(LAYER_FORMS)}")
    name: Notation = notations[0]  # type: ignore[assignment]
    devices = layout.tensor_parallel
    if devices < 2:
        raise PlanError(
            f"tensor_parallel {devices}: nothing is partitioned; name a plan with tensor parallelism"
        )
    linears = linears_of(
        plan.shape, tokens=layout.micro_batch_size * plan.shape.seq_length // layout.context_parallel
    )
    if form is None and planned is not None:
        form, cuts = planned.label, planned_layer(planned, linears, devices)
    else:
        form = form or own_form
        cuts = tuple(partition_of(form, linear, devices) for linear in linears)
    return layer_notation(
        name,
        list(zip(linears, cuts, strict=True)),
        form=form,
        devices=devices,
        stages=layout.pipeline_parallel,
    )


def show_command(
    plan: PlanOrRun, trial: TrialOfRun = None, run_dir: RunsFolder = RUNS, as_json: JsonSwitch = False
) -> None:
    """Show a plan, a run's winner or a trial: its job, its changes and its speedup."""
    from quartet_plugin.model.plan import read_plan
    from quartet_plugin.report.tables import plan_lines, plan_record, trial_lines

    if trial is not None:
        from quartet_plugin.cli.trial_plan import plan_of_trial

        known = plan_of_trial(plan, trial, run_dir=run_dir)
        if as_json:
            of_trial = plan_record(known.plan, iteration_s=known.row.iteration_s, comparison=known.comparison)
            typer.echo(json.dumps(of_trial, indent=1))
            return
        show(*trial_lines(known.plan, iteration_s=known.row.iteration_s, comparison=known.comparison))
        return
    content = read_plan(find_plan(plan, run_dir=run_dir))
    if as_json:
        typer.echo(json.dumps(plan_record(content), indent=1))
        return
    show(*plan_lines(content))


NATIVE_FILE = "native.sh"
# Programs that give the training all words behind its script; a script of the shell may not.
_GIVES_WORDS_ON = ("srun", "mpirun", "mpiexec", "accelerate")
# A word that sets the variable, as those of env, `mpirun -x` and `srun --export` may.
_ONE_CONNECTION = re.compile(r"\bCUDA_DEVICE_MAX_CONNECTIONS=1(?![0-9])", re.ASCII)


def export(plan: "Plan") -> dict[str, Any]:
    """The flags to add to the user's command, and the flags to remove from it.

    `flags` (name -> value, True for a switch), `leave_out` (the command's own flags that contradict them)
    and `ranks`: where each RANK runs. Raises PlanError for a schedule that stock Megatron has no flags for.
    """
    from quartet_plugin.model.frameworks import capabilities
    from quartet_plugin.model.receipt import needs_runtime

    if not capabilities(plan.made_for.framework).has_flags:
        return _about(plan) | {
            "ds_config": ds_config_of(plan),
            "num_stages": plan.layout.pipeline_parallel,
            "split": list(plan.split.transformer_layers_per_stage),
            "schedule": plan.schedule.label,
        }
    if plan.layout.tensor_partition is not None:
        raise PlanError(
            f"tensor_partition {plan.layout.tensor_partition.label}: stock Megatron has no flags for it; "
            "train with `quartet train --plan`, or export its layers with --sbp or --gspmd"
        )
    if needs_runtime(plan):
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
    """The keys of a plain ds_config that hold the plan's batch sizes and optimizer settings."""
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
    """The ds_config at `path` with the plan's sizes: plain DeepSpeed, without the plugin.

    Raises PlanError for a plan of another framework, ConfigError for a file that is no ds_config.
    """
    from quartet_plugin.model.frameworks import capabilities
    from quartet_plugin.protocol.ds_config import read_config

    if capabilities(plan.made_for.framework).has_flags:
        raise PlanError(f"--ds-config: the plan is for {plan.made_for.framework}, which has no ds_config")
    config = read_config(path)
    planned = ds_config_of(plan)
    stated = config.get("zero_optimization")
    zero = {**(stated if isinstance(stated, dict) else {}), **planned["zero_optimization"]}
    merged = {**config, **planned, "zero_optimization": zero}
    # A plain ds_config trains without the plugin.
    merged.pop("quartet", None)
    return merged


def flags_of(plan: "Plan") -> dict[str, str | int | bool | list[str]]:
    """Megatron's flags for the plan's shape, layout, split and schedule.

    A plan that was made without a run also has those of its precision, experts and attention.
    """
    from quartet_plugin.launchers.job_flags import flags_of_job
    from quartet_plugin.space.knobs.recompute_layers import RECOMPUTE_METHOD, RECOMPUTE_NUM_LAYERS, UNIFORM

    shape, layout = plan.shape, plan.layout
    flags: dict[str, str | int | bool | list[str]] = {
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
    # A plan without a run has no command beside it that would say the recomputation.
    stated = "none" if plan.made_for.job is not None else baseline.recompute
    # Beside modules of the plan's, what may have made the command's recompute selective is left out.
    if layout.recompute not in ("none", stated) or _states_modules(layout):
        flags["--recompute-granularity"] = layout.recompute
        if layout.recompute == "full":
            flags |= {RECOMPUTE_METHOD.flag: UNIFORM, RECOMPUTE_NUM_LAYERS.flag: 1}
    if layout.tensor_parallel != baseline.tensor_parallel:
        # Megatron pads by the tensor-parallel size: without this it would be another model.
        flags["--padded-vocab-size"] = shape.vocab_size
    if (pattern := _stages_in_pattern(plan)) is not None:
        flags["--hybrid-layer-pattern"] = pattern
    elif layout.pipeline_parallel > 1:
        flags["--pipeline-model-parallel-layout"] = plan.split.layout_text(
            mtp_layers=plan.made_for.mtp_layers or 0
        )
    if plan.schedule.group is not None:
        flags["--microbatch-group-size-per-virtual-pipeline-stage"] = plan.schedule.group
    for flag, value in _settings(layout):
        if value is not None:
            # The flag of a switch has no value, also where it turns the switch off.
            flags[flag] = True if isinstance(value, bool) else value
            if isinstance(value, list):
                flags[flag] = [str(part) for part in value]
    return flags | flags_of_job(plan)


def _stages_in_pattern(plan: "Plan") -> str | None:
    """The pattern of a hybrid model with the plan's stages; None where the command's pattern says the same.

    Raises PlanError where the plan does not have the pattern's letters.
    """
    from quartet_plugin.model.megatron_arguments import with_stages

    kinds = plan.shape.layer_kinds
    if kinds is None:
        return None
    letters = kinds.framework_pattern or kinds.pattern
    has_stages = max(plan.layout.num_stages, plan.made_for.baseline.layout.num_stages) > 1
    if has_stages and letters is None:
        raise PlanError(
            "a hybrid model's stages are the | in the command's --hybrid-layer-pattern, and this plan, of an "
            "older release, does not have its letters; start it with `quartet train`"
        )
    # A plan without a run has no command beside it.
    is_written = has_stages or plan.made_for.job is not None
    return with_stages(letters, plan.split) if is_written and letters is not None else None


def _settings(layout: "Layout") -> list[tuple[str, Any]]:
    """The flags of a layout's settings with their values; None for a flag that is left out."""
    from quartet_plugin.launchers.megatron_words import flag_of
    from quartet_plugin.space.knobs.registry import setting_knob

    knobs = [(setting_knob(setting), setting.value) for setting in layout.settings or ()]
    return [
        (knob.flag if name == knob.destination else flag_of(name), argument)
        for knob, value in knobs
        for name, argument in knob.arguments(value).items()
    ]


def _states_modules(layout: "Layout") -> bool:
    """Whether a layout has modules of its own for selective recompute."""
    return layout.recompute == "selective" and layout.setting("recompute_modules") is not None


def _sharing_left_out(plan: "Plan") -> list[str]:
    """Flags of shared sequences that Megatron refuses with another degree than the command's."""
    from quartet_plugin.model.hierarchical_context import SIZES, sizes_of
    from quartet_plugin.space.knobs.cp_comm_type import CP_COMM_TYPE, HIERARCHICAL_SIZES

    degree, command, job = plan.layout.context_parallel, plan.made_for.baseline.layout, plan.made_for.job
    if job is None:
        is_other = command.context_parallel not in (1, degree)
    else:
        stated = {setting.name: setting.value for setting in job.settings or ()}
        sizes = sizes_of(stated.get(SIZES))
        is_other = sizes is not None and math.prod(sizes) != degree
    flags = [HIERARCHICAL_SIZES.flag, *([CP_COMM_TYPE.flag] if degree == 1 else [])] if is_other else []
    return [flag for flag in flags if flag not in flags_of(plan)]


def left_out(plan: "Plan") -> list[str]:
    """Flags of the user's command that are incompatible with the plan."""
    from quartet_plugin.launchers.megatron_words import flag_of
    from quartet_plugin.space.knobs.recompute import RECOMPUTE_ARGUMENTS
    from quartet_plugin.space.knobs.split import SPLIT_ARGUMENTS

    baseline, layout = plan.made_for.baseline, plan.layout
    flags = [flag_of(name) for name in SPLIT_ARGUMENTS]
    if layout.pipeline_parallel == 1:
        flags.append("--pipeline-model-parallel-layout")
    if _stages_in_pattern(plan) is not None:
        flags.append("--hybrid-override-pattern")
    if layout.pipeline_parallel == 2 and layout.virtual_stages > 1:
        flags.append("--no-overlap-p2p-communication")
    if layout.virtual_stages == 1 and baseline.layout.virtual_stages > 1:
        flags.append("--overlap-p2p-communication-warmup-flush")
    if plan.schedule.group is None and baseline.schedule.group is not None:
        flags.append("--microbatch-group-size-per-virtual-pipeline-stage")
    if layout.recompute != baseline.layout.recompute:
        flags += [flag for flag in map(flag_of, RECOMPUTE_ARGUMENTS) if flag not in flags_of(plan)]
    elif _states_modules(layout):
        flags.append("--moe-layer-recompute")
    is_full = baseline.layout.recompute == layout.recompute == "full"
    is_distributed = is_full and baseline.layout.tensor_parallel > 1
    if is_distributed and (layout.tensor_parallel == 1 or layout.sequence_parallel):
        flags.append("--distribute-saved-activations")
    if baseline.layout.sequence_parallel and not layout.sequence_parallel:
        flags.append("--sequence-parallel")
    if baseline.layout.distributed_optimizer and not layout.distributed_optimizer:
        flags.append("--use-distributed-optimizer")
    flags += [flag for flag, value in _settings(layout) if value is None]
    flags += _sharing_left_out(plan)
    user_shape, shape = plan.made_for.shape, plan.shape
    has_groups = user_shape.num_query_groups < user_shape.num_attention_heads
    if has_groups and shape.num_query_groups == shape.num_attention_heads:
        flags += ["--group-query-attention", "--num-query-groups"]
    return flags


def lines(content: dict[str, Any]) -> list[str]:
    """The flags one a line, ready for a shell, and the order of RANKs where it is another; or a ds_config."""
    rows = []
    if "ds_config" in content:
        counts = "+".join(str(count) for count in content["split"])
        rows = json.dumps(content["ds_config"], indent=1).splitlines()
        rows.append(
            f"# PipelineModule(num_stages={content['num_stages']}); a ds_config has no setting for its split"
        )
        rows.append(f"# ({counts} layers), schedule ({content['schedule']}) and order: name the plan in one")
        return rows
    for name, value in content["flags"].items():
        # The layout's bars are a pipe to a shell.
        rows.append(shlex.join(_words_of(name, value)))
    rows.append(f"# remove from the command, if given: {' '.join(content['leave_out'])}")
    order = (
        "the launcher's own" if content["is_stock_order"] else "not the launcher's: set RANK before the start"
    )
    rows.append(f"# order of RANKs: {order}")
    if not content["is_stock_order"]:
        rows += [
            f"# RANK {row['rank']}: {row['host']}, LOCAL_RANK {row['local_rank']}" for row in content["ranks"]
        ]
    return rows


def _words_of(name: str, value: Any) -> list[str]:
    """The words of a flag: it alone for a switch, with all values of a list.

    A value that begins with a dash, as a pattern of layers may, is no value in a word of its own.
    """
    if value is True:
        return [name]
    values = [str(item) for item in (value if isinstance(value, list) else [value])]
    if len(values) == 1 and values[0].startswith("-"):
        return [f"{name}={values[0]}"]
    return [name, *values]


def write_native(plan: "Plan | None", *, run: "TuningRun") -> str:
    """Write the script beside the plan, or remove an earlier one; where it is, or why there is none.

    Raises ConfigError or StorageError where it cannot be written.
    """
    from quartet_plugin.model.files import write_text_atomic

    path = native_path(run.folder.path)
    path.unlink(missing_ok=True)
    if plan is None:
        return ""
    try:
        _check_words_behind(run)
        text = native_text(plan, command=run.command, cwd=run.cwd)
    except QuartetError as error:
        return f"no {NATIVE_FILE}: {error}"
    write_text_atomic(path, text)
    return shlex.join(["sh", str(path)])


def _check_words_behind(run: "TuningRun") -> None:
    """Raise PlanError where the command with words behind it is not known to be the plan's training."""
    from quartet_plugin.launchers.command import BRIDGE_MODULE, parse_command
    from quartet_plugin.launchers.engines import LOCAL

    if run.config.launcher != LOCAL:
        raise PlanError("its trials ran on a launcher's nodes, which the command alone does not start")
    training = parse_command(run.command, cwd=run.cwd)
    if training.entry == BRIDGE_MODULE:
        raise PlanError("a Megatron-Bridge script takes no flags of Megatron")
    if training.starter == "other" and Path(training.program).name not in _GIVES_WORDS_ON:
        raise PlanError(f"{training.program} may not give the words behind it to the training")


def native_path(run_folder: Path) -> Path:
    """Where the script of a run is."""
    return run_folder / "best" / NATIVE_FILE


def _exports(plan: "Plan", flags: set[str]) -> str:
    """Shell lines that export or unset the variables that the plan's values need.

    CUDA_DEVICE_MAX_CONNECTIONS is exported where TP or CP is above 1 without Megatron-FSDP (Megatron needs it
    before Blackwell), and unset where the plan turns Megatron-FSDP on; the variable of offloading is exported
    where the plan offloads modules. `flags` are the command's.
    """
    from quartet_plugin.space.knobs.offload_modules import OFFLOAD_MODULES, OFFLOAD_VARIABLE
    from quartet_plugin.space.knobs.use_megatron_fsdp import USE_MEGATRON_FSDP

    baseline, layout = plan.made_for.baseline.layout, plan.layout
    is_raised = max(layout.tensor_parallel, layout.context_parallel) > 1
    planned_fsdp = layout.setting(USE_MEGATRON_FSDP.name)
    is_sharded = USE_MEGATRON_FSDP.flag in flags if planned_fsdp is None else planned_fsdp is True
    was_raised = max(baseline.tensor_parallel, baseline.context_parallel) > 1
    is_new = is_raised and not is_sharded and (planned_fsdp is False or not was_raised)
    modules = layout.setting(OFFLOAD_MODULES.name)
    names = ["CUDA_DEVICE_MAX_CONNECTIONS"] if is_new else []
    names += [OFFLOAD_VARIABLE] if modules is not None and OFFLOAD_MODULES.is_for_gpus(modules) else []
    unset = "unset CUDA_DEVICE_MAX_CONNECTIONS\n" if planned_fsdp is True else ""
    return unset + "".join(f"export {name}=${{{name}:-1}}\n" for name in names)


def _check_connections(plan: "Plan", command: tuple[str, ...]) -> None:
    """Raise PlanError where a word of the command sets what the script unsets for Megatron-FSDP."""
    from quartet_plugin.space.knobs.use_megatron_fsdp import USE_MEGATRON_FSDP

    if plan.layout.setting(USE_MEGATRON_FSDP.name) is not True:
        return
    refused = next((word for word in command if _ONE_CONNECTION.search(word)), None)
    if refused is not None:
        raise PlanError(
            f"remove {refused} from the command: Megatron refuses 1 with {USE_MEGATRON_FSDP.flag}, which the "
            "plan turns on"
        )


def native_text(plan: "Plan", *, command: tuple[str, ...], cwd: Path) -> str:
    """The script. Raises PlanError if appended flags cannot express the whole plan."""
    from quartet_plugin.protocol.masking import shell_words

    content = export(plan)
    if "flags" not in content:
        raise PlanError(f"{plan.made_for.framework} takes no flags for a plan")
    if not content["is_stock_order"]:
        raise PlanError("the plan changes the order of the ranks, which no flag can express")
    if "--" in command:
        raise PlanError("the command has a -- of its own, behind which flags are not read")
    switches = {word.partition("=")[0].replace("_", "-") for word in command if word.startswith("--")}
    # A plan of a run does not know the command's type: with a degree of 1 Megatron refuses this one alone.
    switches -= set() if any("a2a+p2p" in word for word in command) else {"--cp-comm-type"}
    contradicted = [flag for flag in content["leave_out"] if flag.replace("_", "-") in switches]
    if contradicted:
        raise PlanError(f"remove {', '.join(contradicted)} from the command: the plan does not allow them")
    _check_connections(plan, command)
    words = [*command]
    for name, value in content["flags"].items():
        words += _words_of(name, value)
    origin = " ".join(f"trial {plan.provenance.trial} of the run {plan.provenance.run}".split())
    return (
        "#!/bin/sh\n"
        f"# Trains with {origin} by the framework's own flags; needs no plugin.\n"
        f"cd {shlex.quote(str(cwd))} || exit\n"
        f"{_exports(plan, switches)}"
        f"exec {shell_words(command)} \\\n"
        f"    {shlex.join(words[len(command) :])}\n"
    )
