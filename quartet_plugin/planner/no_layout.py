"""Why a job has no legal layout: the request that alone leaves none, or the constraint that refuses most."""

from dataclasses import replace

from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.layout_table import (
    CP,
    DP,
    EP,
    PP,
    SIZE,
    TP,
    VIRTUAL,
    LegalDegrees,
    Refusal,
    layout_table_of,
    refused_requests,
)
from quartet_plugin.space.knobs.divisors import nearest_words
from quartet_plugin.space.layouts import undivided_request

# The requests that may leave no layout, those with numbers by their column in the table.
_NUMBERS = {
    "tensor_parallel": TP,
    "context_parallel": CP,
    "pipeline_parallel": PP,
    "data_parallel": DP,
    "expert_parallel": EP,
    "micro_batch_size": SIZE,
    "virtual_stages": VIRTUAL,
}
_DEGREES = ("tensor_parallel", "context_parallel", "pipeline_parallel", "data_parallel")
_WORDS = ("split", "mtp_stage", "schedule", "recompute", "distributed_optimizer")
# The constraints that degrees meet last: what they refuse was legal by all others.
_LAST = ("sequence", "layers", "batch")


def no_layout_words(job: PlanRequest) -> str:
    """One line for a job without a layout: the value, the rule and the nearest legal values."""
    undivided = undivided_request(job.search, num_devices=job.machines.num_devices)
    if undivided is not None:
        nearest = LegalDegrees(job, job.shape).nearest_of_search()
        return f"layouts: none is legal: {undivided}{nearest}; choose another, or auto"
    refused = sorted(refused_requests(job, job.shape), key=_nearness, reverse=True)
    for name in (*_NUMBERS, *_WORDS):
        fault = _fault_of_request(job, name)
        if fault is not None:
            rule = refused[0].reason if refused and name in _DEGREES else fault
            asked = ", ".join(map(str, getattr(job.search, name)))
            return f"layouts: none is legal: search.{name}: {asked}; {rule}; choose another, or auto"
    shape = job.shape
    most = f"; most often: {refused[0].reason}" if refused else ""
    return (
        f"layouts: none is legal for {job.machines.num_devices} devices, {shape.num_attention_heads} heads, "
        f"{shape.num_query_groups} groups, {shape.num_layers} layers, sequences of {shape.seq_length} and "
        f"a batch of {job.global_batch_size}{most}; allow more of search, or change the batch or the devices"
    )


def _nearness(refusal: Refusal) -> tuple[int, int]:
    """How many constraints the refused degrees meet, then how many of them there are."""
    rule = refusal.reason.partition(":")[0]
    return (_LAST.index(rule) + 1 if rule in _LAST else 0, refusal.num_refused)


def _fault_of_request(job: PlanRequest, name: str) -> str | None:
    """What is wrong with one request where the job has layouts without it; None where it is not to blame.

    A default that the job does not write out is nobody's request.
    """
    if name not in job.search.model_fields_set or not getattr(job.search, name):
        return None
    free = replace(job, search=job.search.model_copy(update={name: None}))
    columns = layout_table_of(free, job.shape, is_checked=False).columns
    if not len(columns):
        return None
    legal = sorted(set(columns[:, _NUMBERS[name]].tolist())) if name in _NUMBERS else []
    nearest = nearest_words(getattr(job.search, name)[0], legal) if legal else ""
    return f"no layout of the job has it{nearest}"
