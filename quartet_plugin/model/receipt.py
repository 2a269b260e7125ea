"""The parity gate's judgement and its receipt: does a plan train as stock does?

Loss and gradient norm of every step are compared, relative to stock's. The receipt is a file beside the plan
that `quartet train` asks for where a plan uses the plugin's runtime.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.frameworks import capabilities
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.schema import (
    ADDED,
    Bounds,
    Length,
    Matches,
    Number,
    as_number,
    dump,
    read_record,
    record,
)

MAX_STEPS = 10_000
MAX_BYTES = 16 * 2**20
MAX_REASON = 512

# The difference grows when the last half of the steps is worse than this many times the first half.
GROWTH = 4.0
# Two layouts of stock may differ by this multiple of the tolerance: fp32 rounding grows with the model and
# the steps; the tolerance of half precision has room for that already.
ROUNDING_FACTOR = {"fp32": 20.0, "bf16": 3.0, "fp16": 3.0}

_Hash = Annotated[str, Matches(pattern=r"[0-9a-f]{64}")]
_Name = Annotated[str, Length(most=MAX_REASON)]

Precision = Literal["fp32", "bf16", "fp16"]
Quantity = Literal["loss", "grad_norm", "expert_load"]
_QUANTITIES: tuple[Quantity, ...] = ("loss", "grad_norm")
# The share of routed tokens that may lie with other experts: rounding decides where two experts are nearly
# equal. At least this, or this multiple of the loss's tolerance.
_LEAST_LOAD, _LOAD_FACTOR = 1e-3, 25.0


@record
class Tolerance:
    """The largest relative differences allowed."""

    loss: Annotated[float, Bounds(gt=0, lt=1)]
    grad_norm: Annotated[float, Bounds(gt=0, lt=1)]

    @property
    def expert_load(self) -> float:
        """The largest share of a layer's routed tokens that may lie with other experts."""
        return max(_LEAST_LOAD, _LOAD_FACTOR * self.loss)


@record
class Versions:
    """What the check was run with."""

    framework: _Name
    framework_version: _Name
    torch_version: _Name
    quartet_version: _Name


@record
class StepComparison:
    """One step on both sides; deviations are relative to the reference, infinite where one has no number.

    `expert_load_deviation` is the share of routed tokens that lie with other experts, of the layer where it
    is largest; None where no router was counted on both sides.
    """

    step: Annotated[int, Bounds(ge=1, le=MAX_STEPS)]
    loss: Number
    reference_loss: Number
    loss_deviation: Number
    grad_norm: Number
    reference_grad_norm: Number
    grad_norm_deviation: Number
    expert_load_deviation: Number | None = field(default=None, metadata=ADDED)


@record
class ParityFailure:
    """The first step that differs, in what, and the stage where it begins (None: not known)."""

    step: Annotated[int, Bounds(ge=1, le=MAX_STEPS)]
    quantity: Quantity
    grows: bool
    stage: Annotated[int, Bounds(ge=0, le=2**20)] | None
    reason: _Name


@record
class LayoutReference:
    """A second reference: stock under the plan's own layout, from the same weights.

    It is run where the plan's layout rounds reductions otherwise than the command's and the plan exceeds the
    tolerance against the command. `loss_rounding` and `grad_norm_rounding` are the largest relative
    differences between the two runs of stock, of which `limit` are allowed. `steps` compare the plan with
    stock under its layout, within `tolerance`. `plan_key` is that of the plan that stock ran.
    """

    plan_key: _Hash
    layout: _Name
    loss_rounding: Number
    grad_norm_rounding: Number
    limit: Tolerance
    tolerance: Tolerance
    steps: Annotated[tuple[StepComparison, ...], Length(least=1, most=MAX_STEPS)]


@record
class Receipt:
    """The result of `quartet check`. `reference` is the other side of the comparison: the user's command,
    or stock parallelism of the plan's own shape. `layout_reference` is there where the verdict is that of a
    second comparison. See docs/formats.md for the file.
    """

    plan_digest: _Hash
    plan_key: _Hash
    reference: Literal["command", "stock"]
    versions: Versions
    precision: Precision
    tolerance: Tolerance
    steps: Annotated[tuple[StepComparison, ...], Length(most=MAX_STEPS)]
    verdict: Literal["passed", "failed"]
    failure: ParityFailure | None
    schema_version: Literal[1] = 1
    layout_reference: LayoutReference | None = field(default=None, metadata=ADDED)

    def __post_init__(self) -> None:
        if (self.verdict == "failed") != (self.failure is not None):
            raise ConfigError(f"verdict: {self.verdict!r}; a failure belongs to 'failed' and only to it")
        if [step.step for step in self.steps] != list(range(1, len(self.steps) + 1)) or not self.steps:
            raise ConfigError("steps: must be numbered from 1 on, at least one")

    @property
    def agreement(self) -> str:
        """What the plan agrees with if it passed, in words."""
        other = "your command" if self.reference == "command" else "stock parallelism at the plan's shape"
        if self.layout_reference is not None:
            other = f"stock under {self.layout_reference.layout}"
        return f"losses and gradient norms equal those of {other} within tolerance"

    @property
    def decisive_steps(self) -> tuple[StepComparison, ...]:
        """The comparison that the verdict is of: with stock under the plan's layout where there is one."""
        return self.steps if self.layout_reference is None else self.layout_reference.steps


@record
class StepValues:
    """The measured values of one step.

    `parts` has the gradient norm of each part of the model: `embedding`, `layer.0` ..., `head`; it may be
    empty, and serves only to name the stage that differs. `expert_loads` are the tokens of each expert, by
    part.
    """

    loss: float
    grad_norm: float
    parts: Mapping[str, float]
    expert_loads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def tolerance_for(precision: Precision, *, partition_differs: bool) -> Tolerance:
    """Rounding that another order of the same sums may cause, by precision.

    `partition_differs`: linear layers are cut otherwise, by another tensor-parallel size or partition.
    """
    if precision != "fp32":
        return Tolerance(loss=2e-3, grad_norm=1e-2)
    limit = 5e-6 if partition_differs else 1e-6
    return Tolerance(loss=limit, grad_norm=limit)


def rounding_limit(tolerance: Tolerance, *, precision: Precision) -> Tolerance:
    """The largest relative differences that stock under two layouts may have by rounding."""
    factor = ROUNDING_FACTOR[precision]
    return Tolerance(loss=factor * tolerance.loss, grad_norm=factor * tolerance.grad_norm)


def is_within(steps: Sequence[StepComparison], limit: Tolerance) -> bool:
    """Whether every step's deviations are at most the limit's."""
    worst = worst_of(steps)
    loads = [float(step.expert_load_deviation or 0.0) for step in steps]
    return worst[0] <= limit.loss and worst[1] <= limit.grad_norm and max(loads) <= limit.expert_load


def worst_of(steps: Sequence[StepComparison]) -> tuple[float, float]:
    """The largest relative deviations of loss and gradient norm over the steps."""
    return (
        max(float(step.loss_deviation) for step in steps),
        max(float(step.grad_norm_deviation) for step in steps),
    )


def compare(reference: Sequence[StepValues], measured: Sequence[StepValues]) -> tuple[StepComparison, ...]:
    """Both sides step by step. Raises ConfigError for series of different length."""
    if len(reference) != len(measured):
        raise ConfigError(f"steps: {len(measured)}; the reference has {len(reference)}")
    return tuple(
        StepComparison(
            step=step,
            loss=as_number(actual.loss),
            reference_loss=as_number(expected.loss),
            loss_deviation=as_number(_deviation(actual.loss, expected.loss)),
            grad_norm=as_number(actual.grad_norm),
            reference_grad_norm=as_number(expected.grad_norm),
            grad_norm_deviation=as_number(_deviation(actual.grad_norm, expected.grad_norm)),
            expert_load_deviation=_load_deviation(actual.expert_loads, expected.expert_loads),
        )
        for step, (expected, actual) in enumerate(zip(reference, measured, strict=True), start=1)
    )


def find_failure(
    plan: Plan,
    reference: Sequence[StepValues],
    measured: Sequence[StepValues],
    *,
    tolerance: Tolerance,
) -> ParityFailure | None:
    """The first step that differs by more than the tolerance, or where the difference begins to grow.

    None where the plan trains as the reference does.
    """
    steps = compare(reference, measured)
    for comparison in steps:
        for quantity in _QUANTITIES:
            if not float(getattr(comparison, f"{quantity}_deviation")) <= getattr(tolerance, quantity):
                return _failure(
                    plan, reference, measured, step=comparison.step, quantity=quantity, tolerance=tolerance
                )
        if float(comparison.expert_load_deviation or 0.0) > tolerance.expert_load:
            return _load_failure(comparison, tolerance=tolerance)
    for quantity in _QUANTITIES:
        deviations = [float(getattr(comparison, f"{quantity}_deviation")) for comparison in steps]
        step = _growing_step(deviations, limit=getattr(tolerance, quantity))
        if step is not None:
            return _failure(
                plan, reference, measured, step=step, quantity=quantity, tolerance=tolerance, grows=True
            )
    return None


def _growing_step(deviations: Sequence[float], *, limit: float) -> int | None:
    """The step where growth shows: the worst of the last half, far above the worst of the first half.

    What stays below half the tolerance is rounding, not growth.
    """
    half = len(deviations) // 2
    if half < 2:
        return None
    early, late = max(deviations[:half]), max(deviations[-half:])
    if late <= limit / 2 or late <= GROWTH * early:
        return None
    return next(i for i, value in enumerate(deviations, 1) if i > half and value > max(early, limit / 2))


def _failure(
    plan: Plan,
    reference: Sequence[StepValues],
    measured: Sequence[StepValues],
    *,
    step: int,
    quantity: Quantity,
    tolerance: Tolerance,
    grows: bool = False,
) -> ParityFailure:
    expected, actual = reference[step - 1], measured[step - 1]
    here, there = getattr(actual, quantity), getattr(expected, quantity)
    in_forward = quantity == "loss"
    stage = _first_stage(plan, expected.parts, actual.parts, in_forward=in_forward, limit=tolerance.grad_norm)
    words = "loss" if in_forward else "gradient norm"
    where = "" if stage is None else f", first in stage {stage} ({', '.join(parts_of(plan, stage)[:6])})"
    how = "grows over the steps" if grows else f"above {getattr(tolerance, quantity):g}"
    return ParityFailure(
        step=step,
        quantity=quantity,
        grows=grows,
        stage=stage,
        reason=f"step {step}: {words} {here:.9g}, stock has {there:.9g}: "
        f"relative {_deviation(here, there):.2g}, {how}{where}",
    )


def _load_failure(comparison: StepComparison, *, tolerance: Tolerance) -> ParityFailure:
    share = float(comparison.expert_load_deviation or 0.0)
    return ParityFailure(
        step=comparison.step,
        quantity="expert_load",
        grows=False,
        stage=None,
        reason=f"step {comparison.step}: {share:.2g} of the routed tokens lie with other experts than "
        f"stock's, above {tolerance.expert_load:g}",
    )


def parts_of(plan: Plan, stage: int) -> list[str]:
    """The names of a stage's parts: `embedding`, `layer.N`, `head`."""
    counts = plan.split.transformer_layers_per_stage
    first = sum(counts[:stage])
    names = [f"layer.{layer}" for layer in range(first, first + counts[stage])]
    if stage == 0:
        names.insert(0, "embedding")
    if stage == len(counts) - 1:
        names.append("head")
    return names


def _first_stage(
    plan: Plan, expected: Mapping[str, float], actual: Mapping[str, float], *, in_forward: bool, limit: float
) -> int | None:
    """The first stage whose gradients differ, in the order in which the fault travels.

    A wrong loss comes from the forward pass, which begins at stage 0; a wrong gradient goes from the last
    stage to the first.
    """
    deviations: dict[int, float] = {}
    for stage in range(len(plan.split.transformer_layers_per_stage)):
        names = [name for name in parts_of(plan, stage) if name in expected and name in actual]
        if names:
            norms = [math.hypot(*(side[name] for name in names)) for side in (actual, expected)]
            deviations[stage] = _deviation(*norms)
    if not deviations:
        return None
    above = [stage for stage, deviation in deviations.items() if not deviation <= limit]
    if not above:
        return max(deviations, key=lambda stage: deviations[stage])
    return min(above) if in_forward else max(above)


def _load_deviation(
    actual: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> Number | None:
    """The share of tokens with other experts, of the worst part that both sides have counted."""
    shares = []
    for part in actual.keys() & expected.keys():
        here, there = actual[part], expected[part]
        moved = sum(abs(count - stock) for count, stock in zip(here, there, strict=False))
        is_alike = len(here) == len(there) and sum(there) > 0
        shares.append(moved / (2 * sum(there)) if is_alike else math.inf)
    return as_number(max(shares)) if shares else None


def _deviation(value: float, reference: float) -> float:
    if not (math.isfinite(value) and math.isfinite(reference)):
        return math.inf
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf


def needs_receipt(plan: Plan) -> bool:
    """Whether the plugin executes the plan's schedule or tensor partition; the framework's own are exempt."""
    return needs_runtime(plan) or plan.layout.tensor_partition is not None


def needs_runtime(plan: Plan) -> bool:
    """Whether the plugin's runtime executes the plan's schedule; stock schedules are exempt."""
    return plan.schedule.name not in capabilities(plan.made_for.framework).stock_schedules


def receipt_path(plan_path: Path) -> Path:
    """`PLAN.json` -> `PLAN.parity.json`, in the same folder."""
    stem = plan_path.name.removesuffix(".json")
    return plan_path.with_name(f"{stem}.parity.json")


def read_receipt(path: Path) -> Receipt:
    """Read and check a receipt. Raises ConfigError in one line: the field, the value and the rule."""
    return read_record(Receipt, path, max_bytes=MAX_BYTES)


def write_receipt(receipt: Receipt, *, path: Path) -> None:
    """Write the receipt, whole or not at all."""
    write_json_atomic(path, dump(receipt))


def require_receipt(plan: Plan, *, path: Path, torch_version: str | None) -> Receipt:
    """The receipt that lets the plan at `path` train. Raises PlanError, with the cure, where there is none.

    `torch_version` is the installed one, None where that is not known here. What a plan does must be what
    was checked (`Plan.key`); measurements and origin may have been added since.
    """
    place = receipt_path(path)
    cure = f"run `quartet check {path} -- COMMAND`, or pass --skip-parity-check"
    if not place.exists():
        raise PlanError(f"{path}: schedule {plan.schedule.name!r} has no parity receipt ({place}); {cure}")
    try:
        receipt = read_receipt(place)
    except ConfigError as error:
        raise PlanError(f"{error}; {cure}") from error
    if receipt.plan_key != plan.key:
        raise PlanError(f"{place}: is for another plan ({receipt.plan_key[:12]}); {cure}")
    versions = {
        plan.made_for.framework: (receipt.versions.framework_version, plan.made_for.framework_version),
        "torch": (receipt.versions.torch_version, torch_version or receipt.versions.torch_version),
    }
    for name, (then, now) in versions.items():
        if then != now:
            raise PlanError(f"{place}: was checked with {name} {then}, here is {now}; {cure}")
    if receipt.failure is not None:
        raise PlanError(f"{place}: the plan does not train as stock does: {receipt.failure.reason}")
    return receipt
