"""Runs on processors for the calibration's tests."""

from quartet_plugin.cost.devices import DeviceSpec
from quartet_plugin.cost.run import (
    ON_CPU,
    ScheduleKind,
    TrainingRun,
    UniformCluster,
    run_of,
    uniform_cluster_of_device,
)
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.shape import ModelShape


def machines(num_devices: int = 2) -> UniformCluster:
    """Processor cores of one machine."""
    device = DeviceSpec(
        schema_version=1,
        name="a core",
        generation="cpu",
        peak_flops={"fp32": 5e10},
        matmul_ceiling={"fp32": 1.0},
        memory_bytes=8 * 2**30,
        memory_bandwidth_bytes_per_s=1e10,
        scale_up_bandwidth_bytes_per_s=2e9,
        scale_up_topology="switch",
        scale_up_devices=num_devices,
        scale_out_bandwidth_bytes_per_s=2e9,
        devices_per_node=num_devices,
        compute_units=1,
        source="a test",
    )
    return uniform_cluster_of_device(device, num_devices=num_devices)


def cpu_run(
    *,
    layers: int = 8,
    hidden: int = 256,
    seq: int = 128,
    vocab: int = 4096,
    pp: int = 2,
    tp: int = 1,
    split: tuple[int, ...] = (),
    micro_batch: int = 1,
    num_microbatches: int = 8,
    schedule: ScheduleKind | None = None,
) -> TrainingRun:
    """A small GPT in fp32 on two cores."""
    dp = 2 // (pp * tp)
    counts = split or (layers // pp,) * pp
    return run_of(
        ModelShape(
            num_layers=layers,
            hidden_size=hidden,
            ffn_hidden_size=4 * hidden,
            num_attention_heads=4,
            num_query_groups=4,
            kv_channels=hidden // 4,
            seq_length=seq,
            vocab_size=vocab,
            max_position_embeddings=seq,
            gated_ffn=False,
            tied_embeddings=True,
            position_embedding="learned_absolute",
        ),
        Layout(
            tensor_parallel=tp,
            pipeline_parallel=pp,
            data_parallel=dp,
            virtual_stages=len(counts) // pp,
            context_parallel=1,
            expert_parallel=1,
            micro_batch_size=micro_batch,
            sequence_parallel=False,
            distributed_optimizer=False,
            recompute="none",
        ),
        global_batch_size=micro_batch * num_microbatches * dp,
        layers_per_stage=counts,
        machines=machines(),
        schedule=schedule,
        precision="fp32",
        software=ON_CPU,
    )


def varied_runs() -> list[TrainingRun]:
    """Runs whose terms differ enough to be told apart."""
    return [
        cpu_run(),
        cpu_run(num_microbatches=2, micro_batch=4),
        cpu_run(pp=1, tp=2, num_microbatches=4),
        cpu_run(pp=1, num_microbatches=4),
        cpu_run(layers=6, hidden=384, vocab=8192, split=(4, 2), num_microbatches=4),
        cpu_run(layers=6, hidden=384, vocab=8192, pp=1, num_microbatches=2),
        cpu_run(hidden=128, seq=256, split=(2, 2, 2, 2)),
        cpu_run(hidden=128, seq=512, pp=1, tp=2),
        cpu_run(layers=4, seq=256, vocab=16384, split=(3, 1), schedule=ScheduleKind.ZB_H1),
        cpu_run(layers=12, hidden=64, seq=64, vocab=2048, num_microbatches=4),
        cpu_run(layers=12, hidden=64, seq=32, vocab=2048, pp=1, num_microbatches=2, micro_batch=2),
        cpu_run(layers=4, hidden=512, seq=64, vocab=2048, num_microbatches=16),
        cpu_run(layers=2, hidden=512, seq=32, vocab=32768, num_microbatches=2),
    ]
