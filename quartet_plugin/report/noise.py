"""How far launches of the user's own command lie apart, and how far a run's figures go then."""

from quartet_plugin.model.history import RunHistory

# Launches of one plan on a machine that does nothing else lie closer together.
NOISY_RATIO = 1.25


def own_launches_s(history: RunHistory) -> list[float]:
    """The seconds an iteration of each launch of the own command that is known.

    Of the final rounds' launches the fastest and the slowest count. None where another plan stands in for
    the command.
    """
    if history.baseline_note:
        return []
    first = None if history.baseline is None else history.baseline.iteration_s
    seconds = [] if first is None else [first, *(first / check.ratio for check in history.controls)]
    for finalist in history.finalists[:1]:
        rounds = finalist.comparison.baseline.iteration_s
        seconds += [rounds.low, rounds.high]
    return seconds


def noise_words(history: RunHistory) -> str:
    """The spread of the own command's launches, and what follows; empty with fewer than two launches."""
    seconds = own_launches_s(history)
    if len(seconds) < 2:
        return ""
    ratio = max(seconds) / min(seconds)
    words = (
        f"launches of your own command took {min(seconds):.3f} to {max(seconds):.3f} s/iteration, "
        f"{ratio:.2f}x apart: "
    )
    if ratio < NOISY_RATIO:
        return words + "the machine was quiet"
    return words + (
        "the machine was busy. The final rounds compare in turns and stand; of single trials, and of what is "
        "fitted to them (axes, shapes, regret, explain), take the order and not the size"
    )
