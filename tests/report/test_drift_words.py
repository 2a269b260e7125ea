"""A drift check is shown with its verdict, its rule and what trials are compared with from then on."""

from quartet_plugin.model.history import DriftMeasurement
from quartet_plugin.report.drift_words import drift_lines, drift_paragraph


def test_each_check_has_a_verdict_and_says_what_trials_are_compared_with() -> None:
    checks = [
        DriftMeasurement(num_tried=10, ratio=2.11, chance_limit=2.5),
        DriftMeasurement(num_tried=20, ratio=0.67, chance_limit=1.1),
        DriftMeasurement(num_tried=30, ratio=1.5),
    ]
    within, beyond, unknown = drift_lines(checks)
    assert within == (
        "drift     after 10 trials your command was measured again: 2.11x of its first speed, inside the "
        "noise range 0.40x to 2.50x; later trials are still compared with the first measurement"
    )
    assert beyond == (
        "          after 20 trials your command was measured again: 0.67x of its first speed, outside the "
        "noise range 0.91x to 1.10x; the machine has changed, and later trials are compared with the new "
        "measurement"
    )
    assert unknown == "          after 30 trials your command was measured again: 1.50x of its first speed"
    assert drift_lines([]) == []
    assert drift_paragraph(checks[:1]).startswith("After 10 trials")
