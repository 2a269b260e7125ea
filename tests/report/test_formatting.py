"""Quantities as they are shown: a speedup after a drift of the machine says what it is compared with."""

from dataclasses import replace

from quartet_plugin.report.formatting import drift_note, microbatch_words, speedup_sentence, speedup_words
from quartet_plugin.report.tables import plan_lines
from tests.model.plans import PLAN, plan_with


def test_a_speedup_over_the_first_baseline_has_no_mark() -> None:
    assert speedup_words(1.4351) == "1.44x"
    assert speedup_sentence(1.4351) == "1.44x as fast as the baseline"
    assert drift_note([1.0, 1.0]) is None


def test_a_speedup_after_a_drift_has_a_mark_and_one_line_for_it() -> None:
    assert speedup_words(1.4351, drift=0.721) == "1.44x*"
    assert speedup_sentence(1.4351, drift=0.721) == (
        "1.44x as fast as the baseline (baseline remeasured at 0.72x of its first speed)"
    )
    assert drift_note([1.0, 0.721, 0.721, 1.25]) == (
        "* speedup over the baseline remeasured at 0.72x, 1.25x of its first speed"
    )


def test_a_single_microbatch_has_no_plural() -> None:
    assert [microbatch_words(number) for number in (1, 2)] == ["1 microbatch", "2 microbatches"]


def test_a_plan_with_one_microbatch() -> None:
    plan = plan_with(layout=replace(PLAN.layout, micro_batch_size=PLAN.made_for.global_batch_size))
    assert plan.num_microbatches == 1
    assert any(line.endswith(": 1 microbatch an iteration") for line in plan_lines(plan))
