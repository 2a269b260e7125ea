"""Optimizer state that Megatron cuts out of padded buckets: saved with the repair, it resumes anywhere."""

import ast
from types import SimpleNamespace
from typing import Any

import pytest

from quartet_plugin.megatron import optimizer_state
from quartet_plugin.megatron.seams import package_roots
from quartet_plugin.megatron.seams.declared import OPTIMIZER_STATE
from quartet_plugin.rank.source_tree import SourceTree

# Elements of each bucket, and those of them that are weights.
BUCKETS = ((8, 6), (16, 13), (8, 8))
# Weights' places in the buffer, padding counted, and their buckets.
PLACES = {"a": (0, 2, 0), "b": (2, 6, 0), "c": (8, 21, 1), "d": (24, 32, 2)}


def places_with(function: Any) -> dict[str, tuple[int, int, int]]:
    """The places that Megatron's function sees under the repair."""
    buckets = [
        SimpleNamespace(grad_data=SimpleNamespace(numel=lambda size=size: size), numel_unpadded=unpadded)
        for size, unpadded in BUCKETS
    ]
    buffer = SimpleNamespace(buckets=buckets, param_index_map=dict(PLACES))
    wrapped = optimizer_state._with_right_places(function)
    seen = wrapped(SimpleNamespace(buffers=[buffer]))
    assert buffer.param_index_map == PLACES
    return seen  # type: ignore[no-any-return]


def test_weights_lie_among_the_contents_of_the_buckets() -> None:
    def faulty(optimizer: Any) -> Any:
        if not optimizer.buffers:
            optimizer.functional.pad()
        return optimizer.buffers[0].param_index_map

    assert places_with(faulty) == {"a": (0, 2, 0), "b": (2, 6, 0), "c": (6, 19, 1), "d": (19, 27, 2)}


def test_a_function_that_is_mended_is_left_as_it_is() -> None:
    def mended(optimizer: Any) -> Any:
        return optimizer.buffers[0].param_index_map

    assert places_with(mended) == PLACES


def test_the_installed_megatron_is_repaired() -> None:
    """Who installs a release that has it mended takes this test out, and the repair with the last such."""
    definition = SourceTree(package_roots()).definition(OPTIMIZER_STATE.module, OPTIMIZER_STATE.name)
    assert definition is not None
    assert optimizer_state.fills_with_zeros(ast.unparse(definition))


def test_a_megatron_without_such_state_has_no_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_state, "has_known_parameters", lambda *_: True)
    monkeypatch.setattr(optimizer_state, "known_function", lambda _: None)
    assert optimizer_state.wrappers() == {}
