"""`quartet layout`: prints the flag that splits a model over pipeline stages."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quartet_plugin.cli.command import (
    CalibrationFile,
    HardwareFolder,
    JsonSwitch,
    check_range,
    constants_of,
    devices_of,
)
from quartet_plugin.cli.output import MAX_FLAG_LINE, show
from quartet_plugin.errors import UsageError

if TYPE_CHECKING:
    from quartet_plugin.cost.constants import Constants
    from quartet_plugin.planner.stage_layouts import StageLayout

_MAX_DEGREE = 65_536
_FLAG = "--pipeline-model-parallel-layout"


def layout_command(
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="The name of a known model, or a HuggingFace config.json or its folder."
        ),
    ],
    pp: Annotated[int, typer.Option(help="Pipeline parallel size.", metavar="N")],
    vpp: Annotated[int, typer.Option(help="Virtual stages on each device.", metavar="N")] = 1,
    device: Annotated[str, typer.Option(metavar="NAME", help="The device's name.")] = "H100",
    tp: Annotated[int, typer.Option(help="Tensor parallel size.", metavar="N")] = 1,
    dp: Annotated[int, typer.Option(help="Data parallel size.", metavar="N")] = 1,
    ep: Annotated[int, typer.Option(help="Expert parallel size, inside of --dp.", metavar="N")] = 1,
    micro_batch: Annotated[int, typer.Option(help="Sequences in each microbatch.", metavar="N")] = 1,
    microbatches: Annotated[
        int | None,
        typer.Option(help="Microbatches in each iteration. Default: 8 for each stage of --pp.", metavar="N"),
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option(help="Tokens in each sequence. Default: the model's own.", metavar="N")
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A file written by `quartet profile`, which corrects the times; needs --cluster.",
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="CLUSTER.json", help="The cluster file of the machine on which the profile was measured."
        ),
    ] = None,
    as_json: JsonSwitch = False,
    hardware: HardwareFolder = None,
    calibration: CalibrationFile = None,
) -> None:
    """Print the best split of a model's layers as Megatron's flag, and compare it with the even split."""
    from quartet_plugin.cli.plan import model_section_of
    from quartet_plugin.cost.constants import fitted
    from quartet_plugin.cost.devices import device_named
    from quartet_plugin.model.layout import Layout
    from quartet_plugin.planner.job import parse_job
    from quartet_plugin.planner.stage_layouts import best_and_even, check_degrees, check_stages

    count = 8 * pp if microbatches is None else microbatches
    sizes = {"--pp": pp, "--vpp": vpp, "--tp": tp, "--dp": dp, "--ep": ep, "--micro-batch": micro_batch}
    for option, value in (*sizes.items(), ("--microbatches", count)):
        check_range(option, value, most=_MAX_DEGREE)
    if vpp > 1 and (pp == 1 or count % pp):
        raise UsageError(f"--vpp {vpp}: needs --pp above 1, and --microbatches a multiple of it")
    if dp % ep:
        raise UsageError(f"--ep {ep}: must divide --dp ({dp})")
    library = devices_of(hardware)
    num_devices = pp * tp * dp
    per_node = math.gcd(num_devices, device_named(device, extra=library).devices_per_node)
    section = model_section_of(model)
    request = parse_job(
        {
            "model": section if seq_length is None else {**section, "seq_length": seq_length},
            "cluster": {
                "device": device,
                "num_nodes": num_devices // per_node,
                "devices_per_node": per_node,
            },
            "batch": {"global_batch_size": count * micro_batch * dp},
        },
        where="options",
        devices=library,
    )
    check_degrees(request, tensor=tp, expert=ep)
    check_stages(request.shape.num_layers, pipeline=pp, num_chunks=vpp)
    layout = Layout(
        tensor_parallel=tp,
        pipeline_parallel=pp,
        data_parallel=dp,
        virtual_stages=vpp,
        context_parallel=1,
        expert_parallel=ep,
        micro_batch_size=micro_batch,
        sequence_parallel=tp > 1,
        distributed_optimizer=True,
        recompute="none",
    )
    constants = _constants(calibration, profile=profile or [], cluster=cluster) or fitted()
    best, even = best_and_even(request, layout, constants=constants)
    if as_json:
        typer.echo(json.dumps(_data(best, even), indent=1, allow_nan=False))
    else:
        show(*_lines(best, even, chunks=vpp, pipeline=pp), limit=MAX_FLAG_LINE)


def _constants(calibration: Path | None, *, profile: list[Path], cluster: Path | None) -> "Constants | None":
    """The constants that a calibration or profiles of a cluster correct; None for the package's."""
    if not profile:
        if cluster is not None:
            raise UsageError("--cluster: works only with --profile; --device names the device to plan for")
        return constants_of(calibration)
    if cluster is None or calibration is not None:
        raise UsageError(
            "--profile: needs --cluster, the cluster that it was measured on, and excludes --calibration"
        )
    from quartet_plugin.calibration.constants_fit import calibrate
    from quartet_plugin.cli.calibrate import of_profile

    observations = [observation for path in profile for observation in of_profile(path, cluster=cluster)]
    return calibrate(observations).constants


def _data(best: "StageLayout", even: "StageLayout") -> dict[str, Any]:
    def entry(layout: "StageLayout") -> dict[str, Any]:
        return {
            "layout": layout.megatron_layout,
            "layers_per_stage": list(layout.split.transformer_layers_per_stage),
            "iteration_s": layout.iteration_s,
            "forward_s": list(layout.forward_s),
            "backward_s": list(layout.backward_s),
            "peak_memory_bytes": [memory.total_bytes for memory in layout.memory],
            "fits": layout.fits,
        }

    return {"schema_version": 1, "flag": _FLAG, "best": entry(best), "even": entry(even)}


def _lines(best: "StageLayout", even: "StageLayout", *, chunks: int, pipeline: int) -> list[str]:
    """The flag, a line a device, and the even split beside it."""
    from quartet_plugin.report.formatting import size, time_of

    lines = [f"{_FLAG} '{best.megatron_layout}'"]
    counts = best.split.transformer_layers_per_stage
    for rank, memory in enumerate(best.memory):
        stages = [chunk * pipeline + rank for chunk in range(chunks)]
        layers = "+".join(str(counts[stage]) for stage in stages)
        forward_s = sum(best.forward_s[stage] for stage in stages)
        backward_s = sum(best.backward_s[stage] for stage in stages)
        note = "" if memory.fits else f", more than the {size(memory.available_bytes)} that it has"
        lines.append(
            f"pipeline rank {rank}: {layers} layers, forward {time_of(forward_s)}, backward "
            f"{time_of(backward_s)} a microbatch, memory {size(memory.total_bytes)}{note}"
        )
    lines.append(f"iteration {time_of(best.iteration_s)} predicted")
    if even.split == best.split:
        return [*lines, "the even split is the fastest of those that were compared"]
    excess = even.iteration_s / best.iteration_s - 1
    fullest = max(memory.total_bytes for memory in even.memory)
    note = "" if even.fits else ", which does not fit"
    return [
        *lines,
        f"even split {even.split.label}: {time_of(even.iteration_s)}, {excess:+.1%}; "
        f"its fullest device holds {size(fullest)}{note}",
    ]
