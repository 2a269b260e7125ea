"""Makes the parts of a run's history: its state, and rows from its events and its study's records."""

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from quartet_plugin.errors import StorageError
from quartet_plugin.model.history import DriftMeasurement, RunState, SlowNode, TrialRow
from quartet_plugin.model.launch import DEPTH_PROXY
from quartet_plugin.model.measurement import Objective
from quartet_plugin.model.trial_record import objective_of, score
from quartet_plugin.study.view import StudyRow
from quartet_plugin.tuner.memory_limit import above_limit

MAX_LINE_BYTES = 64 * 2**20


def read_events(path: Path) -> list[dict[str, Any]]:
    """The whole events of a log; a crash tears its last line. Raises StorageError."""
    events = []
    try:
        with path.open("rb") as file:
            # What is left of a longer line is no event either.
            while line := file.readline(MAX_LINE_BYTES):
                with contextlib.suppress(ValueError, RecursionError):
                    event = json.loads(line.decode("utf-8", errors="replace"))
                    if isinstance(event, dict) and isinstance(event.get("time"), int | float):
                        events.append({**event, "kind": str(event.get("kind"))})
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    return events


def baseline_note_of(events: list[dict[str, Any]]) -> str:
    """Why the final rounds' baseline is not the user's command; empty where it is."""
    note = ""
    for event in events:
        peak_bytes, limit_bytes = event.get("peak_bytes"), event.get("limit_bytes")
        if event["kind"] == "over-limit" and isinstance(peak_bytes, int) and isinstance(limit_bytes, int):
            note = (
                f"your command does not fit: {above_limit(peak_bytes, limit_bytes)}; "
                "the best stock plan that fits becomes the baseline"
            )
        elif event["kind"] == "stand-in" and note:
            note = note.partition("; ")[0] + f"; the baseline is trial {event.get('trial')}, a stock plan"
    return note


def objective_by_events(rows: tuple[TrialRow, ...], *, asked: Any) -> Objective:
    """The objective without the study: by the events' values, else by the shapes tried."""
    for row in rows:
        if row.value and row.plan is not None and row.iterations_s:
            tokens_per_s = score(row.plan, iteration_s=row.iterations_s).tokens_per_s
            is_tokens = math.isclose(row.value * row.drift, tokens_per_s, rel_tol=1e-6)
            return "tokens_per_s" if is_tokens else "model_flops_per_s_per_device"
    return objective_of(asked, num_shapes=len({row.plan.shape for row in rows if row.plan}) or 1)


def with_record(row: TrialRow, in_study: StudyRow) -> TrialRow:
    """The row with the study's record, which goes before the folder: it has judged the result."""
    record = in_study.record
    row = replace(row, labels=dict(in_study.labels) or row.labels)
    if not record or not in_study.is_finished:
        return row
    numbers = {
        name: float(record[name])
        for name in ("value", "iteration_s", "tokens_per_s", "model_flops_per_s_per_device", "drift")
        if isinstance(record.get(name), int | float)
    }
    if record.get("outcome") == DEPTH_PROXY:
        # The record of a depth proxy is a prediction.
        numbers = {"predicted_iteration_s": numbers["iteration_s"]} if "iteration_s" in numbers else {}
    repeats = record.get("repeats")
    source = record.get("source")
    memory = record.get("peak_memory_bytes")
    wall_s = record.get("wall_s")
    return replace(
        row,
        is_running=False,
        verdict=str(record.get("verdict", row.verdict)),
        outcome=str(record.get("outcome", row.outcome)),
        reason=str(record.get("reason", row.reason)),
        repeats=repeats if isinstance(repeats, int) else None,
        source=source if isinstance(source, str) else None,
        is_cut=record.get("is_cut") is True or row.is_cut,
        peak_memory_bytes=memory if isinstance(memory, int) else row.peak_memory_bytes,
        wall_s=float(wall_s) if isinstance(wall_s, int | float) and wall_s > 0 else row.wall_s,
        **numbers,  # type: ignore[arg-type]
    )


def with_events(rows: list[TrialRow], events: list[dict[str, Any]]) -> list[TrialRow]:
    """The rows without the study: verdicts and repeats as the events have them.

    A trial that was never launched as such, a depth proxy or a plan that the parity gate refused, has no
    folder: its row is made of its event.
    """
    repeats = {e.get("trial"): e.get("of") for e in events if e["kind"] == "repeat"}
    known = {row.number: row for row in rows}
    for event in events:
        row, verdict, value = known.get(event.get("trial", -1)), event.get("verdict"), event.get("value")
        number, record = event.get("trial"), event.get("record")
        if event["kind"] != "told" or not isinstance(verdict, str) or not isinstance(number, int):
            continue
        if row is None and isinstance(record, dict):
            in_study = StudyRow(number=number, is_finished=True, record=record, labels={})
            known[number] = with_record(TrialRow(number=number), in_study)
            continue
        if row is None and event.get("outcome") == DEPTH_PROXY:
            row = TrialRow(number=number, outcome=DEPTH_PROXY)
        if row is not None:
            objective = float(value) if isinstance(value, int | float) else None
            drift = event.get("drift")
            known[row.number] = replace(
                row,
                verdict=verdict,
                value=objective,
                drift=float(drift) if isinstance(drift, int | float) else 1.0,
            )
    for number, of in repeats.items():
        before = known.get(of) if isinstance(of, int) else None
        if isinstance(number, int) and before is not None and number not in known:
            known[number] = replace(before, number=number, repeats=of, wall_s=0.0, ranks=())
    return [known[number] for number in sorted(known)]


def drift_checks_of(events: list[dict[str, Any]]) -> tuple[DriftMeasurement, ...]:
    """The drift checks, one for each number of trials; a resumed run logs them again."""
    checks = {}
    for event in events:
        after, ratio = event.get("after"), event.get("ratio")
        if event["kind"] == "control" and isinstance(after, int) and isinstance(ratio, int | float):
            limit = event.get("chance_limit")
            checks[after] = DriftMeasurement(
                num_tried=after,
                ratio=float(ratio),
                chance_limit=float(limit) if isinstance(limit, int | float) else None,
            )
    return tuple(checks[after] for after in sorted(checks))


def limits_of(events: list[dict[str, Any]]) -> tuple[str, ...]:
    """The parts of a too large space that the latest proposal did not predict, one line each."""
    for event in reversed(events):
        lines = event.get("cut_off")
        if event["kind"] == "proposed" and isinstance(lines, list):
            return tuple(line for line in lines if isinstance(line, str))
    return ()


def expected_improvements_of(events: list[dict[str, Any]]) -> dict[int, float]:
    """The expected improvement of each trial's plan when it was proposed; none of a sampler's choice.

    An event's `gain` is of the objective's logarithm.
    """
    return {
        event["trial"]: math.expm1(float(event["gain"]))
        for event in events
        if event["kind"] == "proposed"
        and isinstance(event.get("trial"), int)
        and isinstance(event.get("gain"), int | float)
    }


def slow_nodes_of(events: list[dict[str, Any]]) -> tuple[SlowNode, ...]:
    """The nodes that are slow by the latest event of each."""
    factors: dict[str, float] = {}
    for event in events:
        node, factor = event.get("node"), event.get("factor")
        if event["kind"] == "node-speed" and isinstance(node, str) and isinstance(factor, int | float):
            factors[node] = float(factor)
    return tuple(SlowNode(host=host, factor=factor) for host, factor in factors.items() if factor > 1.0)


def seconds_of_sessions(events: list[dict[str, Any]], *, until_s: float) -> float:
    """The seconds of all sessions: each from its `begin` to its last event, the latest one's to `until_s`."""
    seconds, begun_at, latest = 0.0, None, 0.0
    for event in events:
        if event["kind"] == "begin":
            seconds += 0.0 if begun_at is None else max(0.0, latest - begun_at)
            begun_at = float(event["time"])
        latest = float(event["time"])
    return seconds if begun_at is None else seconds + max(0.0, until_s - begun_at)


def time_left_of(events: list[dict[str, Any]], *, now_s: float) -> float | None:
    """The seconds that were left when the latest launch began, less those since; None without an estimate.

    `now_s` is seconds since 1970. The live table shows the same: the tuner has written its estimate down.
    """
    for event in reversed(events):
        if event["kind"] == "begin":
            return None
        left_s = event.get("time_left_s")
        if isinstance(left_s, int | float):
            return max(0.0, float(left_s) - (now_s - float(event["time"])))
    return None


def state_of(events: list[dict[str, Any]], *, is_held: bool, is_alive: bool | None) -> RunState:
    """A run's state by its lease and events: running, finished, stopped, lost, or held on another host."""
    kinds = [event["kind"] for event in events if event["kind"] in ("begin", "end", "interrupted")]
    if is_held:
        if is_alive is None:
            return "elsewhere"
        return "running" if is_alive else "lost"
    return "finished" if kinds and kinds[-1] == "end" else "stopped"
