"""The order of test files, and less work for the garbage collector, in every process of pytest."""

import gc

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a time limit of their own run first: if one ran last, the other processes would be idle."""
    long = {item.path for item in items if item.get_closest_marker("timeout") is not None}
    items.sort(key=lambda item: item.path not in long)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave modules and test items, which live to the end, out of every later garbage collection."""
    gc.collect()
    gc.freeze()
