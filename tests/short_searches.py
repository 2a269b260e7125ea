"""Spaces whose searched orders are not as good as they could be: for tests of what a space holds.

A search of an order takes half a second, and a space has dozens. How good they are is tested in
`tests/schedule`, and in the files here that say FULL_SEARCHES.
"""

from collections.abc import Iterator

import pytest

from quartet_plugin.space import schedules

_EVALUATIONS = 200


@pytest.fixture(scope="module", autouse=True)
def short_searches(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let this file's spaces search an order for a twentieth of a second; no other file sees such orders."""
    if getattr(request.module, "FULL_SEARCHES", False):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        schedules.custom_order.cache_clear()
        patch.setattr(schedules, "_MAX_EVALUATIONS", _EVALUATIONS)
        yield
    schedules.custom_order.cache_clear()
