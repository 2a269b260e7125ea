"""The cost of a winner of another model (class D), how to keep the model, and its best measured plan."""

import math

from quartet_plugin.model.history import Finalist, RunHistory, TrialRow
from quartet_plugin.model.measurement import Comparison
from quartet_plugin.model.plan import Plan
from quartet_plugin.report.formatting import clean, iteration_words, speedup_sentence, speedup_spread

_COST = (
    "another model (class D): it cannot load checkpoints of your own model, and how well it learns "
    "was not measured"
)
_KEEP = "a search without `scaling` keeps your own model"
NO_PAYBACK = "no payback time is given: an iteration of another model is not comparable"


def other_model_words(history: RunHistory) -> tuple[str, ...]:
    """The warning, then the way back with the best measured plan of the user's own model; or nothing."""
    if history.winner is None or not history.winner.is_other_model:
        return ()
    return (_COST, f"{_KEEP}; {_own_model_words(history)}")


def other_model_lines(history: RunHistory) -> list[str]:
    """The same as lines for a terminal."""
    return _lines(other_model_words(history))


def plan_model_lines(plan: Plan) -> list[str]:
    """The same for a single plan, without the other trials of its run."""
    if not plan.is_other_model:
        return []
    run = plan.provenance.run
    others = f"; `quartet status {run}` names its best plan" if plan.measurement is not None else ""
    return _lines((_COST, _KEEP + others))


def _lines(words: tuple[str, ...]) -> list[str]:
    return [f"{'' if index else 'model':<10}{line}" for index, line in enumerate(words)]


def _own_model_words(history: RunHistory) -> str:
    """The best plan of the user's own model: of the final rounds if one took part, else of the trials."""
    rows = [row for row in history.trials if _is_of_own_model(row)]
    finalists = {finalist.number: finalist for finalist in history.finalists}
    ranked = [(finalists[row.number], row) for row in rows if row.number in finalists]
    if ranked:
        finalist, row = max(ranked, key=lambda pair: pair[0].comparison.speedup.median)
        return _plan_words(row, _finalist_words(finalist, search_s=history.search_s), history)
    best = max(
        (row for row in rows if row.is_measured),
        key=lambda row: (row.value or 0.0, -row.number),
        default=None,
    )
    if best is None:
        return "no other plan of your own model was measured"
    return _plan_words(best, _trial_words(best, history), history)


def _trial_words(row: TrialRow, history: RunHistory) -> str:
    ratio = history.versus_baseline(row)
    gain = "" if ratio is None else f", {speedup_sentence(ratio, drift=row.drift)}"
    return f"{iteration_words(row.iteration_s or 0.0)} s/iteration{gain} in one launch"


def _is_of_own_model(row: TrialRow) -> bool:
    is_first = row.number > 0 and row.repeats is None
    return is_first and row.plan is not None and not row.plan.is_other_model


def _finalist_words(finalist: Finalist, *, search_s: float) -> str:
    comparison = finalist.comparison
    seconds = iteration_words(comparison.plan.iteration_s.median)
    words = f"{seconds} s/iteration, {speedup_spread(comparison.speedup)}, measured in turns"
    num = payback_iterations(comparison, search_s=search_s) if search_s > 0 else None
    return words if num is None else f"{words}, paid back after {num:,} iterations of training"


def payback_iterations(comparison: Comparison, *, search_s: float) -> int | None:
    """The iterations in which a plan gains the `search_s` seconds of its search; None if it is slower."""
    gain_s = comparison.baseline.iteration_s.median - comparison.plan.iteration_s.median
    return math.ceil(search_s / gain_s) if gain_s > 0 else None


def _plan_words(row: TrialRow, speed: str, history: RunHistory) -> str:
    file = clean(f": {history.path}/{row.folder}/plan.json", limit=4000) if row.folder else ""
    return f"best plan of your own model: trial {row.number}, {speed}{file}"
