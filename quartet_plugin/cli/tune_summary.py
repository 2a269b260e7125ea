"""Words the closing lines of `quartet tune`: the result of the search, and how to train with it."""

import shlex
from collections import Counter

from quartet_plugin.cli.command import path_here, train_words
from quartet_plugin.cli.full_size import full_size_lines
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.receipt import receipt_path
from quartet_plugin.report.drift_words import drift_lines
from quartet_plugin.report.final_choice import choice_lines
from quartet_plugin.report.launch_words import COMMAND, STAND_IN
from quartet_plugin.report.plan_difference import difference_lines
from quartet_plugin.report.shape_curve import shape_lines
from quartet_plugin.report.status import WINNER, regret_lines
from quartet_plugin.report.tables import change_lines, changes, comparison_lines
from quartet_plugin.space.plan_label import plan_label
from quartet_plugin.tuner.run_folder import TuningRun
from quartet_plugin.tuner.tune_result import TuneResult
from quartet_plugin.tuner.winner_choice import NEAREST_RULE


def summary_lines(result: TuneResult, *, plan: Plan | None, run: TuningRun) -> list[str]:
    """The result of the search, and how to train with it."""
    baseline = _baseline_words(result)
    best = f"plan      {path_here(run.folder.best_plan)}"
    train = f"train     {train_words(run.folder.best_command)}"
    if plan is None or result.winner is None:
        tried = [trial for trial in result.trials if trial.record.repeats is None][1:]
        failed = sum(trial.record.verdict != "measured" for trial in tried)
        note = f" ({failed} could not be measured, see {path_here(run.folder.events_file)})" if failed else ""
        lines = [f"no better plan was found: {len(tried)} plans were tried{note}; keep {baseline}"]
        explained = []
        if result.rankings:
            number = result.rankings[0].trial.number
            label = plan_label(result.rankings[0].trial.plan)
            lines.append(f"nearest   trial {number} (not proven faster), {label}")
            lines.append(f"          {NEAREST_RULE}")
            lines += comparison_lines(result.rankings[0].comparison, names=("baseline", f"trial {number}"))
            explained = [explain_line(run, trial=number)]
        stand_in = [] if result.stand_in is None else [best, train]
        return [*lines, *study_lines(result), *explained, *stand_in]
    proof = []
    if result.receipt is not None:
        path = path_here(receipt_path(run.folder.best_plan))
        proof = [f"parity    passed: {result.receipt.agreement}; receipt {path}"]
    full_size = [] if result.full_size is None else full_size_lines(result.full_size.result, run=run)
    return [
        f"trial {result.winner.trial.number} is faster than {baseline}",
        *difference_lines(plan),
        *comparison_lines(result.winner.comparison, names=("baseline", "best")),
        *choice_lines(plan),
        *change_lines(plan),
        *study_lines(result, plan=plan),
        *proof,
        explain_line(run),
        best,
        *(full_size or [train]),
    ]


def _baseline_words(result: TuneResult) -> str:

    return COMMAND if result.stand_in is None else STAND_IN


def explain_line(run: TuningRun, *, trial: int | None = None) -> str:
    """The command that shows which part of an iteration a plan makes shorter."""
    words = [path_here(run.folder.path), *(() if trial is None else ("--trial", str(trial)))]
    return f"explain   quartet explain {shlex.join(words)}"


def study_lines(result: TuneResult, *, plan: Plan | None = None) -> list[str]:
    """What the trials were spent on, by class of change, how the machine drifted, and what was missed."""
    tried = [trial.plan for trial in result.trials[1:] if trial.record.repeats is None]
    classes = Counter(max((c.change_class for c in changes(plan)), default="A") for plan in tried)
    parts = [f"class {name} {100 * count / len(tried):.0f} %" for name, count in sorted(classes.items())]
    lines = [f"tried     {len(tried)} plans: {', '.join(parts)}"] if tried else []
    lines += drift_lines(result.drift_checks)
    if result.regret is not None:
        compared_with = _baseline_words(result) if result.winner is None else WINNER
        lines += regret_lines(result.regret, compared_with=compared_with, checks=result.drift_checks)
    if result.shape_curve is not None:
        lines += shape_lines(result.shape_curve, winner=plan)
    return lines
