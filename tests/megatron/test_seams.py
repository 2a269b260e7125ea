"""Seams: all checked before any is touched, and exactly taken back."""

import ast
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quartet_plugin.errors import SeamError
from quartet_plugin.megatron.seams import (
    Seam,
    install,
    installed_version,
    known_function,
    locate,
    package_roots,
    resolve,
)
from quartet_plugin.megatron.seams.declared import ARGUMENTS, TOKENIZER, TRAIN_STEP
from quartet_plugin.rank.seams import source_hash, stale_refs
from quartet_plugin.rank.source_tree import KnownFunction, find_definition, node_hash

NAME = "quartet_test_framework"
SOURCE = '''
import functools

def one(a, b=0):
    """Adds."""
    return a + b

def two():
    return one(1)

def trace(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)
    return inner

@trace
def traced(a):
    return a

class Box:
    def __init__(self, size):
        self.size = one(size)

    @staticmethod
    @functools.lru_cache()
    def make(size):
        """A box."""
        return Box(size)
'''


def declared(name: str, *parameters: str, source: str = SOURCE, **changes: Any) -> Seam:
    """A seam of the framework below, with the hash of its source."""
    definition = find_definition(ast.parse(source), name)
    assert definition is not None
    return Seam(
        module=NAME,
        name=name,
        known={"1.0": KnownFunction(parameters=" ".join(parameters), source=node_hash(definition))},
        **changes,
    )


ONE, TWO = declared("one", "a", "b"), declared("two")
INIT = declared("Box.__init__", "self", "size")
MAKE = declared("Box.make", "size")
BOX = declared("Box")


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module with functions that call each other through the module, and a class."""
    (tmp_path / f"{NAME}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(NAME)
    del sys.modules[NAME]


def doubled(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: 2 * original(*args)


def test_wraps_and_takes_back(framework: Any) -> None:
    one, two = framework.one, framework.two
    installation = install({ONE: doubled, TWO: doubled})
    assert framework.two() == 4
    installation.uninstall()
    assert (framework.one, framework.two) == (one, two)
    assert framework.two() == 1


def test_nothing_is_touched_when_one_does_not_fit(framework: Any) -> None:
    one = framework.one
    with pytest.raises(SeamError, match="three: not in megatron-core"):
        install({ONE: doubled, replace(TWO, name="three"): doubled})
    assert framework.one is one


def test_other_parameters_are_named(framework: Any) -> None:
    changed = replace(TWO, known={"1.0": KnownFunction(parameters="was so", source="0" * 16)})
    with pytest.raises(SeamError, match=r"two: takes \(\) in megatron-core [\d.]+, \(was, so\) in supp"):
        resolve(changed)
    assert locate(changed)[1] is framework.two


def test_a_release_without_the_function_may_be_known(framework: Any) -> None:
    absent = replace(TWO, name="three", known={"0.9": None, **TWO.known})
    assert absent.source_fault(known_function(absent)) is None
    assert replace(absent, known=TWO.known).source_fault(None) is not None


def test_a_source_that_was_never_tried_is_known_for_its_parameters_alone(framework: Any) -> None:
    untried = replace(
        ONE, known={name: replace(known, is_tried=False) for name, known in ONE.known.items() if known}
    )
    assert untried.parameters_fault(known_function(untried)) is None
    with pytest.raises(SeamError, match="one: source differs"):
        resolve(untried)


def test_other_plugins_are_named(framework: Any) -> None:
    install({ONE: doubled})
    with pytest.raises(SeamError, match=r"already replaced by tests\.megatron\.test_seams"):
        resolve(ONE)


def test_later_wrappers_must_go_first(framework: Any) -> None:
    installation = install({ONE: doubled})
    framework.one = doubled(framework.one)
    with pytest.raises(SeamError, match="changed after quartet replaced it"):
        installation.uninstall()


def test_missing_function_and_module(framework: Any) -> None:
    for name in ("three", "Box.three", "one.three"):
        with pytest.raises(SeamError, match=rf"{name}: not in megatron-core \d"):
            resolve(replace(ONE, name=name))
    with pytest.raises(SeamError, match="cannot be imported"):
        resolve(replace(ONE, module="quartet_no_such_module"))


def test_methods_and_classes_are_replaced_where_they_are(framework: Any) -> None:
    box, init, made = framework.Box, framework.Box.__init__, vars(framework.Box)["make"]
    installation = install(
        {INIT: lambda original: lambda self, size: original(self, size + 10), MAKE: doubled_size}
    )
    assert framework.Box(1).size == 11
    assert framework.Box.make(2).size == 14
    installation.uninstall()
    assert (framework.Box.__init__, vars(framework.Box)["make"]) == (init, made)
    installation = install({BOX: lambda original: type("Other", (), {"was": original})})
    assert framework.Box is not box
    installation.uninstall()
    assert framework.Box is box


def doubled_size(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda size: original(2 * size)


def test_another_source_is_refused_with_the_release(framework: Any) -> None:
    for seam in (ONE, INIT, MAKE, BOX):
        resolve(seam)
        known = seam.known["1.0"]
        assert known is not None
        other = replace(seam, known={"1.0": replace(known, source="0" * 16)})
        with pytest.raises(SeamError, match=rf"{seam.name}: source differs in megatron-core \d"):
            resolve(other)


def test_a_decorator_of_somebody_elses_is_seen(framework: Any) -> None:
    framework.Box.make = staticmethod(functools.lru_cache(wrapped(vars(framework.Box)["make"].__func__)))
    with pytest.raises(SeamError, match=r"Box\.make: already replaced by tests\.megatron\.test_seams"):
        resolve(MAKE)
    framework.one = wrapped(framework.one)
    with pytest.raises(SeamError, match=r"one: already replaced by tests\.megatron\.test_seams"):
        resolve(ONE)


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


def test_a_patch_of_an_alias_alone_is_seen(framework: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    user = ModuleType("quartet_test_user")
    monkeypatch.setitem(sys.modules, user.__name__, user)
    seam = replace(ONE, aliases=(user.__name__, "quartet_not_loaded"))
    user.one = framework.one  # type: ignore[attr-defined]
    install({seam: doubled}).uninstall()
    user.one = doubled(framework.one)  # type: ignore[attr-defined]
    with pytest.raises(SeamError, match=r"quartet_test_user\.one: already replaced by tests\.megatron"):
        install({seam: doubled})


@pytest.mark.parametrize(
    "keep",
    [
        lambda one: {"key": one},
        lambda one: [one],
        lambda one: functools.partial(one, 1),
        lambda one: lambda function=one: function,
        lambda one: type("Keeper", (), {"one": staticmethod(one), "__module__": "quartet_test_user"}),
    ],
)
def test_what_keeps_an_original_is_found_and_nothing_stays_replaced(
    keep: Callable[[Any], Any], framework: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = ModuleType("quartet_test_user")
    monkeypatch.setitem(sys.modules, user.__name__, user)
    one = framework.one
    user.kept = keep(one)  # type: ignore[attr-defined]
    with pytest.raises(SeamError, match=r"one: quartet_test_user\.kept.* still refers to Megatron's "):
        install({ONE: doubled})
    assert framework.one is one
    assert {place.split(".")[0] for _, place in stale_refs([one])} == {NAME, user.__name__}


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        (("Adds.", "Subtracts."), True),
        (("    return a + b", "\n    # Sum.\n    return (a + b)"), True),
        (("a + b", "a - b"), False),
        (("b=0", "b=1"), False),
        (("def one", "@functools.lru_cache()\n@functools.cache\ndef one"), True),
    ],
)
def test_what_runs_is_what_counts(change: tuple[str, str], is_same: bool) -> None:
    other = declared("one", "a", "b", source=SOURCE.replace(*change))
    assert (other.known == ONE.known) is is_same


def test_a_loaded_definition_has_the_hash_of_its_file(framework: Any) -> None:
    for seam, loaded in (
        (ONE, framework.one),
        (INIT, framework.Box.__init__),
        (MAKE, framework.Box.make.__wrapped__),
        (BOX, framework.Box),
    ):
        known = seam.known["1.0"]
        assert known is not None
        assert source_hash(loaded) == known.source
    assert find_definition(ast.parse(SOURCE), "Box.nothing") is None


@pytest.mark.parametrize("seam", [ARGUMENTS, TOKENIZER, TRAIN_STEP])
def test_installed_megatron_has_the_seam(seam: Seam) -> None:
    module, function = resolve(seam)
    assert getattr(module, seam.name) is function


def test_version_is_read_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import package_info

    assert installed_version() == package_info.__version__.partition("+")[0]
    source = tmp_path / "megatron" / "core" / "package_info.py"
    source.parent.mkdir(parents=True)
    source.write_text("MAJOR = 0\nMINOR = 20\nPATCH = 1\nPRE_RELEASE = 'rc1'\nraise SystemExit\n")
    monkeypatch.delitem(sys.modules, "megatron")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_version() == "0.20.1rc1"
    assert package_roots()[0] == tmp_path


def test_a_decorator_of_the_framework_changes_nothing(framework: Any) -> None:
    traced = declared("traced", "a")
    assert resolve(traced)[1] is framework.traced
    assert framework.traced.__wrapped__ is not None
