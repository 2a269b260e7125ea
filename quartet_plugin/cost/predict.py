"""The time of one iteration of a run, as named terms that add up, and rows of published runs."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quartet_plugin.cost.constants import Constants, fitted
from quartet_plugin.cost.devices import DeviceSpec
from quartet_plugin.cost.iteration.overlap import hidden_terms
from quartet_plugin.cost.iteration.step import (
    RowPrediction,
    pipeline_terms,
    step_terms,
    summed,
    transfers_s,
)
from quartet_plugin.cost.iteration.terms import stage_parts
from quartet_plugin.cost.memory import Memory, distinct_numbers, peak_memory
from quartet_plugin.cost.rows import READ_KNOBS, Resolved, check_keys, resolve_with_config
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.errors import ConfigError, QuartetError
from quartet_plugin.model.layout import Recompute


def predict(run: TrainingRun, constants: Constants) -> RowPrediction:
    """The iteration's time by cause, seen from the busiest pipeline device, whose waiting is the bubble."""
    forward_s, backward_s = transfers_s(run, constants)
    pipeline = pipeline_terms(
        run, constants, stage_parts(run, constants), forward_s=forward_s, backward_s=backward_s
    )
    step = step_terms(run, constants, forward_s=pipeline.forward_s, backward_s=pipeline.backward_s)
    return summed(run, constants, pipeline, step)


def predict_rows(
    data: Any,
    *,
    where: str,
    constants: Constants | None = None,
    devices: Mapping[str, DeviceSpec] | None = None,
    folder: Path | None = None,
) -> list[dict[str, Any]]:
    """`predict_row` for every row; `hf` names a HuggingFace config.json from `folder`.

    Raises ConfigError where `data` is no array of objects, or an object has a key that no row has.
    """
    if not isinstance(data, list):
        raise ConfigError(f"{where}: must be an array of rows, not {type(data).__name__}")
    for index, row in enumerate(data):
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: [{index}]: must be an object, not {type(row).__name__}")
        check_keys(row, where=f"{where}: [{index}]")
    return [predict_row(row, constants=constants, devices=devices, folder=folder) for row in data]


def predict_row(
    data: Mapping[str, Any],
    *,
    constants: Constants | None = None,
    devices: Mapping[str, DeviceSpec] | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """The output entry of one row of `ROWS.json`: prediction and assumptions, or the row's `error`."""
    label = data.get("id")
    try:
        resolved = resolve_with_config(data, devices=devices, folder=folder)
        memory = _fitting(resolved)
        used = constants or fitted()
        prediction, hidden = predict(resolved.run, used), hidden_terms(resolved.run, used)
    except QuartetError as error:
        return {"id": label, "error": str(error)}
    return {
        "id": label,
        "iter_time_s": prediction.iter_time_s,
        "peak_memory_bytes": memory.total_bytes,
        "fits": memory.fits,
        "terms": dict(prediction.terms),
        "compute_terms": dict(prediction.compute_terms),
        "hidden_terms": hidden,
        "memory_terms": memory.terms,
        "assumed": resolved.assumed,
        "warnings": [*resolved.warnings, *_unread_knobs(data)],
    }


def _unread_knobs(data: Mapping[str, Any]) -> list[str]:
    """A warning that names the recipe's settings that no prediction reads."""
    knobs = data.get("knobs")
    unread = [str(name) for name in knobs if name not in READ_KNOBS] if isinstance(knobs, dict) else []
    return [f"knobs: {', '.join(unread)[:200]}: not read"] if unread else []


def _fitting(resolved: Resolved) -> Memory:
    """The run's memory; where a row does not state recompute, with the least recompute that fits."""
    memory = peak_memory(resolved.run)
    if not memory.fits and "recompute" in resolved.assumed:
        modes: tuple[Recompute, ...] = ("selective", "full")
        for mode in modes:
            run = replace(resolved.run, layout=replace(resolved.run.layout, recompute=mode))
            memory_with_mode = peak_memory(run)
            if memory_with_mode.fits:
                resolved.run, resolved.assumed["recompute"] = run, mode
                return memory_with_mode
    if not memory.fits:
        needed, available = distinct_numbers(
            memory.total_bytes / 2**30, memory.available_bytes / 2**30, digits=1
        )
        resolved.warnings.append(
            f"memory: {needed} GiB needed on pipeline rank {memory.device}, "
            f"{available} GiB available; it does not fit"
        )
    return memory
