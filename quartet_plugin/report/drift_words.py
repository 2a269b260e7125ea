"""Drift checks in words: the ratio, whether noise explains it, and what trials are compared with."""

from collections.abc import Sequence

from quartet_plugin.model.history import DriftMeasurement
from quartet_plugin.report.formatting import speedup_words


def drift_sentence(check: DriftMeasurement) -> str:
    """One drift check with its verdict and the rule, for the middle of a line."""
    ran = (
        f"after {check.num_tried} trials your command was measured again: {speedup_words(check.ratio)} of "
        "its first speed"
    )
    limit = check.chance_limit
    if limit is None:
        return ran
    span = f"the noise range {speedup_words(1.0 / limit)} to {speedup_words(limit)}"
    if check.is_within_chance:
        return f"{ran}, inside {span}; later trials are still compared with the first measurement"
    return (
        f"{ran}, outside {span}; the machine has changed, and later trials are compared with the new "
        "measurement"
    )


def drift_lines(checks: Sequence[DriftMeasurement]) -> list[str]:
    """A line a drift check, for a terminal."""
    return [f"{'' if index else 'drift':<10}{drift_sentence(check)}" for index, check in enumerate(checks)]


def drift_paragraph(checks: Sequence[DriftMeasurement]) -> str:
    """The same as sentences."""
    sentences = map(drift_sentence, checks)
    return " ".join(f"{words[:1].upper()}{words[1:]}." for words in sentences)
