"""The measurements of `quartet profile`: files, their table of costs, and their observations.

A rank's file holds the medians of every part of the model on that rank, for one microbatch; see
docs/formats.md. The table is a `COSTS.json` of the profiled job.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from quartet_plugin.calibration.observations import Direction, Observation, Quantity
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.costs import EMBEDDING, HEAD, Costs, LayerCost
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.schema import Bounds, Length, dump, record
from quartet_plugin.model.shape import LETTERS
from quartet_plugin.protocol.rank_files import PartTimes, RankProfile, StepPart
from quartet_plugin.schedule.files import costs_to_json

_PREFIX = "layer."
# The parts of a hybrid model's layers, by the letters of its pattern.
LAYER_PARTS = {
    LETTERS["attention"]: "attention_layer",
    LETTERS["mlp"]: "mlp_layer",
    LETTERS["experts"]: str(Quantity.EXPERT_LAYER),
    LETTERS["state_space"]: "state_space_layer",
}
# Medians of intervals of a few milliseconds, on ranks that share a machine, repeat to about this.
PART_SPREAD = 0.03
# Halves of a backward are measured as another schedule runs them; the end of a step once an iteration.
HALF_SPREAD, STEP_SPREAD = 0.06, 0.1
# An embedding is a few kernel starts and hooks, too short to measure the start of a layer's kernels.
EMBEDDING_SPREAD = 0.5


@record
class SimulatedRankRecord:
    """The single rank of a larger job that was run without communication."""

    stage: Annotated[int, Bounds(ge=0, lt=65_536)]
    rank: Annotated[int, Bounds(ge=0, lt=65_536)]
    world_size: Annotated[int, Bounds(ge=1, le=65_536)]


@record
class Profile:
    """`profile.json`: every rank's file, and the table of costs made of them; docs/formats.md describes it.

    `job` is the job that the framework resolved from the command; `played` the rank that was simulated alone;
    `iteration_s` the measured iterations of the slowest rank, empty where a rank was simulated.
    """

    schema_version: Literal[1]
    job: Mapping[str, Any]
    played: SimulatedRankRecord | None
    iteration_s: tuple[Annotated[float, Bounds(ge=0, le=1e6)], ...]
    parts: tuple[PartTimes, ...]
    ranks: Annotated[tuple[RankProfile, ...], Length(least=1, most=65_536)]
    costs: Mapping[str, Any]


def merged_parts(ranks: Sequence[RankProfile]) -> dict[str, PartTimes]:
    """Every part by name, the median over the ranks that hold it (tensor and data parallel ones)."""
    by_name: dict[str, list[PartTimes]] = {}
    for rank in ranks:
        for part in rank.parts:
            if part.name != "other":
                by_name.setdefault(part.name, []).append(part)
    return {name: _merged(parts) for name, parts in by_name.items()}


def typical_parts(
    ranks: Sequence[RankProfile], *, num_dense_layers: int | None = None, pattern: str = ""
) -> dict[str, PartTimes]:
    """Embedding, layer and head, as far as some rank holds them; a layer is the median of all like it.

    Of a model with experts all layers but the first `num_dense_layers` have some: their median is the part
    `expert_layer`. None where every layer is dense. The `pattern` of a hybrid model says the kind of each
    layer, and so the part (`LAYER_PARTS`). Raises ConfigError for a layer that the pattern does not have.
    """
    parts = merged_parts(ranks)
    kinds: dict[str, list[PartTimes]] = {}
    for name, part in parts.items():
        if name.startswith(_PREFIX):
            kinds.setdefault(_kind_of(name, num_dense_layers, pattern), []).append(part)
    ends = {name: part for name, part in parts.items() if not name.startswith(_PREFIX)}
    return ends | {kind: _merged(layers) for kind, layers in sorted(kinds.items(), reverse=True)}


def _kind_of(name: str, num_dense_layers: int | None, pattern: str) -> str:
    """The part that a layer belongs to, by its name."""
    number = int(name.removeprefix(_PREFIX))
    if not pattern:
        is_dense = num_dense_layers is None or number < num_dense_layers
        return str(Quantity.LAYER if is_dense else Quantity.EXPERT_LAYER)
    if number >= len(pattern):
        raise ConfigError(
            f"profile: {name}; must be below layer.{len(pattern)}, the number of layers of the job's "
            "pattern; profile the job's own command"
        )
    return LAYER_PARTS[pattern[number]]


def _merged(parts: Sequence[PartTimes]) -> PartTimes:
    def median_of(field: str) -> float | None:
        values = [value for part in parts if (value := getattr(part, field)) is not None]
        return statistics.median(values) if values else None

    return PartTimes(
        name=parts[0].name,
        forward_s=median_of("forward_s"),
        backward_s=median_of("backward_s"),
        input_grad_s=median_of("input_grad_s"),
        weight_grad_s=median_of("weight_grad_s"),
        num_intervals=sum(part.num_intervals for part in parts),
        activation_bytes=max(part.activation_bytes for part in parts),
    )


def observations_of(
    run: TrainingRun, ranks: Sequence[RankProfile], *, is_single_rank: bool = False
) -> list[Observation]:
    """The observations in a run's profile: of a layer of each kind, of the ends, and of the end of a step.

    `is_single_rank`: the one profiled rank was run without the others, without communication. The head's part
    has the layers of multi-token prediction. Of a hybrid model the run of a layer's observation has layers of
    that kind alone.
    """
    num_dense = None if run.experts is None else run.experts.num_dense_layers
    typical = typical_parts(ranks, num_dense_layers=num_dense, pattern=run.pattern)
    runs_of_kinds = {
        LAYER_PARTS[kind.letter]: kind_run
        for kind, (kind_run, _) in zip(run.kinds, run.runs_by_kind, strict=False)
    }
    observations = [
        Observation(
            run=runs_of_kinds.get(name, run),
            seconds=seconds,
            spread=_spread(quantity, direction),
            quantity=quantity,
            direction=direction,
            is_single_rank=is_single_rank,
        )
        for name, quantity, part in ((name, _quantity_of(name), part) for name, part in typical.items())
        for direction, seconds in _directed(part, has_halves=_has_halves(quantity, run))
        if seconds
    ]
    observations += _step_observations(run, ranks)
    return observations if is_single_rank else observations + _gradient_observations(run, ranks)


def _quantity_of(name: str) -> Quantity:
    """What a part is; a hybrid model's layers without experts are dense ones."""
    is_dense = name in LAYER_PARTS.values() and name != Quantity.EXPERT_LAYER
    return Quantity.LAYER if is_dense else Quantity(name)


def _spread(kind: Quantity, direction: Direction) -> float:
    if kind is Quantity.EMBEDDING:
        return EMBEDDING_SPREAD
    return HALF_SPREAD if direction in (Direction.INPUT_GRAD, Direction.WEIGHT_GRAD) else PART_SPREAD


def _has_halves(kind: Quantity, run: TrainingRun) -> bool:
    """Whether the halves of a part's backward are those of the model.

    An embedding has none. Not all weights of experts are deferred, and those of multi-token prediction belong
    to no part.
    """
    return kind is Quantity.LAYER or (kind is Quantity.HEAD and not run.mtp_layers)


def _directed(part: PartTimes, *, has_halves: bool) -> list[tuple[Direction, float | None]]:
    """Forward, full backward, and the backward's halves where it has them and they were separated."""
    times = [(Direction.FORWARD, part.forward_s), (Direction.BACKWARD, part.backward_s)]
    if not has_halves or part.input_grad_s is None or part.weight_grad_s is None:
        return times
    return [*times, (Direction.INPUT_GRAD, part.input_grad_s), (Direction.WEIGHT_GRAD, part.weight_grad_s)]


def _step_observations(run: TrainingRun, ranks: Sequence[RankProfile]) -> list[Observation]:
    """The optimizer's step and the overhead of a step, for each pipeline rank."""
    observations = []
    for device in range(run.layout.pipeline_parallel):
        steps = [rank.steps for rank in ranks if rank.pipeline_rank == device]
        for quantity, times, spread in (
            (Quantity.OPTIMIZER, [step.get("optimizer") for step in steps], PART_SPREAD),
            (Quantity.OVERHEAD, [_overhead_of(step) for step in steps], STEP_SPREAD),
        ):
            seconds = [value for value in times if value is not None and value > 0]
            if seconds:
                middle = statistics.median(seconds)
                observations.append(
                    Observation(run=run, seconds=middle, spread=spread, quantity=quantity, index=device)
                )
    return observations


def _overhead_of(step: Mapping[StepPart, float | None]) -> float | None:
    iteration, compute, optimizer = (
        step.get(name) for name in ("iteration", "forward_backward", "optimizer")
    )
    if iteration is None or compute is None or optimizer is None:
        return None
    return iteration - (compute + optimizer)


def _gradient_observations(run: TrainingRun, ranks: Sequence[RankProfile]) -> list[Observation]:
    """The reduction of gradients where nothing hides it, on the last rank to start: it waits for none."""
    reduces = run.copies > 1 or (run.layout.pipeline_parallel > 1 and run.shape.tied_embeddings)
    if run.software.has_data_overlap or run.layout.distributed_optimizer or not reduces:
        return []
    seconds = [value for rank in ranks if (value := rank.steps.get("finalize"))]
    if not seconds:
        return []
    return [Observation(run=run, seconds=min(seconds), spread=2 * STEP_SPREAD, quantity=Quantity.GRADIENTS)]


def costs_of(
    ranks: Sequence[RankProfile],
    *,
    num_layers: int,
    num_devices: int,
    num_microbatches: int,
    num_dense_layers: int | None = None,
    pattern: str = "",
) -> Costs:
    """The cost table of the profiled job; layers that no profiled rank holds take the median of the others.

    These are the others of its kind (`typical_parts`), where some rank holds one. Transfers are 0: a profile
    does not measure links. Raises ConfigError where no layer was measured.
    """
    parts = merged_parts(ranks)
    layers = [part for name, part in parts.items() if name.startswith(_PREFIX)]
    if not layers:
        raise ConfigError("profile: no layer was measured; profile a stage that holds one")
    typical = typical_parts(ranks, num_dense_layers=num_dense_layers, pattern=pattern)
    others = _merged(layers)

    def chosen_part(name: str) -> PartTimes | None:
        if not name.startswith(_PREFIX):
            return parts.get(name)
        return parts.get(name) or typical.get(_kind_of(name, num_dense_layers, pattern), others)

    names = [EMBEDDING, *(f"{_PREFIX}{number}" for number in range(num_layers)), HEAD]
    chosen = [chosen_part(name) for name in names]
    measured = [(name, part) for name, part in zip(names, chosen, strict=True) if part is not None]
    return Costs(
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        layers=tuple(_layer_cost(name, part) for name, part in measured),
        device_slowdown=np.ones(num_devices),
        transfer_s=np.zeros((num_devices, num_devices)),
        memory_limit_bytes=None,
        weight_grad_held_fraction=1.0,
        backward_fused_s=tuple(_backward_s(part) for _, part in measured),
    )


def _layer_cost(name: str, part: PartTimes) -> LayerCost:
    input_grad, weight_grad = part.input_grad_s, part.weight_grad_s
    if name == EMBEDDING:
        input_grad, weight_grad = 0.0, _backward_s(part)
    elif input_grad is None or weight_grad is None:
        # Where the halves were not separated they are about equal.
        input_grad = weight_grad = _backward_s(part) / 2
    return LayerCost(
        name=name,
        forward_s=part.forward_s or 0.0,
        input_grad_s=input_grad,
        weight_grad_s=weight_grad,
        activation_bytes=float(part.activation_bytes),
    )


def _backward_s(part: PartTimes) -> float:
    if part.backward_s is not None:
        return part.backward_s
    return (part.input_grad_s or 0.0) + (part.weight_grad_s or 0.0)


def make_profile(
    ranks: Sequence[RankProfile],
    *,
    costs: Costs,
    simulated: SimulatedRankRecord | None,
    iteration_s: Sequence[float],
) -> Profile:
    """The profile of these ranks' files."""
    return Profile(
        schema_version=1,
        job=ranks[0].job,
        played=simulated,
        iteration_s=() if simulated is not None else tuple(iteration_s),
        parts=tuple(merged_parts(ranks).values()),
        ranks=tuple(ranks),
        costs=costs_to_json(costs),
    )


def write_profile(profile: Profile, *, path: Path) -> None:
    """Write the file, complete or not at all; the job, which all ranks share, is written once."""
    content = dump(profile)
    content["ranks"] = [{**asdict(rank), "job": {}} for rank in profile.ranks]
    write_json_atomic(path, content)
