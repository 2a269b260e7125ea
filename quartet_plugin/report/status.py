"""Where a run is, in a few lines."""

import time
from collections import Counter
from typing import Any

from quartet_plugin.model.history import LeaseHolder, RunHistory, RunningLaunch, TrialRow, WorkerRow
from quartet_plugin.model.schema import dump
from quartet_plugin.report.regret import regret_lines
from quartet_plugin.report.words import clean, duration

_STATES = {
    "running": "running",
    "finished": "finished",
    "stopped": "stopped; `quartet tune --resume` goes on",
    "lost": "its tuner has ended without a word; `quartet tune --resume` goes on",
    "elsewhere": "held on another host",
}


def status_lines(history: RunHistory) -> list[str]:
    """The run, who holds it, what runs now, what is done, what is best, what is left."""
    begun = "" if history.began_at is None else f", begun {stamp(history.began_at)}"
    lines = [
        f"run       {history.name} in {history.path}{begun}",
        f"state     {_STATES[history.state]}{_holder_words(history.holder)}",
    ]
    lines += [f"now       {running_words(one, history)}" for one in history.running]
    lines += [f"worker    {_worker_words(one)}" for one in history.workers]
    lines.append(f"told      {told_words(history)}")
    best = history.best
    if best is not None:
        ratio = history.versus_baseline(best)
        gain = "" if ratio is None or best.number == 0 else f", {ratio:.2f}x the baseline"
        lines.append(
            f"best      {'' if best.number == 0 else f'trial {best.number}: '}{best.label}: "
            f"{best.iteration_s:.3f} s/iteration{gain}"
        )
    if history.winner is not None and history.winner.measurement is not None:
        speedup = history.winner.measurement.speedup
        lines.append(
            f"winner    trial {history.winner.provenance.trial}: {speedup.median:.2f}x "
            f"({speedup.low:.2f}x to {speedup.high:.2f}x), measured in turns"
        )
    elif history.state == "finished":
        lines.append("winner    none: your own command stays as it is")
    if history.regret is not None:
        lines += regret_lines(history.regret)
    left = "" if history.time_left_s is None else f"; about {duration(history.time_left_s)} left"
    lines.append(f"elapsed   {duration(history.elapsed_s)}{left}")
    lines.append(f"study     {history.storage}")
    lines += [f"unread    {clean(fault)}" for fault in history.faults[:5]]
    return lines


def status_line(history: RunHistory) -> str:
    """The run in one line, for a list of runs."""
    best = history.best
    ratio = history.versus_baseline(best) if best is not None else None
    gain = "" if ratio is None else f", best {ratio:.2f}x"
    now = f", {running_words(history.running[0], history)}" if history.running else ""
    return (
        f"{history.name}: {_STATES[history.state].partition(';')[0]}, "
        f"trial {history.num_spent} of {history.num_asked}{gain}{now}"
    )


def status_record(history: RunHistory) -> dict[str, Any]:
    """The same as data."""
    best, holder = history.best, history.holder
    return {
        "schema_version": 1,
        "run": history.name,
        "path": history.path,
        "state": history.state,
        "holder": None
        if holder is None
        else {
            "host": holder.host,
            "pid": holder.pid,
            "generation": holder.generation,
            "is_alive": holder.is_alive,
            "renewed_s": round(holder.renewed_s, 3),
        },
        "running": [
            {
                "trial": one.number,
                "stage": one.stage,
                "round": one.round_number,
                "attempt": one.attempt,
                "phase": one.phase,
                "iteration": one.iteration,
                "num_iterations": one.num_iterations,
                "elapsed_s": round(one.elapsed_s, 3),
                "worker": one.worker,
            }
            for one in history.running
        ],
        "workers": [
            {
                "name": one.name,
                "host": one.host,
                "pid": one.pid,
                "devices": one.devices,
                "trial": one.trial,
                "renewed_s": round(one.renewed_s, 3),
            }
            for one in history.workers
        ],
        "num_asked": history.num_asked,
        "num_spent": history.num_spent,
        "verdicts": dict(_verdicts(history)),
        "best": None
        if best is None
        else {
            "trial": best.number,
            "iteration_s": best.iteration_s,
            "versus_baseline": history.versus_baseline(best),
        },
        "winner": None if history.winner is None else history.winner.provenance.trial,
        "regret": None if history.regret is None else dump(history.regret),
        "elapsed_s": round(history.elapsed_s, 3),
        "time_left_s": None if history.time_left_s is None else round(history.time_left_s, 3),
        "storage": history.storage,
        "faults": list(history.faults),
    }


def running_words(one: RunningLaunch, history: RunHistory) -> str:
    """A launch that runs: which, in which phase, since when."""
    asked = history.num_asked
    name = {
        "baseline": "the baseline",
        "control": "the baseline again",
        "cropped": "a cropped model",
        "parity": "a parity check",
        "search": f"trial {one.number}, {min(history.num_spent + 1, asked)} of {asked}",
        "final": f"final round {(one.round_number or 0) + 1}, "
        + ("the baseline" if one.number == 0 else f"trial {one.number}"),
    }[one.stage]
    step = f" {one.iteration}/{one.num_iterations}" if one.phase in ("warmup", "measure") else ""
    again = f", attempt {one.attempt}" if one.attempt > 1 else ""
    again += f", worker {clean(one.worker)}" if one.worker else ""
    return f"{name}{again}: {one.phase}{step}, {duration(one.elapsed_s)}"


def told_words(history: RunHistory) -> str:
    """How many trials came to what."""
    counts = _verdicts(history)
    words = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    return f"{history.num_spent} of {history.num_asked} trials" + (f": {words}" if words else "")


def stamp(at: float) -> str:
    """A time in this machine's own zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(at))


def _worker_words(one: WorkerRow) -> str:
    work = "waits" if one.trial is None else f"trial {one.trial}"
    return clean(f"{one.name} on {one.host}, {one.devices}: {work}, renewed {duration(one.renewed_s)} ago")


def _verdicts(history: RunHistory) -> Counter[str]:
    def kind(row: TrialRow) -> str:
        return "repeated" if row.repeats is not None else "of another run" if row.source else row.verdict

    return Counter(kind(row) for row in history.trials if row.number > 0 and row.verdict)


def _holder_words(holder: LeaseHolder | None) -> str:
    if holder is None:
        return ""
    state = {True: "alive", False: "ended", None: "not visible from here"}[holder.is_alive]
    return f": process {holder.pid} on {holder.host}, {state}, renewed {duration(holder.renewed_s)} ago"
