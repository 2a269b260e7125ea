"""Records from JSON: every rule of an annotation is held, and a refusal names field, value and rule."""

import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.schema import ADDED, Bounds, Length, Matches, Number, dump, parse, record

GOLDEN = Path(__file__).parents[1] / "golden"


@record
class Inner:
    """A record in a record."""

    size: Annotated[int, Bounds(ge=1, lt=10)]
    kind: Literal["small", "large"] = "small"


@record
class Outer:
    """Every kind of field."""

    schema_version: Literal[1] = 1
    name: Annotated[str, Length(least=1, most=5), Matches(pattern="[a-z]+")] = "x"
    is_on: bool = False
    seconds: float | None = None
    loss: Number = 0.0
    items: tuple[Inner, ...] = ()
    times: Annotated[tuple[Annotated[float, Bounds(gt=0, le=9)], ...], Length(most=3)] = ()
    words: tuple[Annotated[str, Length(most=3)], ...] = ()
    table: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    more: dict[str, Any] | None = field(default=None, metadata=ADDED)

    def __post_init__(self) -> None:
        if self.name == "no":
            raise ConfigError("name: 'no'; anything else")


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ([], "f: the file: []: must be a JSON object; this is a list"),
        ({"schema_version": 2}, "f: schema_version: 2: must be 1"),
        ({"schema_version": True}, "f: schema_version: True: must be 1"),
        ({"name": 1}, "f: name: 1: should be a valid string"),
        ({"name": ""}, "f: name: '': should have at least 1 characters, not 0"),
        ({"name": "abcdef"}, "f: name: 'abcdef': should have at most 5 characters, not 6"),
        ({"name": "a1"}, "f: name: 'a1': should match [a-z]+"),
        ({"name": "no"}, "f: name: 'no'; anything else"),
        ({"is_on": 1}, "f: is_on: 1: should be a valid boolean"),
        ({"seconds": "1"}, "f: seconds: '1': should be a valid number"),
        ({"seconds": True}, "f: seconds: True: should be a valid number"),
        ({"seconds": 10**400}, "should be a finite number"),
        ({"loss": "NaN"}, "f: loss: 'NaN': should be a valid number, or should be 'nan', 'inf' or '-inf'"),
        ({"items": {}}, "f: items: {}: should be a valid list"),
        ({"items": [{"size": 1}, {}]}, "f: items[1].size: missing; the key is required"),
        ({"items": [{"size": 1.0}]}, "f: items[0].size: 1.0: should be a valid integer"),
        ({"items": [{"size": 10}]}, "f: items[0].size: 10: should be less than 10"),
        ({"items": [{"size": 1, "kind": "huge"}]}, "f: items[0].kind: 'huge': should be 'small' or 'large'"),
        ({"items": [{"size": 1, "x": 5}]}, "f: items[0].x: 5: unknown key; remove it"),
        ({"items": [{"size": 1, "knd": 5}]}, "f: items[0].knd: 5: unknown key; did you mean kind?"),
        ({"times": [1.0, 0.0]}, "f: times[1]: 0.0: should be greater than 0"),
        ({"times": [1, 10]}, "f: times[1]: 10: should be less than or equal to 9"),
        ({"times": [float("nan")]}, "f: times[0]: nan: should be a finite number"),
        ({"times": [1, 2, 3, 4]}, "f: times: [1, 2, 3, 4]: should have at most 3 items, not 4"),
        ({"words": ["a", "abcd"]}, "f: words[1]: 'abcd': should have at most 3 characters, not 4"),
        ({"table": {"a": [1, "2"]}}, "f: table.a[1]: '2': should be a valid integer"),
    ],
)
def test_what_breaks_a_rule_is_refused_in_one_line(data: Any, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Outer, data, where="f")
    assert line in str(caught.value)


def test_values_are_read_and_written_back() -> None:
    data = {
        "schema_version": 1,
        "name": "abc",
        "is_on": True,
        "seconds": 2,
        "loss": "-inf",
        "items": [{"size": 3, "kind": "large"}],
        "times": [1, 2.5],
        "words": ["a"],
        "table": {"a": [1]},
    }
    outer = parse(Outer, data, where="f")
    assert outer.items == (Inner(size=3, kind="large"),)
    assert (type(outer.seconds), outer.times) == (float, (1.0, 2.5))
    assert parse(Outer, dump(outer), where="f") == outer
    assert "more" not in dump(outer), "a field that was added says nothing where it is None"
    assert dump(parse(Outer, {"more": {"a": None}}, where="f"))["more"] == {"a": None}


def test_long_rows_are_read_at_once() -> None:
    @record
    class Row:
        times: tuple[Annotated[float, Bounds(ge=0)], ...]

    times = [0.5] * 1_000_000
    begin = time.process_time()
    assert parse(Row, {"times": times}, where="f").times == tuple(times)
    assert time.process_time() - begin < 1.0


def test_a_training_process_reads_a_plan_without_pydantic() -> None:
    code = (
        "import importlib, pkgutil, sys\n"
        "from pathlib import Path\n"
        "import quartet_plugin.rank as rank, quartet_plugin.megatron.entry, quartet_plugin.megatron.apply\n"
        "import quartet_plugin.schedule.choice\n"
        "for module in pkgutil.iter_modules(rank.__path__, 'quartet_plugin.rank.'):\n"
        "    importlib.import_module(module.name)\n"
        "from quartet_plugin.model.plan import read_plan\n"
        f"for name in ('plan.json', 'plan_custom.json'): read_plan(Path({str(GOLDEN)!r}, name))\n"
        "print(sorted({'pydantic', 'pydantic_core', 'torch'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
