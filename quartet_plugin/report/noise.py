"""How far launches of one plan lie apart, and how far a run's figures go then."""

from quartet_plugin.model.history import RunHistory

# Launches of one plan on a machine that does nothing else lie closer together.
NOISY_RATIO = 1.25


def launches_s(history: RunHistory) -> dict[str, list[float]]:
    """The seconds per iteration of launches of the baseline and of each finalist, by name.

    Of the final rounds' launches of a plan the fastest and the slowest count. The user's command is left out
    where another plan stands in for it.
    """
    seconds: dict[str, list[float]] = {}
    first = None if history.baseline is None else history.baseline.iteration_s
    if first is not None and not history.baseline_note:
        seconds["your command"] = [first, *(first / check.ratio for check in history.drift_checks)]
    for finalist in history.finalists:
        sides = finalist.comparison.baseline, finalist.comparison.plan
        command, plan = (side.iteration_s for side in sides)
        if "your command" in seconds:
            seconds["your command"] += [command.low, command.high]
        seconds[f"trial {finalist.number}"] = [plan.low, plan.high]
    return {name: values for name, values in seconds.items() if len(values) > 1}


def noise_words(history: RunHistory) -> str:
    """The largest spread of one plan's launches, and what follows; empty where none was launched twice."""
    seconds = launches_s(history)
    if not seconds:
        return ""
    spread = {name: max(values) / min(values) for name, values in seconds.items()}
    name = max(spread, key=spread.__getitem__)
    words = (
        f"launches of {name} took {min(seconds[name]):.3f} to {max(seconds[name]):.3f} s/iteration, "
        f"{spread[name]:.2f}x apart, the widest spread of any plan: "
    )
    if spread[name] < NOISY_RATIO:
        return words + "the machine was quiet"
    return words + (
        "the machine was busy. The final rounds take turns, so their result and its interval are valid; of "
        "single trials, and of values fitted to them (axes, shapes, explain), trust the order, not the size"
    )
