"""Words are found and taken out exactly as argparse itself would read them."""

import argparse
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import PlanError
from quartet_plugin.megatron.arguments import Flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option of each kind that Megatron's parser has."""
    parser.add_argument("--one", type=int, default=1)
    parser.add_argument("--text", "--other-text", default=None)
    parser.add_argument("--two", nargs=2, default=None)
    parser.add_argument("--maybe", nargs="?", const="bare", default=None)
    parser.add_argument("--any", nargs="*", default=[])
    parser.add_argument("--some", nargs="+", default=None)
    parser.add_argument("--on", action="store_true")
    parser.add_argument("--no-off", action="store_false", dest="off")
    parser.add_argument("--both", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("-s", dest="short", default=None)
    parser.add_argument("--needed", required=True)


FLAGS = Flags(add_arguments)
DESTS = ("one", "text", "two", "maybe", "any", "some", "on", "off", "both", "short", "needed")
VALUES = st.sampled_from(["a", "1", "-3", "-0.5", "with space", "-with space", "x=y", "", "a|b", "Ettt|tL"])


def occurrence(flag: str, num_values: st.SearchStrategy[int], *, joined: bool = False) -> Any:
    many = num_values.flatmap(lambda n: st.lists(VALUES, min_size=n, max_size=n)).map(lambda v: [flag, *v])
    return st.one_of(many, VALUES.map(lambda v: [f"{flag}={v}"])) if joined else many


OCCURRENCES = st.one_of(
    st.integers(-9, 9).map(lambda n: ["--one", str(n)]),
    st.integers(-9, 9).map(lambda n: [f"--one={n}"]),
    occurrence("--text", st.just(1), joined=True),
    occurrence("--other-text", st.just(1), joined=True),
    occurrence("--two", st.just(2)),
    occurrence("--maybe", st.integers(0, 1), joined=True),
    occurrence("--any", st.integers(0, 3)),
    occurrence("--some", st.integers(1, 3)),
    occurrence("-s", st.just(1)),
    st.sampled_from([["--on"], ["--no-off"], ["--both"], ["--no-both"]]),
    # The script's own, unknown here, some with values.
    st.sampled_from([["--mine"], ["--mine", "7"], ["--mine=a_b"], ["--mine", "x", "y"], ["--onex"]]),
)
COMMANDS = st.lists(OCCURRENCES, max_size=8).map(lambda items: [word for item in items for word in item])


@settings(deadline=None, max_examples=300)
@given(
    words=COMMANDS, remove=st.sets(st.sampled_from(DESTS)), tail=st.sampled_from([[], ["--", "--one", "5"]])
)
def test_removed_flags_are_gone_and_nothing_else(words: list[str], remove: set[str], tail: list[str]) -> None:
    before = FLAGS.explicit_values(words)
    edited, taken = FLAGS.edit([*words, *tail], remove=remove, append=[])
    assert FLAGS.explicit_values(edited) == {
        name: value for name, value in before.items() if name not in remove
    }
    assert {item.dest for item in taken} == remove & set(before)
    left = [word for word in words if word.startswith(("--mine", "--onex"))]
    assert [word for word in edited if word.startswith(("--mine", "--onex"))] == left
    assert edited[len(edited) - len(tail) :] == tail


def test_an_unknown_word_with_a_space_is_a_value_as_argparse_has_it() -> None:
    words = ["--any", "--mine=a b", "--on"]
    assert FLAGS.explicit_values(words) == {"any": ["--mine=a b"], "on": True}
    assert FLAGS.edit(words, remove={"any"}, append=[])[0] == ["--on"]
    assert FLAGS.edit(words, remove={"on"}, append=[])[0] == ["--any", "--mine=a b"]


@settings(deadline=None, max_examples=200)
@given(words=COMMANDS, values=st.dictionaries(st.sampled_from(["one", "text"]), st.integers(0, 99)))
def test_set_flags_win_once(words: list[str], values: dict[str, int]) -> None:
    edited, _ = FLAGS.edit(words, remove=set(values), append=FLAGS.words_for(values))
    found = FLAGS.explicit_values(edited)
    for name, value in values.items():
        assert found[name] == (value if name == "one" else str(value))
        assert (
            sum(word.startswith((f"--{name}", "--other-text")) for word in edited if "mine" not in word) >= 1
        )
    others = {name: value for name, value in FLAGS.explicit_values(words).items() if name not in values}
    assert {name: value for name, value in found.items() if name not in values} == others


@settings(deadline=None, max_examples=200)
@given(words=COMMANDS)
def test_every_given_flag_is_located(words: list[str]) -> None:
    found = FLAGS.occurrences(words)
    assert {item.dest for item in found} == set(FLAGS.explicit_values(words))
    assert all(words[item.start].partition("=")[0] == item.flag for item in found)
    assert all(a.stop <= b.start for a, b in itertools.pairwise(found))


def test_values_have_the_defaults() -> None:
    values = FLAGS.values(["--on", "--one", "4"])
    assert (values.on, values.off, values.one, values.text, values.any) == (True, True, 4, None, [])


def test_switches_have_the_right_spelling() -> None:
    words = FLAGS.words_for({"on": True, "off": False, "both": False, "one": 3, "text": "a|b"})
    assert words == ["--on", "--no-off", "--no-both", "--one", "3", "--text", "a|b"]
    assert FLAGS.words_for({"both": True}) == ["--both"]
    with pytest.raises(PlanError, match="on"):
        FLAGS.words_for({"on": False})


def test_value_that_megatron_refuses_ends_as_argparse_ends() -> None:
    with pytest.raises(SystemExit) as raised:
        FLAGS.explicit_values(["--one", "many"])
    assert raised.value.code == 2
