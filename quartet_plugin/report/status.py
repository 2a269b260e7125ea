"""The state of a run in a few lines, as data, and what its search may have missed."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from quartet_plugin.model.history import (
    LEAST_DRIFT,
    DriftMeasurement,
    LeaseHolder,
    RunHistory,
    RunningLaunch,
    TrialRow,
    WorkerRow,
)
from quartet_plugin.model.launch import LaunchPosition
from quartet_plugin.model.measurement import NOTABLE, Regret
from quartet_plugin.model.schema import dump
from quartet_plugin.report.axis_gains import axis_lines
from quartet_plugin.report.drift_words import drift_lines
from quartet_plugin.report.figures import prediction_lines
from quartet_plugin.report.final_choice import choice_lines
from quartet_plugin.report.formatting import (
    clean,
    duration,
    iteration_words,
    speedup_sentence,
    speedup_words,
)
from quartet_plugin.report.kept_knobs import kept_lines
from quartet_plugin.report.launch_words import baseline_words, launch_words
from quartet_plugin.report.other_model import other_model_lines
from quartet_plugin.report.search_expense import expense_lines, expense_of
from quartet_plugin.report.shape_curve import shape_lines
from quartet_plugin.report.speedups import speedup_pair
from quartet_plugin.report.trial_table import label_of
from quartet_plugin.space.plan_label import plan_label

# What a regret compares untried plans with where a plan won.
WINNER = "the winner"
_SCOPE = (
    "only untried plans are covered: a tried plan that was not a finalist was measured once, and may be "
    "faster than that single trial"
)
# The chance of a better plan from which on more trials are advised.
LIKELY = 0.5

_STATES = {
    "running": "running",
    "finished": "finished",
    "stopped": "stopped; `quartet tune --resume` continues it",
    "lost": "its tuner ended unexpectedly; `quartet tune --resume` continues it",
    "elsewhere": "held on another host",
}


def status_lines(history: RunHistory) -> list[str]:
    """A line each: run, holder, launches, workers, counts, the winner or else the best trial, time left."""
    begun = "" if history.began_at is None else f", started {stamp(history.began_at)}"
    lines = [
        f"run       {history.name} in {history.path}{begun}",
        f"state     {_STATES[history.state]}{_holder_words(history.holder)}",
    ]
    lines += [f"now       {running_words(launch, history)}" for launch in history.running]
    lines += [f"worker    {_worker_words(worker)}" for worker in history.workers]
    lines += [f"slow      {words}" for words in slow_node_words(history)]
    lines.append(f"finished  {counts_words(history)}")
    best = history.best
    # One short trial's ratio is no second figure beside the winner's, which was measured in turns.
    if best is not None and history.winner is None:
        gain = f", {_speedup_of(best, history)}" if best.number else ""
        name = f"trial {best.number}: " if best.number else ""
        words = label_of(best)
        lines.append(f"best      {name}{words}: {iteration_words(best.iteration_s or 0.0)} s/iteration{gain}")
    if history.winner is not None and history.winner.measurement is not None:
        lines.append(f"winner    trial {history.winner.provenance.trial}: {speedup_pair(history.winner)}")
        lines.append(f"{'':<10}{plan_label(history.winner)}")
        lines += other_model_lines(history)
        lines += choice_lines(history.winner)
    elif history.state == "finished":
        rest = "; best/plan.json holds the stock plan" if history.baseline_note else ""
        lines.append(f"winner    none: no plan was proven faster than {baseline_words(history)}{rest}")
    if history.regret is not None:
        lines += regret_lines(history.regret, compared_with=regret_base(history), checks=history.drift_checks)
    lines += prediction_lines(history)
    lines += axis_lines(history)
    lines += kept_lines(history)
    if history.shape_curve is not None:
        lines += shape_lines(history.shape_curve, winner=history.winner)
    if history.baseline_note:
        lines.append(f"baseline  {history.baseline_note}")
    lines += drift_lines(history.drift_checks)
    left = "" if history.time_left_s is None else f"; about {duration(history.time_left_s)} left"
    lines.append(f"elapsed   {duration(history.elapsed_s)}{left}")
    lines += expense_lines(history)
    lines.append(f"study     {history.storage}")
    lines += [f"unread    {clean(fault)}" for fault in history.faults[:5]]
    return lines


def status_line(history: RunHistory) -> str:
    """The run in one line, for a list of runs."""
    best = history.best
    gain = "" if best is None else f", best {_speedup_of(best, history)}"
    if history.winner is not None and history.winner.measurement is not None:
        gain = f", winner {speedup_words(history.winner.measurement.speedup.median)}"
    now = f", {running_words(history.running[0], history)}" if history.running else ""
    return (
        f"{history.name}: {_STATES[history.state].partition(';')[0]}, "
        f"trial {history.num_spent} of {history.num_asked}{gain}{now}"
    )


def status_record(history: RunHistory) -> dict[str, Any]:
    """The run's state as data for other programs; see docs/formats.md."""
    best, holder = history.best, history.holder
    return {
        "schema_version": 1,
        "run": history.name,
        "path": history.path,
        "state": history.state,
        "holder": None if holder is None else {**dump(holder), "renewed_s": round(holder.renewed_s, 3)},
        "running": [_launch_record(launch) for launch in history.running],
        "workers": [{**dump(worker), "renewed_s": round(worker.renewed_s, 3)} for worker in history.workers],
        "num_asked": history.num_asked,
        "num_spent": history.num_spent,
        "verdicts": dict(_verdicts(history)),
        "best": None
        if best is None
        else {
            "trial": best.number,
            "iteration_s": best.iteration_s,
            "versus_baseline": history.versus_baseline(best),
            "drift": best.drift,
        },
        "winner": None if history.winner is None else history.winner.provenance.trial,
        "choice": _choice_record(history),
        "regret": None if history.regret is None else dump(history.regret),
        "axes": None if history.axis_gains is None else dump(history.axis_gains),
        "shapes": None if history.shape_curve is None else dump(history.shape_curve),
        "elapsed_s": round(history.elapsed_s, 3),
        "time_left_s": None if history.time_left_s is None else round(history.time_left_s, 3),
        "spent": asdict(expense_of(history)),
        "storage": history.storage,
        "baseline_note": history.baseline_note,
        "slow_nodes": [dump(node) for node in history.slow_nodes],
        "faults": list(history.faults),
    }


def unreadable_record(*, name: str, path: str, fault: str) -> dict[str, Any]:
    """What a list of runs has in place of the record of a run that cannot be read; see docs/formats.md."""
    return {"schema_version": 1, "run": name, "path": path, "state": "unreadable", "faults": [fault]}


def _speedup_of(best: TrialRow, history: RunHistory) -> str:
    """The speedup of a measured trial, in words."""
    ratio = history.versus_baseline(best)
    return "" if ratio is None else speedup_sentence(ratio, drift=best.drift)


def _choice_record(history: RunHistory) -> dict[str, Any] | None:
    measurement = None if history.winner is None else history.winner.measurement
    return None if measurement is None or measurement.choice is None else dump(measurement.choice)


def _launch_record(launch: RunningLaunch) -> dict[str, Any]:
    content = dump(launch)
    names = {"trial": "number", "stage": "stage", "round": "round_number"}
    renamed = {name: content.pop(field) for name, field in names.items()}
    return {**renamed, **content, "elapsed_s": round(launch.elapsed_s, 3)}


def running_words(launch: RunningLaunch, history: RunHistory) -> str:
    """The plan, phase, iteration and seconds of a launch that runs."""
    name = launch_words(launch.stage, number=launch.number, position=_position(launch, history))
    step = f" {launch.iteration}/{launch.num_iterations}" if launch.phase in ("warmup", "measure") else ""
    again = f", attempt {launch.attempt}" if launch.attempt > 1 else ""
    again += f", worker {clean(launch.worker)}" if launch.worker else ""
    return f"{name}{again}: {launch.phase}{step}, {duration(launch.elapsed_s)}"


def _position(launch: RunningLaunch, history: RunHistory) -> LaunchPosition | None:
    """The launch's place among the trials or the final rounds of its run."""
    if launch.stage == "final":
        num_rounds = history.config.get("study", {}).get("rounds")
        return (
            LaunchPosition.of_round(launch.round_number or 0, num_rounds=num_rounds) if num_rounds else None
        )
    if launch.stage != "search":
        return None
    num_beside = [other.number for other in history.running if other.stage == "search"].index(launch.number)
    return LaunchPosition.of_trial(history.num_spent + num_beside, num_asked=history.num_asked)


def counts_words(history: RunHistory) -> str:
    """The number of trials, in all and by verdict."""
    counts = _verdicts(history)
    words = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    baseline = history.baseline
    beside = ", besides your command" if baseline is not None and baseline.is_measured else ""
    return f"{history.num_spent} of {history.num_asked} trials" + (f": {words}{beside}" if words else "")


def slow_node_words(history: RunHistory) -> list[str]:
    """Every slow node in words, by name."""
    return [
        clean(f"node {node.host}: computations take {node.factor:.2f}x the time of the other nodes'")
        for node in history.slow_nodes
    ]


def stamp(time_s: float) -> str:
    """A time (seconds since 1970) in this machine's zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(time_s))


def _worker_words(worker: WorkerRow) -> str:
    work = "waits" if worker.trial is None else f"trial {worker.trial}"
    renewed = duration(worker.renewed_s)
    return clean(f"{worker.name} on {worker.host}, {worker.devices}: {work}, renewed {renewed} ago")


def _verdicts(history: RunHistory) -> Counter[str]:
    def kind(row: TrialRow) -> str:
        return "repeated" if row.repeats is not None else "of another run" if row.source else row.verdict

    return Counter(kind(row) for row in history.trials if row.number > 0 and row.verdict)


def _holder_words(holder: LeaseHolder | None) -> str:
    if holder is None:
        return ""
    state = {True: "alive", False: "ended", None: "not visible from here"}[holder.is_alive]
    return f": process {holder.pid} on {holder.host}, {state}, renewed {duration(holder.renewed_s)} ago"


def regret_base(history: RunHistory) -> str:
    """The plan or command with which the regret of a run compares untried plans, in words."""
    if history.winner is not None and history.winner.measurement is not None:
        return WINNER
    return baseline_words(history)


def regret_lines(regret: Regret, *, compared_with: str, checks: Sequence[DriftMeasurement] = ()) -> list[str]:
    """The estimate in up to five lines, the first one the figure.

    `compared_with` is WINNER or the baseline's words; `checks` are the run's drift checks.
    """
    if regret.num_untried == 0:
        return ["regret    none: every plan of the space was tried"]
    return [
        f"regret    {_figure(regret, compared_with)}",
        f"          most likely {clean(regret.likely or '', limit=200)}: {_chance_words(regret)}",
        f"          {_basis(regret)}",
        f"          {_SCOPE}",
        *(f"          {words}" for words in _doubt(compared_with, checks)),
    ]


def regret_words(regret: Regret, *, compared_with: str, checks: Sequence[DriftMeasurement] = ()) -> str:
    """The same estimate as one paragraph."""
    if regret.num_untried == 0:
        return "Every plan of the space was tried, so no untried plan can be faster."
    likely = clean(regret.likely or "", limit=200)
    figure, basis = _figure(regret, compared_with), _basis(regret)
    doubt = "".join(f" {words[:1].upper()}{words[1:]}." for words in _doubt(compared_with, checks))
    return (
        f"{figure[:1].upper()}{figure[1:]}. Most likely it would be {likely}, {_chance_words(regret)}. "
        f"{basis[:1].upper()}{basis[1:]}. "
        f"{_SCOPE[:1].upper()}{_SCOPE[1:]}.{doubt}"
    )


def _chance_words(regret: Regret) -> str:
    return f"the best untried plan in {100 * regret.likely_chance:.0f} % of random samples of the prediction"


def _figure(regret: Regret, compared_with: str) -> str:
    gain = regret.gain
    return (
        f"an untried plan may be faster than {compared_with} by about "
        f"{100 * gain.median:.1f} % ({100 * gain.low:.1f} to {100 * gain.high:.1f} %), by more than "
        f"{100 * NOTABLE:.0f} % with probability {100 * regret.notable:.0f} %"
    )


def _doubt(compared_with: str, checks: Sequence[DriftMeasurement]) -> list[str]:
    """That the command's own speed is uncertain, where a later measurement differs and no plan won."""
    farthest = max(checks, key=lambda check: abs(math.log(check.ratio)), default=None)
    if compared_with == WINNER or farthest is None:
        return []
    if abs(math.log(farthest.ratio)) <= math.log1p(LEAST_DRIFT):
        return []
    return [
        "the regret is based on the first measurement of your command, which later ran at "
        f"{speedup_words(farthest.ratio)} of it; the estimate may be off by that ratio"
    ]


def _basis(regret: Regret) -> str:
    how = {
        "calibrated cost model": "predicted by the cost model, calibrated with the trials",
        "measured trials": "predicted from the measured plans and their similarity",
    }.get(regret.source, regret.source)
    untried, measured = regret.num_untried, regret.num_measured
    advice = "; run more trials to find out" if regret.notable >= LIKELY else ""
    return (
        f"{untried} of the {untried + measured} plans compared are untried; their times are {how}; "
        f"{measured - 1} trials and your command were measured{advice}"
    )
