"""Drift checks in words: the ratio, whether it is within chance, and what trials are compared with."""

from collections.abc import Sequence

from quartet_plugin.model.history import DriftMeasurement
from quartet_plugin.report.formatting import speedup_words


def drift_sentence(check: DriftMeasurement) -> str:
    """One drift check with its verdict and the rule, for the middle of a line."""
    ran = (
        f"after {check.num_tried} trials your command ran at {speedup_words(check.ratio)} of its first "
        "measured speed"
    )
    limit = check.chance_limit
    if limit is None:
        return ran
    span = f"chance ({speedup_words(1.0 / limit)} to {speedup_words(limit)})"
    if check.is_within_chance:
        return f"{ran}, within {span}: trials are still compared with the first"
    return f"{ran}, beyond {span}: later trials are compared with this one"


def drift_lines(checks: Sequence[DriftMeasurement]) -> list[str]:
    """A line a drift check, for a terminal."""
    return [f"{'' if index else 'drift':<10}{drift_sentence(check)}" for index, check in enumerate(checks)]


def drift_paragraph(checks: Sequence[DriftMeasurement]) -> str:
    """The same as sentences."""
    sentences = map(drift_sentence, checks)
    return " ".join(f"{words[:1].upper()}{words[1:]}." for words in sentences)
