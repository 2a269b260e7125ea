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
from quartet_plugin.megatron import seams
from quartet_plugin.megatron.seams import Seam, check_version, install, installed_version, resolve
from quartet_plugin.rank.seams import node_hash, source_hash, stale_refs
from tests.definitions import find_definition

NAME = "quartet_test_framework"
SOURCE = '''
import functools

def one(a, b=0):
    """Adds."""
    return a + b

def two():
    return one(1)

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
        parameters=" ".join(parameters),
        sources={"1.0": node_hash(definition)},
        **changes,
    )


ONE, TWO = declared("one", "a", "b"), declared("two")
INIT = declared("Box.__init__", "self", "size")
MAKE = declared("Box.make", "size", num_decorators=1)
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
    changed = replace(TWO, parameters="was")
    with pytest.raises(SeamError, match=r"two: takes \(\) in megatron-core [\d.]+, \(was\) is known"):
        install({ONE: doubled, changed: doubled})
    assert framework.one is one


def test_other_plugins_are_named(framework: Any) -> None:
    install({ONE: doubled})
    with pytest.raises(SeamError, match=r"already replaced by tests\.megatron\.test_seams"):
        resolve(ONE)


def test_later_wrappers_must_go_first(framework: Any) -> None:
    installation = install({ONE: doubled})
    framework.one = doubled(framework.one)
    with pytest.raises(SeamError, match="changed since"):
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
        other = replace(seam, sources={"1.0": "0" * 16})
        with pytest.raises(SeamError, match=rf"{seam.name}: its source is another one in megatron-core \d"):
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
    with pytest.raises(SeamError, match=r"one: quartet_test_user\.kept.* keeps Megatron's own \("):
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
    ],
)
def test_what_runs_is_what_counts(change: tuple[str, str], is_same: bool) -> None:
    other = declared("one", "a", "b", source=SOURCE.replace(*change))
    assert (other.sources == ONE.sources) is is_same


def test_a_loaded_definition_has_the_hash_of_its_file(framework: Any) -> None:
    for seam, loaded in (
        (ONE, framework.one),
        (INIT, framework.Box.__init__),
        (MAKE, framework.Box.make.__wrapped__),
        (BOX, framework.Box),
    ):
        assert {"1.0": source_hash(loaded)} == seam.sources
    assert find_definition(ast.parse(SOURCE), "Box.nothing") is None


@pytest.mark.parametrize("seam", [seams.ARGUMENTS, seams.TOKENIZER, seams.TRAIN_STEP])
def test_installed_megatron_has_the_seam(seam: Seam) -> None:
    module, function = resolve(seam)
    assert getattr(module, seam.name) is function


@pytest.mark.parametrize(
    ("version", "is_supported"),
    [("0.19.2", True), ("0.19.7", True), ("0.19.1", False), ("0.20.0rc0", False), ("0.16.1", False)],
)
def test_versions(version: str, is_supported: bool) -> None:
    if is_supported:
        assert check_version(version) == version
        return
    with pytest.raises(SeamError, match=r"not supported; install megatron-core >= 0.19.2"):
        check_version(version)


def test_version_is_read_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import package_info

    assert installed_version() == package_info.__version__.partition("+")[0]
    source = tmp_path / "megatron" / "core" / "package_info.py"
    source.parent.mkdir(parents=True)
    source.write_text("MAJOR = 0\nMINOR = 20\nPATCH = 1\nPRE_RELEASE = 'rc1'\nraise SystemExit\n")
    monkeypatch.delitem(sys.modules, "megatron")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SeamError, match=r"megatron-core 0\.20\.1rc1"):
        check_version()
