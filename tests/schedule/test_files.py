"""COSTS.json and SCHEDULE.json: the golden files, round trips, and a corpus of files to refuse."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.model.costs import Costs, LayerCost
from quartet_plugin.model.files import read_json, write_json_atomic
from quartet_plugin.schedule.action import Action, ActionKind
from quartet_plugin.schedule.files import (
    costs_from_json,
    costs_to_json,
    order_texts,
    parse_order,
    read_costs,
    read_schedule,
    schedule_from_json,
    schedule_to_json,
    write_schedule,
)
from quartet_plugin.schedule.schedule import Schedule
from tests.schedule.orders import one_f_one_b, schedule_of, v_schedule

GOLDEN = Path(__file__).parents[1] / "golden"
PREDICTED = {
    "makespan_s": 12.0,
    "period_s": 11.5,
    "bubble_fraction": 0.25,
    "peak_activation_bytes": [2.0, 1.5],
}

COSTS: dict[str, Any] = {
    "schema_version": 1,
    "num_devices": 2,
    "num_microbatches": 3,
    "layers": [
        {
            "name": name,
            "forward_s": 1.0,
            "input_grad_s": 1.5,
            "weight_grad_s": 0.5,
            "activation_bytes": 100,
        }
        for name in ("embedding", "layer.0", "layer.1", "head")
    ],
}


def schedule_json() -> dict[str, Any]:
    return schedule_to_json(schedule_of(one_f_one_b(2, 3), 3))


def two_copies() -> dict[str, Any]:
    value = schedule_json()
    value["orders"] = [["0F0", "1F1", "1B1", "0B0"], ["0F1", "1F0", "1B0", "0B1"]]
    return value | {"num_microbatches": 2, "routes": [[0, 1], [1, 0]], "route_of_microbatch": [0, 1]}


def changed(value: dict[str, Any], path: str, new: Any) -> dict[str, Any]:
    """A copy with the entry at `path` (keys and indices joined by dots) set, or deleted when `new` is ..."""
    copy = deepcopy(value)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = copy
    for part in parents:
        place = place[part]
    if new is ...:
        del place[last]
    else:
        place[last] = new
    return copy


def same_costs(a: Costs, b: Costs) -> bool:
    return costs_to_json(a) == costs_to_json(b)


def same_schedule(a: Schedule, b: Schedule) -> bool:
    return schedule_to_json(a) == schedule_to_json(b) and all(
        np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(a.orders, b.orders, strict=True)
    )


def test_golden_costs() -> None:
    costs = read_costs(GOLDEN / "schedule_costs.json")
    assert (costs.num_devices, costs.num_microbatches, len(costs.layers)) == (4, 8, 10)
    assert costs.has_embedding
    assert costs.has_head
    assert costs.device_slowdown.tolist() == [1.0, 1.0, 1.5, 1.0]
    assert costs.transfer_s[1, 2] == 0.0005
    assert costs_to_json(costs) == read_json(GOLDEN / "schedule_costs.json")


def test_golden_costs_with_defaults() -> None:
    costs = read_costs(GOLDEN / "schedule_costs_minimal.json")
    assert costs.device_slowdown.tolist() == [1.0, 1.0]
    assert costs.transfer_s.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert costs.memory_limit_bytes is None
    assert costs.weight_grad_held_fraction == 1.0
    assert costs.backward_fused_s is None


@pytest.mark.parametrize("name", ["schedule_1f1b.json", "schedule_v.json", "schedule_two_copies.json"])
def test_golden_schedules(name: str, tmp_path: Path) -> None:
    schedule = read_schedule(GOLDEN / name)
    value = read_json(GOLDEN / name)
    assert schedule_to_json(schedule, predicted=value.get("predicted")) == value
    write_schedule(tmp_path / name, schedule, predicted=value.get("predicted"))
    assert (tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes()


def test_what_the_golden_schedule_means() -> None:
    schedule = read_schedule(GOLDEN / "schedule_1f1b.json")
    assert schedule.placement == (0, 1)
    assert schedule.layers_per_stage == (1, 1)
    assert schedule.origin == {"name": "1f1b"}
    assert schedule.actions(1)[:3] == [
        Action(1, ActionKind.F, 0),
        Action(1, ActionKind.B, 0),
        Action(1, ActionKind.F, 1),
    ]


BAD_COSTS: list[tuple[str, Any, str]] = [
    ("schema_version", 2, "schema_version: 2: must be 1"),
    ("schema_version", "1", "schema_version: '1'"),
    ("schema_version", True, "schema_version: True"),
    ("schema_version", ..., "schema_version: missing"),
    ("num_devices", ..., "num_devices: missing"),
    ("num_microbatches", ..., "num_microbatches: missing"),
    ("layers", ..., "layers: missing"),
    ("surprise", 1, "surprise: 1: unknown key"),
    ("layers.1.surprise", 1, "layers[1].surprise: 1: unknown key"),
    ("num_devices", 2.0, "num_devices: 2.0"),
    ("num_devices", True, "num_devices: True"),
    ("num_devices", 0, "num_devices: 0"),
    ("num_devices", 4097, "num_devices: 4097"),
    ("num_microbatches", 65537, "num_microbatches: 65537"),
    ("num_microbatches", -1, "num_microbatches: -1"),
    ("num_microbatches", 10**30, "num_microbatches: 1"),
    ("layers", [], "layers: []"),
    ("layers", {}, "layers: {}"),
    ("layers.2", 7, "layers[2]: 7: must be a JSON object"),
    ("layers.0.forward_s", -1e-9, "layers[0].forward_s: -1e-09: should be greater than or equal to 0"),
    ("layers.0.forward_s", float("nan"), "layers[0].forward_s: nan"),
    ("layers.0.forward_s", float("inf"), "layers[0].forward_s: inf"),
    ("layers.0.forward_s", 1e300, "layers[0].forward_s: 1e+300"),
    ("layers.0.forward_s", "1", "layers[0].forward_s: '1'"),
    ("layers.0.forward_s", True, "layers[0].forward_s: True"),
    ("layers.0.forward_s", None, "layers[0].forward_s: None"),
    ("layers.3.activation_bytes", -5, "layers[3].activation_bytes: -5"),
    ("layers.3.name", "", "layers[3].name: ''"),
    ("layers.3.name", 5, "layers[3].name: 5"),
    ("device_slowdown", [1.0], "device_slowdown: 1 entries: must be 2"),
    ("device_slowdown", [], "device_slowdown: 0 entries: must be 2"),
    ("device_slowdown", [1.0, 0.0], "device_slowdown[1]: 0.0"),
    ("device_slowdown", None, "device_slowdown: None"),
    ("transfer_s", [[0, 1]], "transfer_s: 1 entries: must be 2"),
    ("transfer_s", [[0, 1], [1]], "transfer_s[1]: 1 entries: must be 2"),
    ("transfer_s", [[0, 1], [1, 1]], "transfer_s[1][1]: 1.0: the diagonal must be 0"),
    ("transfer_s", [[0, -1], [1, 0]], "transfer_s[0][1]: -1"),
    ("memory_limit_bytes", [1], "memory_limit_bytes: 1 entries: must be 2"),
    ("memory_limit_bytes", [1, -1], "memory_limit_bytes[1]: -1"),
    ("memory_limit_bytes", 5, "memory_limit_bytes: 5"),
    ("weight_grad_held_fraction", 1.5, "weight_grad_held_fraction: 1.5"),
    ("weight_grad_held_fraction", -0.1, "weight_grad_held_fraction: -0.1"),
    ("weight_grad_held_fraction", None, "weight_grad_held_fraction: None"),
    ("backward_fused_s", [1, 1, 1], "backward_fused_s: 3 entries: must be 4"),
    ("backward_fused_s", [1, 1, 1, -1], "backward_fused_s[3]: -1"),
]


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert text.splitlines() == [text]
    assert len(text) < 300
    return text


@pytest.mark.parametrize(("path", "value", "message"), BAD_COSTS, ids=lambda v: repr(v)[:40])
def test_bad_costs(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        costs_from_json(changed(COSTS, path, value), where="C.json")
    assert one_line(caught).startswith(f"C.json: {message}")


@pytest.mark.parametrize("value", [None, [], 5, "costs", {}])
def test_no_costs_at_all(value: Any) -> None:
    with pytest.raises(ConfigError):
        costs_from_json(value)


BAD_SCHEDULES: list[tuple[str, Any, str]] = [
    ("schema_version", 0, "schema_version: 0: must be 1"),
    ("orders", ..., "orders: missing"),
    ("placement", ..., "placement: missing"),
    ("layers_per_stage", ..., "layers_per_stage: missing"),
    ("layers_per_stage", None, "layers_per_stage: None"),
    ("num_devices", 3, "orders: 2 entries: must be 3"),
    ("placement", [1, 0], "placement[0]: 1: stage 0 must be on device 0"),
    ("placement", [0, 0], "placement: device 1 holds 0 stages"),
    ("placement", [0, 2], "placement[1]: device 2: devices are numbered 0 to 1"),
    ("placement", [0, -1], "placement[1]: -1"),
    ("placement", [0, 1, 1], "layers_per_stage: 2 entries: must be 3"),
    ("layers_per_stage", [1], "layers_per_stage: 1 entries: must be 2"),
    ("layers_per_stage", [1, -1], "layers_per_stage[1]: -1"),
    ("orders", [["0F0"]], "orders: 1 entries: must be 2"),
    ("orders.1.2", "x", "orders[1][2]: 'x': must be {stage}{F|I|W|B}{microbatch} like 2F0"),
    ("orders.1.2", "1f0", "orders[1][2]: '1f0'"),
    ("orders.1.2", "01F0", "orders[1][2]: '01F0'"),
    ("orders.1.2", " 1F0", "orders[1][2]: ' 1F0'"),
    ("orders.1.2", "1F0\n", r"orders[1][2]: '1F0\n'"),
    ("orders.1.2", "1F0,1F1", "orders[1][2]: '1F0,1F1'"),
    ("orders.1.2", "", "orders[1][2]: ''"),
    ("orders.1.2", "1F", "orders[1][2]: '1F'"),
    ("orders.1.2", "-1F0", "orders[1][2]: '-1F0'"),
    ("orders.1.2", "٣F0", "orders[1][2]: '٣F0'"),
    ("orders.1.2", "1F99999999999", "orders[1][2]: '1F99999999999'"),
    ("orders.1.2", "2F0", "orders[1][2]: '2F0': stages are numbered 0 to 1"),
    ("orders.1.2", "1F3", "orders[1][2]: '1F3': microbatches are numbered 0 to 2"),
    ("orders.1.2", 5, "orders[1][2]: 5"),
    ("orders.1", "1F0", "orders[1]: '1F0'"),
    ("origin", {}, "origin: needs exactly one of name and family"),
    ("origin", {"name": "1f1b", "family": {}}, "origin: needs exactly one of name and family"),
    ("origin", {"code": "os.system"}, "origin.code: 'os.system': unknown key"),
    ("origin", {"name": "x" * 300}, "origin.name: 'x"),
    ("predicted", {"makespan_s": 1.0}, "predicted.period_s: missing"),
    ("predicted", PREDICTED | {"peak_activation_bytes": [1]}, "predicted.peak_activation_bytes: 1 entries"),
    ("predicted", PREDICTED | {"makespan_s": -1}, "predicted.makespan_s: -1"),
    ("predicted", PREDICTED | {"bubble_fraction": 1.5}, "predicted.bubble_fraction: 1.5"),
    ("argv", ["rm"], "argv: ['rm']: unknown key"),
    ("routes", [[0, 1], [1, 0]], "route_of_microbatch: missing"),
    ("route_of_microbatch", [0, 1, 0], "routes: missing"),
]


@pytest.mark.parametrize(("path", "value", "message"), BAD_SCHEDULES, ids=lambda v: repr(v)[:40])
def test_bad_schedules(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schedule_from_json(changed(schedule_json(), path, value), where="S.json")
    assert one_line(caught).startswith(f"S.json: {message}")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("routes", [[0, 1]], "routes: 1 entries: must be 2"),
        ("routes", [[1, 0], [0, 1]], "routes[0]: [1, 0]: must be the placement"),
        ("routes", [[0, 1], [1]], "routes[1]: 1 entries: must be 2"),
        ("routes", [[0, 1], [1, 1]], "routes[1]: device 0 holds 0 stages"),
        ("route_of_microbatch", [0], "route_of_microbatch: 1 entries: must be 2"),
        ("route_of_microbatch", [0, 2], "route_of_microbatch[1]: 2"),
        ("route_of_microbatch", [0, True], "route_of_microbatch[1]: True"),
    ],
)
def test_bad_routes(path: str, value: Any, message: str) -> None:
    schedule_from_json(two_copies())
    with pytest.raises(ConfigError) as caught:
        schedule_from_json(changed(two_copies(), path, value), where="S.json")
    assert one_line(caught).startswith(f"S.json: {message}")


def test_more_actions_than_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quartet_plugin.schedule.files.MAX_ACTIONS", 11)
    with pytest.raises(ConfigError, match="orders: 12 actions: at most 11"):
        schedule_from_json(schedule_json())


@pytest.mark.parametrize(
    "text", ['{"schema_version": 1, "num_devices": NaN}', "[" * 5000, '{"a": 1, "a": 1}']
)
def test_bad_json_is_refused_before_the_schema(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text, encoding="utf-8")
    for read in (read_costs, read_schedule):
        with pytest.raises(ConfigError, match=r"bad\.json:1:") as caught:
            read(tmp_path / "bad.json")
        one_line(caught)


def test_a_schedule_without_a_split_is_not_written(tmp_path: Path) -> None:
    schedule = Schedule.of_actions([[Action(0, ActionKind.F, 0)]], num_microbatches=1, placement=(0,))
    with pytest.raises(ConfigError, match="layers_per_stage"):
        write_schedule(tmp_path / "s.json", schedule)
    assert not list(tmp_path.iterdir())


def test_predicted_is_written_and_checked(tmp_path: Path) -> None:
    write_schedule(tmp_path / "s.json", v_schedule(), predicted=PREDICTED)
    assert read_json(tmp_path / "s.json")["predicted"] == PREDICTED
    assert same_schedule(read_schedule(tmp_path / "s.json"), v_schedule())


seconds = st.floats(0, 1e6, allow_nan=False)


@st.composite
def cost_tables(draw: st.DrawFn) -> Costs:
    devices, layers = draw(st.integers(1, 4)), draw(st.integers(1, 6))

    def numbers(count: int, least: float = 0.0) -> list[float]:
        return draw(st.lists(st.floats(least, 1e6), min_size=count, max_size=count))

    transfer = np.array([numbers(devices) for _ in range(devices)])
    np.fill_diagonal(transfer, 0.0)
    names = draw(st.lists(st.text(min_size=1, max_size=20), min_size=layers, max_size=layers))
    return Costs(
        num_devices=devices,
        num_microbatches=draw(st.integers(1, 65_536)),
        layers=tuple(
            LayerCost(
                name=name,
                forward_s=draw(seconds),
                input_grad_s=draw(seconds),
                weight_grad_s=draw(seconds),
                activation_bytes=draw(seconds),
            )
            for name in names
        ),
        device_slowdown=np.array(numbers(devices, 0.001)),
        transfer_s=transfer,
        memory_limit_bytes=np.array(numbers(devices)) if draw(st.booleans()) else None,
        weight_grad_held_fraction=draw(st.floats(0, 1)),
        backward_fused_s=tuple(numbers(layers)) if draw(st.booleans()) else None,
    )


@given(cost_tables())
@settings(deadline=None, max_examples=60)
def test_costs_round_trip(costs: Costs) -> None:
    assert same_costs(costs_from_json(json.loads(json.dumps(costs_to_json(costs)))), costs)


def test_costs_round_trip_through_a_file(tmp_path: Path) -> None:
    costs = costs_from_json(COSTS)
    write_json_atomic(tmp_path / "c.json", costs_to_json(costs))
    assert same_costs(read_costs(tmp_path / "c.json"), costs)


@given(
    stages=st.integers(1, 4096),
    microbatches=st.integers(1, 65_536),
    picks=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.sampled_from(ActionKind)), max_size=30),
)
@settings(deadline=None, max_examples=100)
def test_order_texts_round_trip(
    stages: int, microbatches: int, picks: list[tuple[float, float, ActionKind]]
) -> None:
    actions = [
        Action(min(int(s * stages), stages - 1), kind, min(int(i * microbatches), microbatches - 1))
        for s, i, kind in picks
    ]
    codes = np.array([action.encode(microbatches) for action in actions], dtype=np.int64)
    texts = order_texts(codes, num_microbatches=microbatches)
    assert texts == [str(action) for action in actions]
    assert np.array_equal(parse_order(texts, num_stages=stages, num_microbatches=microbatches), codes)


@given(st.lists(st.text("0123FIWB, -x", max_size=5), max_size=5))
@settings(deadline=None, max_examples=300)
def test_the_fast_parser_agrees_with_the_plain_one(texts: list[str]) -> None:
    try:
        expected = [Action.parse(text) for text in texts]
        if any(a.stage >= 50 or a.microbatch >= 50 for a in expected):
            raise PlanError("range")
    except PlanError:
        with pytest.raises(PlanError, match=r"^\["):
            parse_order(texts, num_stages=50, num_microbatches=50)
    else:
        codes = parse_order(texts, num_stages=50, num_microbatches=50)
        assert [Action.decode(int(code), 50) for code in codes] == expected


@given(
    devices=st.integers(1, 6),
    microbatches=st.integers(1, 10),
    family=st.none() | st.dictionaries(st.text(max_size=5), st.floats(-10, 10) | st.lists(st.integers())),
    copies=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_schedules_round_trip(
    devices: int, microbatches: int, family: dict[str, Any] | None, copies: bool
) -> None:
    schedule = schedule_of(one_f_one_b(devices, microbatches), microbatches)
    if family is not None:
        schedule = replace(schedule, origin={"family": family})
    if copies:
        routes = (schedule.placement, tuple(reversed(schedule.placement)))
        schedule = replace(schedule, routes=routes, route_of_microbatch=(1,) * microbatches)
    back = schedule_from_json(json.loads(json.dumps(schedule_to_json(schedule))))
    assert same_schedule(back, schedule)
    assert back.origin == schedule.origin
    assert back.routes == schedule.routes


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**400, -0.0, "0F0", "1B2", 65_536, 4_096]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("name", ["schedule_costs.json", "schedule_v.json", "schedule_two_copies.json"])
@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_any_value_anywhere_is_taken_or_refused_in_one_line(name: str, data: st.DataObject) -> None:
    """Nothing but a ConfigError leaves the readers, whatever stands where."""
    value = read_json(GOLDEN / name)
    place, key = value, data.draw(st.sampled_from(sorted(value)))
    while isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
        place = place[key]
        keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
    place[key] = data.draw(json_values)
    try:
        if "layers" in value:
            costs_from_json(value)
        else:
            schedule_from_json(value)
    except ConfigError as error:
        text = str(error)
        assert text.splitlines() == [text]
        assert len(text) < 400


@pytest.mark.parametrize(
    ("origin", "written"),
    [
        ({"name": "interleaved", "group": 8}, {"name": "interleaved"}),
        ({"family": {"slack": 1.0}}, {"family": {"slack": 1.0}}),
        ({"name": "zb-v", "inserted": True}, {"family": {"start": "zb-v", "inserted": True}}),
        ({"family": {"slack": 1.0}, "inserted": True}, {"family": {"slack": 1.0, "inserted": True}}),
    ],
)
def test_a_changed_order_does_not_keep_its_name(origin: dict[str, Any], written: dict[str, Any]) -> None:
    value = schedule_to_json(replace(v_schedule(), origin=origin))
    assert value["origin"] == written
    assert schedule_from_json(value).origin == written
