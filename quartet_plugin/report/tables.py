"""Shows a plan as lines of text: its parts, its changes against the baseline and their class, its speedup."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quartet_plugin.model.measurement import Comparison, Measurement, Objective
from quartet_plugin.model.plan import STOCK, MadeFor, NodeInfo, Plan
from quartet_plugin.model.schema import dump
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.report.final_choice import choice_lines
from quartet_plugin.report.formatting import (
    iteration_spread,
    iteration_words,
    microbatch_words,
    rate,
    size,
    speedup_spread,
)
from quartet_plugin.report.other_model import plan_model_lines
from quartet_plugin.report.speedups import predicted_speedup
from quartet_plugin.report.throughput import cost_of, throughput_of
from quartet_plugin.schedule.choice import origin_words
from quartet_plugin.space.features import TOKENS_KEPT
from quartet_plugin.space.knobs.context_parallel import CONTEXT_PARALLEL
from quartet_plugin.space.knobs.data_parallel import DATA_PARALLEL
from quartet_plugin.space.knobs.knob import LayoutKnob
from quartet_plugin.space.knobs.micro_batch_size import MICRO_BATCH_SIZE
from quartet_plugin.space.knobs.mtp_stage import MTP_STAGE, mtp_stage_of
from quartet_plugin.space.knobs.registry import LAYOUT_KNOBS
from quartet_plugin.space.knobs.tensor_parallel import TENSOR_PARALLEL
from quartet_plugin.space.plan_label import plan_label, split_words

# A: rounding of nothing but order; B: rounding of reductions; C: may change the objective; D: another model.
ChangeClass = Literal["A", "B", "C", "D"]

CLASS_MEANING: dict[ChangeClass, str] = {
    "A": "the same training, sums in another order",
    "B": "the same training, other rounding in reductions",
    "C": "may change the training objective",
    "D": "another model of the same budget",
}
OBJECTIVE_WORDS: dict[Objective, str] = {
    "tokens_per_s": "tokens/s",
    "model_flops_per_s_per_device": "model FLOP/s per device",
}


# Nodes up to which a plan names each.
MAX_NODES = 4
# Knobs that decide the samples of a microbatch, and those that decide which of its tokens a rank has.
_BATCHING: tuple[LayoutKnob, ...] = (DATA_PARALLEL, MICRO_BATCH_SIZE)
_SHARING: tuple[LayoutKnob, ...] = (TENSOR_PARALLEL, CONTEXT_PARALLEL)


@dataclass(frozen=True, slots=True)
class Change:
    """One part of a plan that differs from the baseline's."""

    part: str
    before: str
    after: str
    change_class: ChangeClass


def changes(plan: Plan) -> tuple[Change, ...]:
    """The parts of a plan that differ from the baseline's, with the class of each change."""
    made_for, baseline = plan.made_for, plan.made_for.baseline
    layout, before = plan.layout, baseline.layout
    features = made_for.batching_features or ()
    deciding = _BATCHING if features and layout.batching != before.batching else ()
    deciding += () if TOKENS_KEPT.keys().isdisjoint(features) else _SHARING
    candidates = (
        Change("shape", plan.made_for.shape.label, plan.shape_label, "D"),
        *(
            Change(
                knob.label,
                knob.text(knob.in_layout(before)),
                knob.text(knob.in_layout(layout)),
                "C" if knob in deciding else knob.change_class,
            )
            for knob in LAYOUT_KNOBS
            if knob.is_of(made_for.framework)
        ),
        Change("split", baseline.split.label, plan.split.label, "A"),
        Change(
            MTP_STAGE.label, mtp_stage_of(baseline.split), mtp_stage_of(plan.split), MTP_STAGE.change_class
        ),
        Change("schedule", baseline.schedule.label, plan.schedule.label, "A"),
        Change("mapping", STOCK, plan.mapping.label, "A"),
    )
    return tuple(change for change in candidates if change.before != change.after)


def plan_lines(plan: Plan) -> list[str]:
    """The whole plan: origin, model, shape, layout, split, schedule, mapping, changes, speedup, choice."""
    made = plan.made_for
    lines = [
        f"plan      {plan.digest[:12]} {_origin(plan)}",
        f"parts     {plan_label(plan)}",
        f"made for  {made.framework} {made.framework_version}, {made.world_size} processes on "
        f"{_node_words(made.nodes)}",
        f"          {_shape_words(made.shape)}, global batch size {made.global_batch_size}",
        *_packed_lines(made),
        *_job_lines(plan),
        f"shape     {_shape_words(plan.shape)}",
        f"layout    {plan.layout.label}: {microbatch_words(plan.num_microbatches)} an iteration",
        f"split     {split_words(plan)}",
        f"schedule  {plan.schedule.label}",
        *_order_lines(plan),
        f"mapping   {plan.mapping.label}",
    ]
    lines += ["", *change_lines(plan), *plan_model_lines(plan), *_prediction_lines(plan)]
    if plan.measurement is not None:
        lines += ["", *comparison_lines(plan.measurement), *_mfu_lines(plan, plan.measurement)]
        lines += choice_lines(plan)
    return lines


def _packed_lines(made_for: MadeFor) -> list[str]:
    """How full the job's packed sequences are; none for other jobs."""
    packed = made_for.packed
    if packed is None:
        return []
    return [
        f"          packed sequences: {packed.tokens_per_sequence:,.0f} tokens of documents each, in "
        f"documents of {packed.attended_length:,.0f} tokens (mean over tokens)"
    ]


def _order_lines(plan: Plan) -> list[str]:
    """The parameters of the family that a searched order was made by; none for other schedules."""
    words = None if plan.schedule.custom is None else origin_words(plan.schedule.custom)
    return [] if words is None else [f"          {words}"]


def trial_lines(plan: Plan, *, iteration_s: float | None, comparison: Comparison | None) -> list[str]:
    """The plan of a trial, with its trial's seconds per iteration and its comparison of the final rounds."""
    lines = plan_lines(plan)
    if iteration_s is not None:
        rates = throughput_of(plan, iteration_s)
        lines += [
            "",
            f"trial     {iteration_words(iteration_s)} s/iteration in its single trial, {rates.words}",
        ]
    return lines if comparison is None else [*lines, *comparison_lines(comparison)]


def plan_record(
    plan: Plan, *, iteration_s: float | None = None, comparison: Comparison | None = None
) -> dict[str, Any]:
    """The plan as data, with its changes and its speedups; see docs/formats.md."""
    measured = comparison or plan.measurement
    return {
        "schema_version": 1,
        "plan": {**dump(plan), "digest": plan.digest},
        "changes": [
            {
                "part": change.part,
                "before": change.before,
                "after": change.after,
                "class": change.change_class,
            }
            for change in changes(plan)
        ],
        "trial_iteration_s": iteration_s,
        "predicted_speedup": predicted_speedup(plan),
        "speedup": None if measured is None else dump(measured.speedup),
    }


def _origin(plan: Plan) -> str:
    """Where a plan is from; a plan of a described job was never a trial."""
    made = plan.provenance
    if plan.made_for.job is not None and plan.measurement is None:
        return f"of `quartet plan`, place {made.trial}; not measured"
    return f"of run {made.run}, trial {made.trial}"


def _node_words(nodes: Sequence[NodeInfo]) -> str:
    """The names of a few nodes; of many nodes the first, the last, and their kind."""
    if len(nodes) <= MAX_NODES:
        return ", ".join(f"{node.host} ({node.node_class})" for node in nodes)
    classes = ", ".join(dict.fromkeys(node.node_class for node in nodes))
    return f"{len(nodes)} nodes, {nodes[0].host} to {nodes[-1].host} ({classes})"


def _prediction_lines(plan: Plan) -> list[str]:
    """The predicted seconds and the cost of the job where its tokens are known.

    Where the plan was measured its prediction is compared with that, else it has rates.
    """
    seconds = None if plan.prediction is None else plan.prediction.iteration_s
    if seconds is None:
        return []
    rates = throughput_of(plan, seconds)
    cost = cost_of(plan, rates)
    if plan.measurement is None:
        words = f"{seconds:.4g} s per iteration, {rates.words}"
    else:
        words = _beside_measured(seconds, plan.measurement.plan.iteration_s.median)
        speedup = predicted_speedup(plan)
        words += "" if speedup is None else f": a speedup of {speedup:.2f}x"
    lines = [f"predicted {words}"]
    return ["", *lines] if cost is None else ["", *lines, f"cost      {cost.words}"]


def _beside_measured(predicted_s: float, measured_s: float) -> str:
    by = round(100 * (predicted_s / measured_s - 1))
    differs = f"{abs(by)} % {'more' if by > 0 else 'less'} than measured" if by else "as measured"
    return f"{iteration_words(predicted_s)} s per iteration before its launch ({differs})"


def _mfu_lines(plan: Plan, measured: Comparison) -> list[str]:
    """The rate that the measurement's own line does not have."""
    words = throughput_of(plan, measured.plan.iteration_s.median).mfu_words
    return [f"MFU       {words}"] if words else []


def _job_lines(plan: Plan) -> list[str]:
    """The further settings of a planned job, besides shape and batch; nothing for a plan from a run."""
    job = plan.made_for.job
    if job is None:
        return []
    lines = [f"          {name} {words}" for name, words in job.model_words.items()]
    if job.devices is not None:
        devices = job.devices
        nodes = f"{devices.num_nodes} nodes of {devices.devices_per_node}"
        lines.append(f"          {nodes} {devices.device}, {size(devices.memory_bytes)} each")
    return lines


def change_lines(plan: Plan) -> list[str]:
    """A line for each change against the baseline, with the meaning of its class for the training."""
    rows = [
        f"{change.part} {change.before} -> {change.after} (class {change.change_class}: "
        f"{CLASS_MEANING[change.change_class]})"
        for change in changes(plan)
    ] or ["nothing"]
    return [f"{'' if row else 'changes':<10}{words}" for row, words in enumerate(rows)]


def comparison_lines(comparison: Comparison, *, names: Sequence[str] = ("baseline", "plan")) -> list[str]:
    """Baseline against plan: seconds with their launches' range, and the speedup with its interval."""
    ratios = ", ".join(f"{ratio:.2f}x" for ratio in comparison.round_ratios)
    return [
        _measurement_line(names[0], comparison.baseline),
        _measurement_line(names[1], comparison.plan),
        f"speedup   {speedup_spread(comparison.speedup)} in {OBJECTIVE_WORDS[comparison.objective]}, "
        f"measured in turns over {comparison.plan.num_launches} rounds "
        f"({100 * confidence(comparison):.0f} % interval)",
        f"{'':<10}the median of the rounds' ratios{f' ({ratios})' if ratios else ''}, "
        "not the ratio of the two lines above",
    ]


def confidence(comparison: Comparison) -> float:
    """How often the interval of a speedup holds it.

    That of an earlier release is a median's bootstrap interval: 95 %, less where even the whole range holds
    the median less often. Each of n values is above it with probability 1/2, so all are on one side of it
    with 2^(1 - n).
    """
    if comparison.confidence is not None:
        return comparison.confidence
    return min(0.95, 1.0 - 2.0 ** (1 - comparison.plan.num_launches))


def _measurement_line(name: str, measured: Measurement) -> str:
    return (
        f"{name:<9} {iteration_spread(measured)} s/iteration, "
        f"{measured.tokens_per_s:,.0f} tokens/s, "
        f"{rate(measured.model_flops_per_s_per_device)} per device, peak {size(measured.peak_memory_bytes)}"
    )


def _shape_words(shape: ModelShape) -> str:
    return (
        f"{shape.num_layers} layers, hidden {shape.hidden_size}, {shape.num_attention_heads} heads, "
        f"FFN {shape.ffn_hidden_size}, vocabulary {shape.vocab_size}, "
        f"{shape.num_parameters / 1e6:,.1f} M parameters"
    )
