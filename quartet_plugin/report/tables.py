"""What a plan is, what it changes and what it gained, as lines of text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quartet_plugin.model.measurement import Comparison, Interval, Measurement, Objective
from quartet_plugin.model.plan import STOCK, Plan
from quartet_plugin.model.shape import ModelShape

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One part of a plan that differs from the baseline's."""

    part: str
    before: str
    after: str
    change_class: ChangeClass


def changes(plan: Plan) -> tuple[Change, ...]:
    """What a plan changes against the user's own configuration, with the class of each change."""
    baseline = plan.made_for.baseline
    own, other = plan.layout, baseline.layout
    numbers = ("tensor_parallel", "data_parallel", "context_parallel", "expert_parallel", "micro_batch_size")
    reduces = any(getattr(own, name) != getattr(other, name) for name in numbers)
    reduces |= own.distributed_optimizer != other.distributed_optimizer
    rebatches = own.batching != other.batching and plan.made_for.batching_features is not None
    candidates = (
        Change(
            part="shape",
            before=plan.made_for.shape.label,
            after=plan.shape.label,
            change_class="D",
        ),
        Change(
            part="layout",
            before=other.label,
            after=own.label,
            change_class="C" if rebatches else "B" if reduces else "A",
        ),
        Change(part="split", before=baseline.split.label, after=plan.split.label, change_class="A"),
        Change(part="schedule", before=baseline.schedule.label, after=plan.schedule.label, change_class="A"),
        Change(part="mapping", before=STOCK, after=plan.mapping.label, change_class="A"),
    )
    return tuple(change for change in candidates if change.before != change.after)


def plan_lines(plan: Plan) -> list[str]:
    """A plan for reading."""
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
        lines += ["", *comparison_lines(plan.measurement)]
    return lines


def change_lines(plan: Plan) -> list[str]:
    """What the plan changes and how far that can be seen in the training."""
    found = changes(plan)
    if not found:
        return ["changes   nothing"]
    lines = []
    for at, change in enumerate(found):
        head = "changes   " if at == 0 else "          "
        lines.append(
            f"{head}{change.part} {change.before} -> {change.after} (class {change.change_class}: "
            f"{CLASS_MEANING[change.change_class]})"
        )
    return lines


def comparison_lines(comparison: Comparison, *, names: Sequence[str] = ("baseline", "plan")) -> list[str]:
    """Baseline against plan, with 95 % intervals."""
    return [
        _measurement_line(names[0], comparison.baseline),
        _measurement_line(names[1], comparison.plan),
        f"speedup   {_spread(comparison.speedup, '{:.2f}x')} in {OBJECTIVE_WORDS[comparison.objective]}, "
        f"measured in turns over {comparison.plan.num_launches} rounds "
        f"({100 * confidence(comparison.plan.num_launches):.0f} % interval)",
    ]


def confidence(num_rounds: int) -> float:
    """How often the interval of a median holds it: 95 %, less where even the whole range holds it less often.

    Each of `num_rounds` values is above the true median with probability 1/2, so all are on one side of it
    with 2^(1 - n).
    """
    return min(0.95, 1.0 - 2.0 ** (1 - num_rounds))


def _measurement_line(name: str, found: Measurement) -> str:
    return (
        f"{name:<10}{_spread(found.iteration_s, '{:.3f}')} s/iteration, "
        f"{found.tokens_per_s:,.0f} tokens/s, "
        f"{found.model_flops_per_s_per_device:.3g} model FLOP/s per device, "
        f"peak {found.peak_memory_bytes / 2**20:,.0f} MiB"
    )


def _spread(interval: Interval, form: str) -> str:
    return f"{form.format(interval.median)} ({form.format(interval.low)} to {form.format(interval.high)})"


def _shape_words(shape: ModelShape) -> str:
    return (
        f"{shape.num_layers} layers, hidden {shape.hidden_size}, {shape.num_attention_heads} heads, "
        f"FFN {shape.ffn_hidden_size}, vocabulary {shape.vocab_size}, "
        f"{shape.num_parameters / 1e6:,.1f} M parameters"
    )
