"""What `quartet profile` measured: each rank's file, the table made of them, and what calibration takes.

A rank's file holds medians for every part of the model that lies on it, for one microbatch; see
docs/formats.md. The table is a `COSTS.json` of the profiled job.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from quartet_plugin.calibration.constants_fit import Direction, Observation, Quantity
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.costs import EMBEDDING, HEAD, Costs, LayerCost
from quartet_plugin.protocol.rank_files import PartTimes, RankProfile, StepPart

_PREFIX = "layer."
# Medians of intervals of a few milliseconds, on ranks that share a machine, repeat to about this.
PART_SPREAD = 0.03
# Halves of a backward were measured as they run under another schedule, a step's ends once an iteration.
HALF_SPREAD, STEP_SPREAD = 0.06, 0.1
# An embedding is some kernel starts and hooks, too short to say what a layer's kernels take to start.
EMBEDDING_SPREAD = 0.5


def merged_parts(ranks: Sequence[RankProfile]) -> dict[str, PartTimes]:
    """Every part by name, the median over the ranks that hold it (tensor and data parallel ones)."""
    parts: dict[str, list[PartTimes]] = {}
    for rank in ranks:
        for part in rank.parts:
            if part.name != "other":
                parts.setdefault(part.name, []).append(part)
    return {name: _merged(same) for name, same in parts.items()}


def typical_parts(ranks: Sequence[RankProfile]) -> dict[str, PartTimes]:
    """Embedding, layer and head, as far as some rank holds them; a layer is the median of all layers."""
    parts = merged_parts(ranks)
    layers = [part for name, part in parts.items() if name.startswith(_PREFIX)]
    ends = {name: part for name, part in parts.items() if not name.startswith(_PREFIX)}
    return {**ends, "layer": _merged(layers)} if layers else ends


def _merged(parts: Sequence[PartTimes]) -> PartTimes:
    def middle(get: Callable[[PartTimes], float | None]) -> float | None:
        values = [value for part in parts if (value := get(part)) is not None]
        return statistics.median(values) if values else None

    return PartTimes(
        name=parts[0].name,
        forward_s=middle(lambda part: part.forward_s),
        backward_s=middle(lambda part: part.backward_s),
        input_grad_s=middle(lambda part: part.input_grad_s),
        weight_grad_s=middle(lambda part: part.weight_grad_s),
        num_intervals=sum(part.num_intervals for part in parts),
        activation_bytes=max(part.activation_bytes for part in parts),
    )


def observations_of(
    run: TrainingRun, ranks: Sequence[RankProfile], *, is_alone: bool = False
) -> list[Observation]:
    """What the profile of a run says for its calibration: a layer, the ends, and what ends a step.

    `is_alone`: the one rank that was profiled was run without the others, communication left out.
    """
    found = []
    for name, part in typical_parts(ranks).items():
        kind = Quantity(name)
        for direction, seconds in _directed(part, is_embedding=kind is Quantity.EMBEDDING):
            if seconds:
                found.append(
                    Observation(
                        run=run,
                        seconds=seconds,
                        spread=_spread(kind, direction),
                        quantity=kind,
                        direction=direction,
                        is_alone=is_alone,
                    )
                )
    found += _step_observations(run, ranks)
    return found if is_alone else found + _gradient_observations(run, ranks)


def _spread(kind: Quantity, direction: Direction) -> float:
    if kind is Quantity.EMBEDDING:
        return EMBEDDING_SPREAD
    return HALF_SPREAD if direction in (Direction.INPUT_GRAD, Direction.WEIGHT_GRAD) else PART_SPREAD


def _directed(part: PartTimes, *, is_embedding: bool) -> list[tuple[Direction, float | None]]:
    """The whole backward, and its halves where both were told apart. An embedding has one half."""
    found = [(Direction.FORWARD, part.forward_s), (Direction.BACKWARD, part.backward_s)]
    if is_embedding or part.input_grad_s is None or part.weight_grad_s is None:
        return found
    halves = [(Direction.INPUT_GRAD, part.input_grad_s), (Direction.WEIGHT_GRAD, part.weight_grad_s)]
    return found + halves


def _step_observations(run: TrainingRun, ranks: Sequence[RankProfile]) -> list[Observation]:
    """The optimizer's step of each pipeline rank, and what a step takes beside all that has a name."""
    found = []
    for device in range(run.layout.pipeline_parallel):
        steps_of_ranks = [rank.steps for rank in ranks if rank.pipeline_rank == device]
        for quantity, get, spread in (
            (Quantity.OPTIMIZER, _optimizer_of, PART_SPREAD),
            (Quantity.OVERHEAD, _overhead_of, STEP_SPREAD),
        ):
            seconds = [value for steps in steps_of_ranks if (value := get(steps)) is not None and value > 0]
            if seconds:
                middle = statistics.median(seconds)
                found.append(
                    Observation(run=run, seconds=middle, spread=spread, quantity=quantity, index=device)
                )
    return found


def _optimizer_of(steps: Mapping[StepPart, float | None]) -> float | None:
    return steps.get("optimizer")


def _overhead_of(steps: Mapping[StepPart, float | None]) -> float | None:
    parts = [steps.get(name) for name in ("forward_backward", "optimizer")]
    whole = steps.get("iteration")
    if whole is None or None in parts:
        return None
    return whole - sum(part for part in parts if part is not None)


def _gradient_observations(run: TrainingRun, ranks: Sequence[RankProfile]) -> list[Observation]:
    """Reducing gradients where nothing hides it: what the rank that came last took, which waits for none."""
    reduces = run.copies > 1 or (run.layout.pipeline_parallel > 1 and run.shape.tied_embeddings)
    if run.software.data_overlap or run.layout.distributed_optimizer or not reduces:
        return []
    seconds = [value for rank in ranks if (value := rank.steps.get("finalize"))]
    if not seconds:
        return []
    return [Observation(run=run, seconds=min(seconds), spread=2 * STEP_SPREAD, quantity=Quantity.GRADIENTS)]


def costs_of(
    ranks: Sequence[RankProfile], *, num_layers: int, num_devices: int, num_microbatches: int
) -> Costs:
    """The cost table of the profiled job; layers that no profiled rank holds take the median of the others.

    Transfers are 0: a profile does not measure links. Raises ConfigError where no layer was measured.
    """
    parts = merged_parts(ranks)
    layers = [part for name, part in parts.items() if name.startswith(_PREFIX)]
    if not layers:
        raise ConfigError("profile: no layer was measured; profile a stage that holds one")
    typical = _merged(layers)
    names = [EMBEDDING, *(f"{_PREFIX}{number}" for number in range(num_layers)), HEAD]
    chosen = [parts.get(name, typical if name.startswith(_PREFIX) else None) for name in names]
    kept = [(name, part) for name, part in zip(names, chosen, strict=True) if part is not None]
    fused = tuple(_backward_s(part) for _, part in kept)
    return Costs(
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        layers=tuple(_layer_cost(name, part) for name, part in kept),
        device_slowdown=np.ones(num_devices),
        transfer_s=np.zeros((num_devices, num_devices)),
        memory_limit_bytes=None,
        weight_grad_held_fraction=1.0,
        backward_fused_s=fused,
    )


def _layer_cost(name: str, part: PartTimes) -> LayerCost:
    input_grad, weight_grad = part.input_grad_s, part.weight_grad_s
    if name == EMBEDDING:
        input_grad, weight_grad = 0.0, _backward_s(part)
    elif input_grad is None or weight_grad is None:
        # Where they were not told apart the halves are about equal.
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
