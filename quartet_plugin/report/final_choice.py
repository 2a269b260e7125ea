"""The choice of the winner in words: the rule, and the runner-up with the chance that it is slower."""

import math

from quartet_plugin.model.measurement import FinalChoice
from quartet_plugin.model.plan import Plan
from quartet_plugin.report.formatting import clean


def choice_words(plan: Plan) -> dict[str, str]:
    """Which trials went to the final rounds, the rule by which one won, and the runner-up, each by its name.

    Empty of a plan that no final rounds chose.
    """
    choice = None if plan.measurement is None else plan.measurement.choice
    if choice is None:
        return {}
    selected = {} if choice.selection is None else {"selected": clean(choice.selection, limit=2_000)}
    return {
        **selected,
        "chosen": clean(choice.rule, limit=2_000),
        "runner-up": _runner_up_words(choice, winner=plan.provenance.trial),
    }


def choice_lines(plan: Plan) -> list[str]:
    """The same as lines for a terminal."""
    return [f"{name:<10}{words}" for name, words in choice_words(plan).items()]


def choice_paragraph(plan: Plan) -> str:
    """The same as a paragraph."""
    return " ".join(f"{name.capitalize()}: {words}." for name, words in choice_words(plan).items())


def _runner_up_words(choice: FinalChoice, *, winner: int) -> str:
    if choice.runner_up is None or choice.gain is None:
        return "none; no other plan was measured in the final rounds"
    number = choice.runner_up
    is_ahead = choice.gain < 1.0
    first, second = (number, winner) if is_ahead else (winner, number)
    gain = 1.0 / choice.gain if is_ahead else choice.gain
    name = f"trial {number}{', another model' if choice.is_runner_up_other_model else ''}"
    parts = [f"{name}: trial {first} is {gain:.3f}x as fast as trial {second}"]
    if choice.chance_better is None:
        parts[0] += f", by the ratio of their speedups: they share only {choice.num_rounds} rounds"
    else:
        chance = 1.0 - choice.chance_better if is_ahead else choice.chance_better
        parts[0] += (
            f", the median ratio of the same {choice.num_rounds} rounds, "
            f"probability of being faster {100 * chance:.0f} %"
        )
        if math.isclose(chance, 1.0 - 0.5**choice.num_rounds):
            parts[0] += f" (the maximum for {choice.num_rounds} rounds)"
    if not choice.is_runner_up_win and choice.chance_better is None:
        rounds = f"{choice.num_rounds} round{'' if choice.num_rounds == 1 else 's'}"
        parts.append(f"trial {number} was dropped after {rounds}, not proven faster than your command")
    elif not choice.is_runner_up_win:
        words = f"trial {number} is not proven faster than your command"
        if choice.proof_level is not None:
            words += (
                f": a proof requires an error probability of at most {100 * choice.proof_level:.2g} %; "
                "a 95 % interval above 1.00x corresponds to 2.5 %"
            )
        parts.append(words)
    elif is_ahead and choice.is_runner_up_other_model:
        parts.append("the gain is too small or too uncertain to prefer another model")
    elif is_ahead and choice.is_only_runner_up_custom:
        parts.append("the gain is too uncertain to prefer the plugin's runtime to the framework's own")
    return "; ".join(parts)
