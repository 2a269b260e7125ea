"""A plan as lines of text: its parts, its changes against the baseline and their class, its speedup."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quartet_plugin.model.measurement import Comparison, Measurement, Objective
from quartet_plugin.model.plan import STOCK, Plan
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.report.final_choice import choice_lines
from quartet_plugin.report.formatting import rate, size, spread

# A: rounding of nothing but order; B: rounding of reductions; C: may change the objective; D: another model.
ChangeClass = Literal["A", "B", "C", "D"]

CLASS_MEANING: dict[ChangeClass, str] = {
    "A": "the same training, summed in another order",
    "B": "the same training, reductions rounded otherwise",
    "C": "can change the objective",
    "D": "another model of the same budget",
}
OBJECTIVE_WORDS: dict[Objective, str] = {
    "tokens_per_s": "tokens/s",
    "model_flops_per_s_per_device": "model FLOP/s per device",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One part of a plan that differs from the baseline's."""

    part: str
    before: str
    after: str
    change_class: ChangeClass


def changes(plan: Plan) -> tuple[Change, ...]:
    """The parts of a plan that differ from the baseline's, with the class of each change."""
    baseline = plan.made_for.baseline
    layout, before = plan.layout, baseline.layout
    numbers = ("tensor_parallel", "data_parallel", "context_parallel", "expert_parallel", "micro_batch_size")
    reduces = any(getattr(layout, name) != getattr(before, name) for name in numbers)
    reduces |= layout.distributed_optimizer != before.distributed_optimizer
    rebatches = layout.batching != before.batching and plan.made_for.batching_features is not None
    candidates = (
        Change("shape", plan.made_for.shape.label, plan.shape.label, "D"),
        Change("layout", before.label, layout.label, "C" if rebatches else "B" if reduces else "A"),
        Change("split", baseline.split.label, plan.split.label, "A"),
        Change("schedule", baseline.schedule.label, plan.schedule.label, "A"),
        Change("mapping", STOCK, plan.mapping.label, "A"),
    )
    return tuple(change for change in candidates if change.before != change.after)


def plan_lines(plan: Plan) -> list[str]:
    """The whole plan: origin, model, shape, layout, split, schedule, mapping, changes, speedup, choice."""
    made = plan.made_for
    nodes = ", ".join(f"{node.host} ({node.node_class})" for node in made.nodes[:8])
    more = f", and {len(made.nodes) - 8} more" if len(made.nodes) > 8 else ""
    lines = [
        f"plan      {plan.digest[:12]} of run {plan.provenance.run}, trial {plan.provenance.trial}",
        f"made for  {made.framework} {made.framework_version}, {made.world_size} processes on {nodes}{more}",
        f"          {_shape_words(made.shape)}, global batch size {made.global_batch_size}",
        f"shape     {_shape_words(plan.shape)}",
        f"layout    {plan.layout.label}: {plan.num_microbatches} microbatches an iteration",
        f"split     {plan.split.label} transformer layers, embedding first, head last",
        f"schedule  {plan.schedule.label}",
        f"mapping   {plan.mapping.label}",
    ]
    lines += ["", *change_lines(plan)]
    if plan.measurement is not None:
        lines += ["", *comparison_lines(plan.measurement), *choice_lines(plan)]
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
    """Baseline against plan, with 95 % intervals."""
    return [
        _measurement_line(names[0], comparison.baseline),
        _measurement_line(names[1], comparison.plan),
        f"speedup   {spread(comparison.speedup, '{:.2f}x')} in {OBJECTIVE_WORDS[comparison.objective]}, "
        f"measured in turns over {comparison.plan.num_launches} rounds "
        f"({100 * confidence(comparison.plan.num_launches):.0f} % interval)",
    ]


def confidence(num_rounds: int) -> float:
    """How often the interval of a median holds it: 95 %, less where even the whole range holds it less often.

    Each of `num_rounds` values is above the true median with probability 1/2, so all are on one side of it
    with 2^(1 - n).
    """
    return min(0.95, 1.0 - 2.0 ** (1 - num_rounds))


def _measurement_line(name: str, measured: Measurement) -> str:
    return (
        f"{name:<10}{spread(measured.iteration_s, '{:.3f}')} s/iteration, "
        f"{measured.tokens_per_s:,.0f} tokens/s, "
        f"{rate(measured.model_flops_per_s_per_device)} a device, peak {size(measured.peak_memory_bytes)}"
    )


def _shape_words(shape: ModelShape) -> str:
    return (
        f"{shape.num_layers} layers, hidden {shape.hidden_size}, {shape.num_attention_heads} heads, "
        f"FFN {shape.ffn_hidden_size}, vocabulary {shape.vocab_size}, "
        f"{shape.num_parameters / 1e6:,.1f} M parameters"
    )
