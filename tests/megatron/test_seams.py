"""Seams: all checked before any is touched, and exactly taken back."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quartet_plugin.errors import SeamError
from quartet_plugin.megatron import seams
from quartet_plugin.megatron.seams import Seam, check_version, install, installed_version, resolve

ONE = Seam(module="quartet_test_framework", name="one", parameters=("a", "b"))
TWO = Seam(module="quartet_test_framework", name="two", parameters=())
SOURCE = "def one(a, b=0): return a + b\ndef two(): return one(1)\n"


@pytest.fixture
def framework() -> Iterator[Any]:
    """A module with two functions, one of which calls the other through the module."""
    module = ModuleType("quartet_test_framework")
    exec(SOURCE, module.__dict__)  # a framework of two functions
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


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
    changed = Seam(module=ONE.module, name="two", parameters=("was",))
    with pytest.raises(SeamError, match=r"two: takes \(\) here, \(was\) is known"):
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
    with pytest.raises(SeamError, match="not in this Megatron"):
        resolve(Seam(module=ONE.module, name="three", parameters=()))
    with pytest.raises(SeamError, match="cannot be imported"):
        resolve(Seam(module="quartet_no_such_module", name="three", parameters=()))


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
