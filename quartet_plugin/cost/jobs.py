"""Runs of our own: a shape and a layout on a number of devices, as the cost model takes them."""

from dataclasses import replace

from quartet_plugin.cost.devices import DeviceSpec
from quartet_plugin.cost.run import HalfPrecision, ScheduleKind, Software, TrainingRun, UniformCluster
from quartet_plugin.cost.software import ON_CPU
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import ScheduleChoice, Split
from quartet_plugin.model.shape import ModelShape


def uniform_cluster_of_device(
    device: DeviceSpec, *, num_devices: int, devices_per_node: int | None = None
) -> UniformCluster:
    """`num_devices` of `device` with the links it usually has."""
    per_node = devices_per_node or device.devices_per_node
    return UniformCluster(
        device=device,
        num_devices=num_devices,
        devices_per_node=per_node,
        # A node with fewer devices than the scale-up domain still belongs to a larger one (GB200's racks).
        scale_up_devices=max(per_node, device.scale_up_devices),
        scale_up_bytes_per_s=device.scale_up_bandwidth_bytes_per_s,
        scale_out_bytes_per_s=device.scale_out_bandwidth_bytes_per_s,
        memory_bytes=device.memory_bytes,
    )


def run_of(
    shape: ModelShape,
    layout: Layout,
    *,
    global_batch_size: int,
    layers_per_stage: tuple[int, ...],
    machines: UniformCluster,
    schedule: ScheduleKind | None = None,
    precision: HalfPrecision = "bf16",
    software: Software | None = None,
) -> TrainingRun:
    """A run of Megatron-Core; `schedule` None is interleaved with virtual stages and 1F1B without.

    `layers_per_stage` counts transformer layers. Raises ConfigError where sizes do not fit each other.
    """
    if layout.world_size != machines.num_devices:
        raise ConfigError(
            f"layout {layout.label}: {layout.world_size} ranks; must be the {machines.num_devices} devices"
        )
    if len(layers_per_stage) != layout.num_stages or sum(layers_per_stage) != shape.num_layers:
        raise ConfigError(
            f"layers_per_stage: {list(layers_per_stage)[:16]}; must be {layout.num_stages} counts "
            f"that sum to {shape.num_layers}"
        )
    ranks = layout.data_parallel * layout.context_parallel
    chosen = schedule
    if layout.pipeline_parallel == 1:
        chosen = ScheduleKind.NONE
    elif chosen is None:
        chosen = ScheduleKind.INTERLEAVED if layout.virtual_stages > 1 else ScheduleKind.ONE_F_ONE_B
    known = software or Software()
    if layout.context_parallel > 1 and shape.seq_length % layout.context_parallel:
        raise ConfigError(
            f"seq_length: {shape.seq_length}; must be a multiple of "
            f"context_parallel ({layout.context_parallel})"
        )
    return TrainingRun(
        shape=shape,
        layout=layout,
        num_microbatches=layout.num_microbatches(global_batch_size),
        layers_per_stage=layers_per_stage,
        half=precision,
        matmul=precision,
        zero_stage=1 if layout.distributed_optimizer else 0,
        shard_group=1,
        optimizer_group=ranks,
        schedule=chosen,
        machines=machines,
        software=known,
    )


def schedule_kind(choice: ScheduleChoice) -> ScheduleKind | None:
    """The schedule of a plan as the cost model simulates it; None where it has no name there."""
    name = choice.name if choice.custom is None else choice.custom.named
    known = {kind.value: kind for kind in ScheduleKind}
    return ScheduleKind.NONE if name == "no-pipelining" else known.get(name or "")


def measured_run(
    shape: ModelShape,
    layout: Layout,
    *,
    split: Split,
    schedule: ScheduleChoice,
    global_batch_size: int,
    precision: HalfPrecision,
    on_cpu: bool,
    machines: UniformCluster,
) -> TrainingRun:
    """A run that was measured, on as many of the cluster's devices as it used.

    Raises ConfigError for a schedule that the cost model has no name for.
    """
    kind = schedule_kind(schedule)
    if kind is None:
        raise ConfigError(f"schedule {schedule.label}: has no name in the cost model")
    return run_of(
        shape,
        layout,
        global_batch_size=global_batch_size,
        layers_per_stage=split.transformer_layers_per_stage,
        machines=replace(machines, num_devices=layout.world_size),
        schedule=kind,
        precision=precision,
        software=ON_CPU if on_cpu else None,
    )
