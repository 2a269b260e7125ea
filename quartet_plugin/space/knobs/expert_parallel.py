"""Expert parallelism: the devices that share the experts."""

import math
from dataclasses import replace

from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.divisors import divisors
from quartet_plugin.space.knobs.expert_tensor_parallel import expert_devices, expert_pipelines_fault
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, LayoutKnob, Value, degree_of, kept_fault
from quartet_plugin.space.knobs.token_dispatcher import has_only_flex, lacks_peers


def _offers(context: KnobContext) -> list[int]:
    experts = context.rules.job.experts
    num_experts = 1 if experts is None else experts.num_experts
    devices, _ = expert_devices(context.layout, context.rules)
    return divisors(math.gcd(num_experts, devices))


def _fault(value: Value, context: KnobContext) -> str | None:
    size, job = int(value), context.rules.job
    if kept := kept_fault(size, job.layout.expert_parallel, _kept(context.rules)):
        return kept
    if size == 1 and "overlap_moe" in job.features:
        return "overlap of expert communication needs EP above 1"
    if size == 1 and lacks_peers(context) and has_only_flex(context.rules):
        return "the flex dispatcher needs EP above 1"
    if job.experts is not None and job.experts.num_experts % size:
        return f"must divide the {job.experts.num_experts} experts"
    devices, words = expert_devices(context.layout, context.rules)
    if devices % size:
        return f"must divide {words}"
    return expert_pipelines_fault(replace(context.layout, expert_parallel=size), context.rules)


def _kept(rules: KnobRules) -> str | None:
    if rules.job.experts is not None:
        return None
    return "no plan describes these experts" if "moe" in rules.job.features else "the model has no experts"


EXPERT_PARALLEL = LayoutKnob(
    name="expert_parallel",
    label="EP",
    meaning="devices that share the experts",
    kind="degree",
    axis=Axis.DEGREES,
    change_class="B",
    rule="divides the experts, and DP x CP, or TP x DP x CP where ETP is 1 (megatron/training/arguments.py, "
    "megatron/core/parallel_state.py); EP x ETP is TP x CP with --use-tp-pp-dp-mapping and PP above 1 "
    "(megatron/core/parallel_state.py); must be above 1 with flex or overlap of expert communication "
    "(megatron/core/transformer/transformer_config.py)",
    flag="--expert-model-parallel-size",
    offers=_offers,
    fault=_fault,
    kept=_kept,
    read_back=degree_of("expert_parallel"),
)
