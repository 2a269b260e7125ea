"""The picture of a prediction."""

from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from quartet_plugin.report.explain import (
    BAR_WIDTH,
    YOUR_COMMAND,
    BaselineTerms,
    Explanation,
    RunnerUp,
    StageMemory,
    bar,
    differences,
    show,
)
from quartet_plugin.report.throughput import throughput
from tests.space.jobs import make_shape

GIB = 2**30
EXPLANATION = Explanation(
    rates=throughput(1.0, shape=make_shape(), global_batch_size=8, num_devices=2, peak=None),
    title=[("plan", "abc for 8 devices"), ("layout", "tp2 pp2 dp2 mb1")],
    iteration_s=2.0,
    stated_s=2.0,
    terms={
        "compute_s": 1.5,
        "pp_bubble_s": 0.4,
        "tp_comm_s": 0.098,
        "optimizer_s": 0.001,
        "dp_comm_s": 0.001,
    },
    compute_terms={"gemm_s": 1.2, "attention_s": 0.3},
    bubble_fraction=0.2,
    memory=[
        StageMemory(rank=0, num_layers=5, total_bytes=30 * GIB, terms={"activations_bytes": 30.0 * GIB}),
        StageMemory(rank=1, num_layers=3, total_bytes=90 * GIB, terms={"parameters_bytes": 90.0 * GIB}),
    ],
    available_bytes=60.0 * GIB,
    runner_up=RunnerUp(
        label="pp4 dp2 mb1",
        trial=None,
        equal_work_s=2.2,
        terms={"compute_s": 1.5, "pp_bubble_s": 0.6, "tp_comm_s": 0.1},
    ),
    assumed={"precision": "bf16"},
    basis="not calibrated by trials",
)
COMMAND = BaselineTerms(
    name=YOUR_COMMAND,
    iteration_s=4.0,
    terms={"compute_s": 3.0, "pp_bubble_s": 0.2, "ep_comm_s": 0.8},
    compute_terms={"gemm_s": 2.0, "attention_s": 1.0},
    bubble_fraction=0.4,
    measured_s=5.0,
)


def shown(explanation: Explanation, *, width: int = 160) -> str:
    text = StringIO()
    show(explanation, console=Console(file=text, width=width, highlight=False))
    return text.getvalue()


def test_every_part_is_there() -> None:
    text = shown(EXPLANATION)
    assert "2 s per iteration" in text
    assert "75.0 %" in text
    assert "gemm" in text
    assert "bubble    20.0 % of all device time" in text
    assert (
        "next best predicted layout: pp4 dp2 mb1: 2.2 s for the same work, 10.0 % slower: pp_bubble +0.2 s"
        in text
    )
    assert "runner-up" not in text
    assert "basis     not calibrated by trials" in text
    assert "measured" not in text
    assert "your command" not in text
    assert "assumed   precision bf16" in text
    assert "before its launch" not in text
    assert "difference" not in text
    longest = text.index("compute"), text.index("pp_bubble"), text.index("tp_comm")
    assert longest == tuple(sorted(longest))


def test_small_terms_are_summed_up() -> None:
    line = next(line for line in shown(EXPLANATION).splitlines() if line.startswith("others"))
    assert "0.002" in line


def test_a_negative_term_is_shown() -> None:
    corrected = replace(EXPLANATION, iteration_s=1.8, terms={**EXPLANATION.terms, "residual_s": -0.2})
    line = next(line for line in shown(corrected).splitlines() if line.startswith("residual"))
    assert "-0.2" in line
    assert "-11.1 %" in line


def test_a_rank_that_does_not_fit_is_marked() -> None:
    lines = [line for line in shown(EXPLANATION).splitlines() if "GiB" in line and line.strip()[0].isdigit()]
    assert "DOES NOT FIT" not in lines[0]
    assert "50 %" in lines[0]
    assert "DOES NOT FIT" in lines[1]
    assert "150 %" in lines[1]


def test_a_memory_that_is_not_known_is_said() -> None:
    text = shown(replace(EXPLANATION, available_bytes=None))
    assert text.count("not known") == len(EXPLANATION.memory)
    assert "DOES NOT FIT" not in text


def test_another_prediction_than_the_plans_own_is_said() -> None:
    assert "(predicted before its launch: 1 s)" in shown(replace(EXPLANATION, stated_s=1.0))
    assert "before its launch" not in shown(replace(EXPLANATION, stated_s=None))


def test_no_runner_up_is_said() -> None:
    assert "none; no other layout is legal and fits in memory" in shown(replace(EXPLANATION, runner_up=None))


def test_a_better_layout_is_said_to_be_better() -> None:
    assert EXPLANATION.runner_up is not None
    faster = replace(EXPLANATION.runner_up, equal_work_s=1.0)
    assert "50.0 % faster than this plan" in shown(replace(EXPLANATION, runner_up=faster))


def test_your_command_stands_beside_the_plan() -> None:
    lines = shown(replace(EXPLANATION, baseline=COMMAND, measured_s=1.0)).splitlines()
    cells = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert "your command" in next(line for line in lines if line.startswith("term"))
    assert cells["compute"][1:7] == ["1.5", "75.0", "%", "3", "75.0", "%"]
    assert cells["gemm"][1:7] == ["1.2", "60.0", "%", "2", "50.0", "%"]
    # A term that only the command has.
    assert cells["ep_comm"][1:7] == ["0", "0.0", "%", "0.8", "20.0", "%"]
    text = "\n".join(lines)
    assert "measured  1 s per iteration, 0.50x the predicted time" in text
    assert (
        "your command: 4 s per iteration predicted, measured 5 s per iteration, 1.25x the predicted time"
        in text
    )
    assert "bubble    20.0 % of all device time; your command: 40.0 %" in text
    assert "pp_bubble: seconds in which the busiest pipeline rank waits" in text


def test_the_differences_say_where_the_time_is_saved() -> None:
    lines = shown(replace(EXPLANATION, baseline=COMMAND)).splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("term"))
    assert "difference" in lines[head]
    rows = [line.split() for line in lines[head + 1 : lines.index("", head)]]
    assert [row[0] for row in rows][:6] == ["compute", "gemm", "attention", "ep_comm", "pp_bubble", "tp_comm"]
    assert [" ".join(row[7:9]) for row in rows][:5] == [
        "-1,500.0 ms",
        "-800.0 ms",
        "-700.0 ms",
        "-800.0 ms",
        "+200.0 ms",
    ]
    assert rows[-1][:9] == ["sum", "2", "100.0", "%", "4", "100.0", "%", "-2,000.0", "ms"]


def test_what_trials_calibrated_is_fitted_and_says_what_it_has_seen() -> None:
    calibrated = replace(EXPLANATION, baseline=COMMAND, measured_s=1.0, num_trials=7, stated_s=1.0)
    text = shown(calibrated)
    assert "fitted    2 s per iteration (predicted before its launch: 1 s)" in text
    assert "measured  1 s per iteration, 0.50x the fitted time" in text
    assert "used single trials, not the final rounds that gave the measured times" in text
    assert "used all trials, so the sum may differ" in shown(replace(calibrated, is_measured_in_rounds=False))


def test_a_narrow_terminal_has_every_number_of_both() -> None:
    lines = shown(replace(EXPLANATION, baseline=COMMAND), width=80).splitlines()
    row = next(line for line in lines if line.startswith("compute"))
    assert row.split()[1:7] == ["1.5", "75.0", "%", "3", "75.0", "%"]
    assert "…" not in row
    assert lines[lines.index(row) + 1].split()[0] == "gemm", "no meaning is folded into narrow lines"


def test_data_of_your_command_and_of_what_was_measured() -> None:
    data = replace(EXPLANATION, baseline=COMMAND, measured_s=1.0, num_trials=7).as_data()
    assert (data["measured_s"], data["num_calibrating_trials"]) == (1.0, 7)
    assert data["baseline"] == {
        "iteration_s": 4.0,
        "measured_s": 5.0,
        "terms": COMMAND.terms,
        "compute_terms": COMMAND.compute_terms,
        "bubble_fraction": 0.4,
    }
    plain = EXPLANATION.as_data()
    assert (plain["measured_s"], plain["num_calibrating_trials"], plain["baseline"]) == (None, None, None)


def test_data_for_programs() -> None:
    data = EXPLANATION.as_data()
    assert data["terms"] == EXPLANATION.terms
    assert data["runner_up"] == {
        "label": "pp4 dp2 mb1",
        "equal_work_s": 2.2,
        "trial": None,
        "slower_by": pytest.approx(0.1),
        "terms": EXPLANATION.runner_up.terms if EXPLANATION.runner_up else None,
    }


@given(st.floats(0, 1))
def test_a_bar_is_as_long_as_its_share(share: float) -> None:
    assert abs(len(bar(share)) - share * BAR_WIDTH) <= 1


def test_a_full_bar_and_more() -> None:
    assert bar(1.0) == "█" * BAR_WIDTH
    assert bar(1.01) == "█" * (BAR_WIDTH - 1) + "▶"
    assert bar(0.0) == ""


def test_differences_are_the_largest_ones() -> None:
    own = {"a_s": 1.0, "b_s": 2.0, "c_s": 1e-9, "d_s": 0.5}
    other = {"a_s": 1.5, "b_s": 1.8, "d_s": 0.5}
    assert differences(own, other) == "a -0.5 s, b +0.2 s"
    assert differences(own, own) == ""
