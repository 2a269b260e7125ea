"""Data parallelism: the copies of the model, which the other degrees leave."""

from dataclasses import replace

from quartet_plugin.model.layout import Layout
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.expert_tensor_parallel import expert_devices
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, LayoutKnob, Value, degree_of, never_kept


def _copies(layout: Layout, rules: KnobRules) -> int:
    return rules.job.layout.world_size // (
        layout.context_parallel * layout.tensor_parallel * layout.pipeline_parallel
    )


def _offers(context: KnobContext) -> list[int]:
    return [_copies(context.layout, context.rules)]


def _fault(value: Value, context: KnobContext) -> str | None:
    copies = _copies(context.layout, context.rules)
    if value != copies:
        return f"must be {copies}, the devices that TP and PP leave"
    job = context.rules.job
    if job.global_batch_size % copies:
        return f"must divide a batch of {job.global_batch_size}"
    if "moe" in job.features and job.experts is None:
        experts = context.layout.expert_parallel
        devices, words = expert_devices(replace(context.layout, data_parallel=copies), context.rules)
        return f"{words} must be a multiple of EP ({experts}), which is kept" if devices % experts else None
    return None


DATA_PARALLEL = LayoutKnob(
    name="data_parallel",
    label="DP",
    meaning="copies of the model",
    kind="degree",
    axis=Axis.DEGREES,
    change_class="B",
    rule="what TP, CP and PP leave of the processes; experts divide it (megatron/core/parallel_state.py)",
    offers=_offers,
    fault=_fault,
    kept=never_kept,
    read_back=degree_of("data_parallel"),
)
