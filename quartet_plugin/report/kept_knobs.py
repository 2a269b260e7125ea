"""Why a searched knob stayed as the command has it: the best trial that changed it."""

import math
from collections.abc import Iterator

from quartet_plugin.model.history import RunHistory, TrialRow
from quartet_plugin.model.plan import Plan
from quartet_plugin.report import markup
from quartet_plugin.report.formatting import clean
from quartet_plugin.space.knobs.knob import Knob, LayoutKnob, Value
from quartet_plugin.space.knobs.mapping import MAPPING
from quartet_plugin.space.knobs.registry import LAYOUT_KNOBS
from quartet_plugin.space.knobs.schedule import SCHEDULE
from quartet_plugin.space.knobs.split import SPLIT

# Of the layout those that a search leaves as the command has them unless it is asked.
_SEARCHED: tuple[Knob, ...] = (
    SPLIT,
    SCHEDULE,
    MAPPING,
    *(knob for knob in LAYOUT_KNOBS if knob.default == "stock"),
)
_NOTHING = "the winner changes every searched axis of which a trial measured another value"
_FOLLOWS = "split and schedule follow from PP 1: a plan with one stage has neither"


def kept_lines(history: RunHistory) -> list[str]:
    """A line for each such knob, once the search has ended, and what follows from a lost pipeline.

    Nothing of a knob of which trials measured no other value, or that the outcome of the run changes.
    """
    rows = [": ".join(row) for row in _rows(history)]
    rows += _remarks(history, is_empty=not rows)
    return [f"{'' if index else 'kept':<10}{clean(words)}" for index, words in enumerate(rows)]


def kept_section(history: RunHistory) -> str:
    """The same as a section of the page; nothing where there is no such knob."""
    rows = [[clean(cell) for cell in row] for row in _rows(history)]
    heading = "Unchanged knobs"
    table = markup.table(["knob", "why"], rows, label=heading) if rows else ""
    notes = [f"{words[0].upper()}{words[1:]}." for words in _remarks(history, is_empty=not rows)]
    return markup.section(heading, table + "".join(map(markup.note, notes)))


def _rows(history: RunHistory) -> list[tuple[str, str]]:
    """Each knob with its value, and the best trial that changed it."""
    measured = _measured(history)
    if not measured:
        return []
    return [row for knob in _SEARCHED for row in _row_of(knob, history, measured)]


def _remarks(history: RunHistory, *, is_empty: bool) -> list[str]:
    """That nothing stayed, where a winner is known, and what a plan without a pipeline does not choose."""
    winner = history.winner
    if winner is None or not _measured(history):
        return []
    before = winner.made_for.baseline.layout.num_stages
    remarks = [_NOTHING] if is_empty else []
    return [*remarks, *([_FOLLOWS] if winner.layout.num_stages == 1 < before else [])]


def _measured(history: RunHistory) -> list[tuple[TrialRow, Plan]]:
    """The measured trials of a search that has ended, the baseline first; none without the baseline."""
    measured = [
        (trial, trial.plan) for trial in history.trials if trial.is_measured and trial.plan is not None
    ]
    is_whole = history.state == "finished" and bool(measured) and measured[0][0].number == 0
    return measured if is_whole else []


def _row_of(
    knob: Knob, history: RunHistory, measured: list[tuple[TrialRow, Plan]]
) -> Iterator[tuple[str, str]]:
    command = knob.value_of(measured[0][1])
    winner = history.winner
    if winner is not None and (knob.value_of(winner) != command or _is_moot(knob, winner)):
        return
    # Only a layout that leaves the knob a choice says something of it.
    others = [
        (trial, plan)
        for trial, plan in measured
        if _is_choice(knob, plan, of_command=measured[0][1]) and knob.value_of(plan) != command
    ]
    if not others:
        return
    (other, plan), (best, _) = max(others, key=_speed), max(measured, key=_speed)
    if other is not best:
        yield f"{knob.title} {knob.text(command)}", _pair_words(knob, others, measured, command=command)
        return
    words = f"with {knob.text(knob.value_of(plan))}, trial {other.number}"
    if history.winner is not None:
        words += (
            f" was the fastest single trial; the final rounds chose trial {history.winner.provenance.trial}"
        )
    else:
        return
    yield f"{knob.title} {knob.text(command)}", words


def _is_moot(knob: Knob, winner: Plan) -> bool:
    """Whether no value of the knob would change anything in the winner."""
    return knob is MAPPING and not _is_choice(knob, winner, of_command=winner)


def _pair_words(
    knob: Knob,
    others: list[tuple[TrialRow, Plan]],
    measured: list[tuple[TrialRow, Plan]],
    *,
    command: Value | None,
) -> str:
    """The best trial that changed the knob, and the best trial that differs from it only in the knob."""
    as_command = [(trial, plan) for trial, plan in measured if knob.value_of(plan) == command]
    # Of plans that are equal but for the knob the fastest, of equals the first.
    fastest: dict[tuple[object, ...], tuple[TrialRow, Plan]] = {}
    for kept in sorted(as_command, key=_speed, reverse=True):
        fastest.setdefault(_rest(knob, kept[1], command=command), kept)
    rests = [(changed, _rest(knob, changed[1], command=command)) for changed in others]
    pairs = [(changed, fastest[rest]) for changed, rest in rests if rest in fastest]
    if not pairs:
        return f"no two measured plans differ only in this; {len(others)} of {len(measured)} plans changed it"
    (other, plan), (unchanged, _) = max(pairs, key=lambda pair: (_speed(pair[0]), _speed(pair[1])))
    share = 100 * (other.value or 0.0) / (unchanged.value or math.inf)
    words = f"with {knob.text(knob.value_of(plan))}, trial {other.number}"
    return f"{words} reached {share:.0f} % of the speed of trial {unchanged.number}"


def _rest(knob: Knob, plan: Plan, *, command: Value | None) -> tuple[object, ...]:
    """Every part of the plan but the knob's: equal for plans that differ in it alone."""
    layout = knob.put(plan.layout, command) if isinstance(knob, LayoutKnob) else plan.layout
    axes = [axis for axis in (SPLIT, SCHEDULE, MAPPING) if axis is not knob]
    return (plan.shape, layout, *(axis.value_of(plan) for axis in axes))


def _is_choice(knob: Knob, plan: Plan, *, of_command: Plan) -> bool:
    """Whether another value of the knob would do anything in the plan.

    Plans with other stages than the command's have another split and schedule in any case. Copies of a model
    that is in no pipeline may lie on a node's devices in any order.
    """
    if isinstance(knob, LayoutKnob):
        return knob.applies(plan.layout)
    if knob is MAPPING:
        return plan.layout.pipeline_parallel > 1 or len(plan.made_for.nodes) > 1
    stages, layers = plan.layout.num_stages, plan.shape.num_layers
    return (stages, layers) == (of_command.layout.num_stages, of_command.shape.num_layers)


def _speed(measured: tuple[TrialRow, Plan]) -> float:
    return measured[0].value or 0.0
