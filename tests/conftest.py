"""In what order test files run, and what the collector of garbage looks at, in every process of pytest."""

import gc

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a time limit of their own come first: one that begins last lets the other processes wait."""
    long = {item.path for item in items if item.get_closest_marker("timeout") is not None}
    items.sort(key=lambda item: item.path not in long)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Modules and test items live to the end: without this, every full collection would go through them."""
    gc.collect()
    gc.freeze()
