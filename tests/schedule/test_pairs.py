"""Overlapped pairs: text, file, rules, and their time against a second simulator."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.model.costs import stage_costs
from quartet_plugin.schedule.action import Action, ActionKind, OverlappedPair, parse_entry
from quartet_plugin.schedule.files import (
    costs_from_json,
    costs_to_json,
    entry_texts,
    schedule_from_json,
    schedule_to_json,
)
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.simulate import Simulation, simulate, simulate_costs
from quartet_plugin.schedule.validate import validate
from tests.schedule.orders import unit_costs
from tests.schedule.pipelines import (
    random_costs,
    random_placement,
    random_schedule,
    with_exchanges,
    with_random_pairs,
)
from tests.schedule.reference_simulator import simulate_reference

SEEDS = st.integers(0, 100_000)
UNITS = st.tuples(st.integers(0, 4095), st.integers(0, 65_535))
BACKWARDS = st.sampled_from([ActionKind.I, ActionKind.B])
TWO = [
    ["0F0", "0F1", "0F2", "(0F3;0B0)OVERLAP_F_B", "0B1", "0B2", "0B3"],
    ["1F0", "(1F1;1B0)OVERLAP_F_B", "(1F2;1B1)OVERLAP_F_B", "(1F3;1B2)OVERLAP_F_B", "1B3"],
]


def schedule_of(rows: list[list[str]], *, num_microbatches: int = 4) -> Schedule:
    return Schedule.of_actions(
        [[parse_entry(text) for text in row] for row in rows],
        num_microbatches=num_microbatches,
        placement=tuple(range(len(rows))),
        layers_per_stage=(1,) * len(rows),
    )


def random_case(seed: int) -> tuple[np.random.Generator, Schedule]:
    """A schedule with pairs where its neighbours allow any, one layer a stage."""
    rng = np.random.default_rng(seed)
    placement = random_placement(rng, int(rng.integers(1, 5)), int(rng.integers(1, 4)))
    plain = random_schedule(rng, placement=placement, num_microbatches=int(rng.integers(2, 7)))
    return rng, with_random_pairs(rng, replace(plain, layers_per_stage=(1,) * len(placement)))


@given(forward=UNITS, backward=UNITS, kind=BACKWARDS)
def test_the_text_of_a_pair_is_read_as_it_is_written(
    forward: tuple[int, int], backward: tuple[int, int], kind: ActionKind
) -> None:
    pair = OverlappedPair(
        Action(forward[0], ActionKind.F, forward[1]), Action(backward[0], kind, backward[1])
    )
    if forward[1] != backward[1]:
        assert OverlappedPair.parse(str(pair)) == pair
        assert parse_entry(str(pair)) == pair
    else:
        with pytest.raises(PlanError, match="of one microbatch"):
            OverlappedPair.parse(str(pair))


def test_the_text_means_a_forward_and_a_backward() -> None:
    pair = OverlappedPair.parse("(0F4;3B2)OVERLAP_F_B")
    assert pair == (Action(0, ActionKind.F, 4), Action(3, ActionKind.B, 2))


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS)
def test_a_file_is_read_as_it_is_written(seed: int) -> None:
    _, schedule = random_case(seed)
    value = schedule_to_json(schedule)
    again = schedule_from_json(value)
    assert schedule_to_json(again) == value
    assert [again.entries(d) for d in range(again.num_devices)] == [
        schedule.entries(d) for d in range(schedule.num_devices)
    ]
    assert len(again.pairs) in (0, again.num_devices)
    without = replace(schedule, pairs=())
    assert schedule_to_json(without)["orders"] == [
        [str(action) for action in schedule.actions(d)] for d in range(schedule.num_devices)
    ]


BAD_TEXTS = [
    ("(0F3;0F1)OVERLAP_F_B", "0F3 and 0F1: a pair is one forward, then one full backward or input gradient"),
    ("(0B0;0F3)OVERLAP_F_B", "0B0 and 0F3: a pair is one forward, then"),
    ("(0F3;0W0)OVERLAP_F_B", "0F3 and 0W0: a pair is one forward, then"),
    ("(0F3;0B3)OVERLAP_F_B", "of one microbatch the backward needs every forward"),
    ("(0F3;1B3)OVERLAP_F_B", "of one microbatch the backward needs every forward"),
    ("((0F3;0B0)OVERLAP_F_B;0B1)OVERLAP_F_B", "no pair in a pair"),
    ("(0F3;0B0;0B1)OVERLAP_F_B", "must be (sFm;tBn)OVERLAP_F_B like (0F4;3B2)OVERLAP_F_B"),
    ("(0F3)OVERLAP_F_B", "must be (sFm;tBn)OVERLAP_F_B"),
    ("(0F3;0B0)OVERLAP_B_F", "must be (sFm;tBn)OVERLAP_F_B"),
    ("(0F3; 0B0)OVERLAP_F_B", "expected {stage}{F|I|W|B}{microbatch} like 2F0"),
    ("(0F3;0B0)", "must be (sFm;tBn)OVERLAP_F_B"),
    ("(0F9;0B0)OVERLAP_F_B", "microbatches are numbered 0 to 3"),
    ("(5F3;0B0)OVERLAP_F_B", "stages are numbered 0 to 1"),
]


@pytest.mark.parametrize(("text", "rule"), BAD_TEXTS)
def test_a_file_with_a_wrong_pair_is_refused_with_value_and_rule(text: str, rule: str) -> None:
    value: dict[str, Any] = schedule_to_json(schedule_of(TWO))
    value["orders"][0][3] = text
    with pytest.raises(ConfigError) as caught:
        schedule_from_json(value)
    message = str(caught.value)
    assert message.startswith("schedule: orders[0][3]: ")
    assert text[:20] in message
    assert rule in message
    assert len(message.splitlines()) == 1


def test_what_is_wrong_behind_a_pair_is_named_by_its_place_in_the_file() -> None:
    value: dict[str, Any] = schedule_to_json(schedule_of(TWO))
    value["orders"][0][5] = "0X2"
    with pytest.raises(ConfigError, match=r"orders\[0\]\[5\]: '0X2'"):
        schedule_from_json(value)


def test_pairs_that_wait_for_each_other_are_refused() -> None:
    """Part by part this order runs; as pairs device 0 waits for a gradient that waits for its forward."""
    rows = [
        ["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"],
        ["1F0", "(1F1;1B0)OVERLAP_F_B", "1B1"],
    ]
    schedule = schedule_of(rows, num_microbatches=2)
    validate(replace(schedule, pairs=()))
    with pytest.raises(PlanError) as caught:
        validate(schedule)
    line, *table = str(caught.value).splitlines()
    assert "device 0 waits at 0B0 for 1B0, device 1 waits at 1F1 for 0F1" in line
    assert "[0F1+]" in table[0]
    with pytest.raises(PlanError, match="deadlock"):
        simulate(schedule, unit_costs(schedule))


@pytest.mark.parametrize(
    ("pairs", "rule"),
    [
        ([[3]], "pairs: 1 lists; one for each of 2 devices"),
        ([[7], []], r"pairs\[0\]: 7; indices ascend"),
        ([[3, 4], []], r"pairs\[0\]: 4; .* share no part"),
        ([[2], []], "pair at device 0, position 2: 0F2 and 0F3"),
        ([[], [0]], "of one microbatch"),
    ],
)
def test_marks_that_make_no_pair_are_refused(pairs: list[list[int]], rule: str) -> None:
    rows = [row.copy() for row in TWO]
    rows[1] = ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3"]
    marked = tuple(np.array(row, dtype=np.int64) for row in pairs)
    schedule = replace(schedule_of(rows), pairs=marked)
    with pytest.raises(PlanError, match=rule):
        validate(schedule)


def same(ours: Simulation, schedule: Schedule, costs: Any) -> None:
    theirs = simulate_reference(schedule, costs)
    for device in range(schedule.num_devices):
        for action, start, end in zip(
            schedule.actions(device), ours.start_s[device], ours.end_s[device], strict=True
        ):
            assert start == pytest.approx(theirs.start_s[action], abs=1e-9)
            assert end == pytest.approx(theirs.end_s[action], abs=1e-9)
    assert ours.peak_activation_bytes == pytest.approx(np.array(theirs.peak_activation_bytes), abs=1e-9)


@settings(deadline=None, max_examples=120)
@given(seed=SEEDS, fused=st.booleans())
def test_times_and_memory_are_those_of_a_second_simulator(seed: int, fused: bool) -> None:
    rng, schedule = random_case(seed)
    table = with_exchanges(
        rng,
        random_costs(
            rng,
            num_devices=schedule.num_devices,
            num_microbatches=schedule.num_microbatches,
            num_layers=schedule.num_stages,
            fused=fused,
        ),
    )
    costs = stage_costs(table, placement=schedule.placement, layers_per_stage=(1,) * schedule.num_stages)
    ours = simulate(schedule, costs)
    same(ours, schedule, costs)
    assert ours.busy_s.max() * (1 - 1e-9) <= ours.period_s <= ours.makespan_s * (1 + 1e-9)
    assert costs_to_json(costs_from_json(costs_to_json(table))) == costs_to_json(table)
    # Without all-to-all a pair has nothing to hide: it takes its parts' time, and only waits for more.
    plain = replace(costs, exchange_s=None)
    apart = simulate(replace(schedule, pairs=()), plain).makespan_s
    assert simulate(schedule, plain).makespan_s >= apart * (1 - 1e-9)


def test_a_pair_hides_each_exchange_behind_the_other_parts_compute() -> None:
    schedule = schedule_of(TWO)
    costs = replace(unit_costs(schedule), exchange_s=np.array([[0.75, 0.0], [0.75, 0.0]]))
    ends = simulate(schedule, costs)
    # Forward 0.25 + 0.75, backward 1.25 + 0.75: of the latter's exchange 0.5 stays exposed.
    assert ends.end_s[0][3] - ends.start_s[0][3] == pytest.approx(0.25 + 1.25 + 0.5)
    assert ends.start_s[0][3] == ends.start_s[0][4]
    assert ends.end_s[0][3] == ends.end_s[0][4]
    assert ends.busy_s[0] == pytest.approx(3 * 1.0 + 2.0 + 3 * 2.0)
    # The forward's activations come while the backward's are held.
    assert ends.peak_activation_bytes.tolist() == [4.0, 2.0]


def test_the_golden_pair_file_stays_as_it_is(tmp_path: Path) -> None:
    from quartet_plugin.schedule.files import read_schedule, write_schedule

    golden = Path(__file__).parents[1] / "golden" / "schedule_pairs.json"
    schedule = read_schedule(golden)
    assert entry_texts(schedule) == TWO
    write_schedule(tmp_path / "again.json", schedule)
    assert (tmp_path / "again.json").read_bytes() == golden.read_bytes()


COSTS: dict[str, Any] = {
    "schema_version": 1,
    "num_devices": 2,
    "num_microbatches": 4,
    "layers": [
        {
            "name": f"layer.{n}",
            "forward_s": 1.0,
            "input_grad_s": 1.0,
            "weight_grad_s": 1.0,
            "activation_bytes": 1.0,
        }
        for n in range(2)
    ],
}


@pytest.mark.parametrize(
    ("exchange", "rule"),
    [
        ([[0.5, 0.5]], "exchange_s: 1 entries: must be 2, one a layer"),
        ([[0.5], [0.5, 0.5]], "exchange_s[0]"),
        ([[0.5, -1.0], [0.5, 0.5]], "exchange_s[0][1]: -1.0"),
        ([[0.5, 0.5], [1.5, 0.5]], "exchange_s[1][0]: 1.5: must be at most the layer's forward_s, 1.0"),
        ([[0.5, 0.5], [0.5, 1.5]], "exchange_s[1][1]: 1.5: must be at most the layer's input_grad_s or"),
    ],
)
def test_exchanges_that_are_no_part_of_their_action_are_refused(exchange: Any, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        costs_from_json({**COSTS, "exchange_s": exchange})
    assert rule in str(caught.value)


def test_costs_without_exchanges_are_written_without_the_key() -> None:
    assert "exchange_s" not in costs_to_json(costs_from_json(COSTS))
    table = costs_from_json({**COSTS, "exchange_s": [[0.25, 0.5], [0.5, 0.5]]})
    assert costs_to_json(table)["exchange_s"] == [[0.25, 0.5], [0.5, 0.5]]
    assert simulate_costs(schedule_of(TWO), table).makespan_s < 15.0
