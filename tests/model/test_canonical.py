"""Canonical JSON: one text for one value, and its digest."""

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.canonical import canonical_json, digest

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('abé\n"', max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


def test_the_text() -> None:
    assert canonical_json({"b": [1, 2.5, "é"], "a": {"d": None, "c": True}}) == (
        '{"a":{"c":true,"d":null},"b":[1,2.5,"é"]}'
    )


@given(values)
@settings(deadline=None, max_examples=100)
def test_round_trip(value: Any) -> None:
    text = canonical_json(value)
    assert json.loads(text) == value
    assert canonical_json(json.loads(text)) == text


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(), min_size=2))
@settings(deadline=None, max_examples=50)
def test_the_order_of_keys_does_not_matter(value: dict[str, int]) -> None:
    assert canonical_json(dict(reversed(value.items()))) == canonical_json(value)


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        {"a": [float("-inf")]},
        {1: 2},
        {"a": {None: 1}},
        [{2.5: 1}],
        {1, 2},
        b"x",
        "\ud800",
    ],
    ids=repr,
)
def test_what_has_no_canonical_text(value: Any) -> None:
    with pytest.raises(ConfigError, match="canonical JSON"):
        canonical_json(value)


def test_a_value_that_holds_itself() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ConfigError, match="canonical JSON"):
        canonical_json(value)


def test_the_digest_leaves_itself_out() -> None:
    value = {"a": 1, "é": [2]}
    expected = hashlib.sha256('{"a":1,"é":[2]}'.encode()).hexdigest()
    assert digest(value) == expected
    assert digest(value | {"digest": "anything"}) == expected
    assert digest(value | {"a": 2}) != expected
    assert digest({"a": {"digest": 1}}) != digest({"a": {"digest": 2}})
