"""Drift checks as lines of a terminal and as a paragraph of the report."""

from collections.abc import Sequence

from quartet_plugin.model.history import DriftMeasurement


def drift_lines(checks: Sequence[DriftMeasurement]) -> list[str]:
    """A line a drift check, for a terminal."""
    return [f"{'' if index else 'drift':<10}{check.sentence}" for index, check in enumerate(checks)]


def drift_paragraph(checks: Sequence[DriftMeasurement]) -> str:
    """The same as sentences."""
    sentences = (check.sentence for check in checks)
    return " ".join(f"{words[:1].upper()}{words[1:]}." for words in sentences)
