"""The best layouts of a job: bounds first, the full prediction only where a bound does not rule it out."""

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quartet_plugin.cost.constants import Constants, fitted
from quartet_plugin.cost.jobs import run_of
from quartet_plugin.cost.memory import Memory, peak_memory
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import Run
from quartet_plugin.errors import InfeasibleError
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.scaling.shapes import BudgetRule, equal_shapes
from quartet_plugin.search.planner.bounds import Bounds, bounds_of
from quartet_plugin.search.planner.candidates import Candidates, legal_candidates
from quartet_plugin.search.planner.job import PlanJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One planned layout. `equal_work_s` is its time for the FLOPs of the job's own model."""

    shape: ModelShape
    layout: Layout
    split: tuple[int, ...]
    iteration_s: float
    equal_work_s: float
    terms: Mapping[str, float]
    memory: Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The best first, and what became of all candidates."""

    best: tuple[Ranked, ...]
    num_considered: int
    num_predicted: int
    num_too_large: int
    num_pruned: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """The candidates of one shape."""

    shape: ModelShape
    candidates: Candidates
    bounds: Bounds
    scale: float


def rank(
    job: PlanJob, *, top: int = 1, exhaustive: bool = False, constants: Constants | None = None
) -> Ranking:
    """The `top` layouts that fit in memory, by predicted time for equal work.

    Candidates are predicted in the order of their bounds until no bound is under the last of the best, so
    the ranking is that of predicting all, which `exhaustive` does. Raises InfeasibleError, naming the layout
    that comes nearest, when none is legal or none fits.
    """
    used = constants or fitted()
    fields = [_field(job, shape, used) for shape in _shapes(job)]
    total = sum(len(field.candidates) for field in fields)
    if not total:
        raise InfeasibleError(_no_layout(job))
    best: list[tuple[float, int, int, Ranked]] = []
    order = _ordered(fields, limit=math.inf if exhaustive else _available(job))
    predicted, visited, too_large = 0, 0, total - len(order)
    for bound, at, row in order:
        if not exhaustive and len(best) == top and bound > best[-1][0]:
            break
        visited += 1
        found = _planned(job, fields[at], row, used)
        if found is None:
            too_large += 1
            continue
        predicted += 1
        bisect.insort(best, (found.equal_work_s, at, row, found), key=lambda entry: entry[:3])
        del best[top:]
    if not best:
        raise InfeasibleError(_nearest(job, fields))
    return Ranking(
        best=tuple(entry[3] for entry in best),
        num_considered=total,
        num_predicted=predicted,
        num_too_large=too_large,
        num_pruned=len(order) - visited,
    )


def planned_run(job: PlanJob, shape: ModelShape, layout: Layout, split: tuple[int, ...]) -> Run:
    """The run that a planned layout stands for."""
    return run_of(
        shape,
        layout,
        global_batch_size=job.global_batch_size,
        layers_per_stage=split,
        machines=job.machines,
        precision=job.precision,
    )


def _shapes(job: PlanJob) -> tuple[ModelShape, ...]:
    asked = job.search.scaling
    if asked is None:
        return (job.shape,)
    rule = BudgetRule(
        budget=asked.budget,
        tolerance=asked.tolerance,
        depth_width_band=asked.depth_width_band,
        max_shapes=asked.max_shapes,
    )
    return equal_shapes(job.shape, rule=rule)


def _field(job: PlanJob, shape: ModelShape, constants: Constants) -> _Field:
    candidates = legal_candidates(job, shape)
    return _Field(
        shape=shape,
        candidates=candidates,
        bounds=bounds_of(job, shape, candidates, constants=constants),
        scale=job.shape.model_flops_per_sequence / shape.model_flops_per_sequence,
    )


def _ordered(fields: list[_Field], *, limit: float) -> list[tuple[float, int, int]]:
    """(bound, field, row) by rising bound, of the candidates whose memory may be under `limit` bytes."""
    scaled = np.concatenate([field.bounds.time_s * field.scale for field in fields])
    memory = np.concatenate([field.bounds.memory_bytes for field in fields])
    owner = np.repeat(np.arange(len(fields)), [len(field.candidates) for field in fields])
    rows = np.concatenate([np.arange(len(field.candidates)) for field in fields])
    order = np.argsort(scaled, kind="stable")
    order = order[memory[order] <= limit]
    return list(zip(scaled[order].tolist(), owner[order].tolist(), rows[order].tolist(), strict=True))


def _planned(job: PlanJob, field: _Field, row: int, constants: Constants) -> Ranked | None:
    """The candidate with its prediction; None where its memory does not fit."""
    layout = field.candidates.layout(row)
    split = field.bounds.split(job, field.shape, field.candidates, row)
    run = planned_run(job, field.shape, layout, split)
    memory = peak_memory(run)
    if not memory.fits:
        return None
    found = predict(run, constants)
    return Ranked(
        shape=field.shape,
        layout=layout,
        split=split,
        iteration_s=found.iter_time_s,
        equal_work_s=found.iter_time_s * field.scale,
        terms=found.terms,
        memory=memory,
    )


def _available(job: PlanJob) -> float:
    empty = Memory(
        parameters=0.0, gradients=0.0, optimizer=0.0, activations=0.0, temporary=0.0, device=0,
        capacity=float(job.machines.memory_bytes),
    )  # fmt: skip
    return empty.available


def _nearest(job: PlanJob, fields: list[_Field]) -> str:
    """Which layout needs the least memory, and how much too much that is."""
    order = sorted(
        (float(field.bounds.memory_bytes[row]), at, row)
        for at, field in enumerate(fields)
        for row in range(len(field.candidates))
    )
    best: tuple[float, Layout, Memory] | None = None
    for bound, at, row in order:
        if best is not None and bound >= best[0]:
            break
        field = fields[at]
        layout = field.candidates.layout(row)
        split = field.bounds.split(job, field.shape, field.candidates, row)
        memory = peak_memory(planned_run(job, field.shape, layout, split))
        if best is None or memory.total < best[0]:
            best = (memory.total, layout, memory)
    assert best is not None
    total, layout, memory = best
    largest = max(memory.terms, key=lambda name: memory.terms[name]).removesuffix("_bytes")
    return (
        f"memory: none of {len(order)} layouts fits; the nearest, {layout.label} recompute {layout.recompute}"
        f"{' distributed optimizer' if layout.distributed_optimizer else ''}, needs {total:.0f} bytes on "
        f"pipeline rank {memory.device} (most: {largest}), {total - memory.available:.0f} more than the "
        f"{memory.available:.0f} available; use more or larger devices, or allow more of search"
    )


def _no_layout(job: PlanJob) -> str:
    shape = job.shape
    return (
        f"layouts: none is legal for {job.machines.num_devices} devices, {shape.num_attention_heads} heads, "
        f"{shape.num_query_groups} groups, {shape.num_layers} layers, sequences of {shape.seq_length} and "
        f"a batch of {job.global_batch_size}; tensor_parallel must divide heads, groups and a node, "
        "data_parallel x micro_batch_size the batch: allow more of search or change the batch"
    )
