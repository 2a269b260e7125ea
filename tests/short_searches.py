"""Short searches of orders and of the next plan: for tests of what a space holds, or of what a tuner does.

A search of an order takes half a second, and a space has dozens; a study of these tests has as many
proposals. How good orders and proposals are is tested in `tests/schedule` and `tests/planner`, in the files
here that say FULL_SEARCHES (but for their tests that use `brief_searches`), and by the tests that use
`full_searches`. Many studies of these tests ask for the same orders, so a process keeps each: a search
depends on its arguments alone, as `tests/schedule` tests.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from quartet_plugin.model.costs import Costs
from quartet_plugin.planner import best_moves, calibrated_orders, candidate_plans, order_search
from quartet_plugin.space import schedules


@pytest.fixture(scope="module", autouse=True)
def short_searches(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let this file's spaces search an order for a twentieth of a second, and its studies fewer plans.

    No other file sees such orders.
    """
    if getattr(request.module, "FULL_SEARCHES", False):
        yield
        return
    with shortened():
        yield


@pytest.fixture
def brief_searches(short_searches: None) -> Iterator[None]:
    """The same for one test of a file with FULL_SEARCHES."""
    with shortened():
        yield


@pytest.fixture
def full_searches(short_searches: None) -> Iterator[None]:
    """Let this test's spaces and studies search as the product does."""
    with _put(_FULL):
        yield


def shortened() -> AbstractContextManager[None]:
    """The same for a process that a test starts."""
    return _put(_SHORT)


@contextmanager
def _put(values: dict[tuple[Any, str], Any]) -> Iterator[None]:
    schedules.custom_order.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), value in values.items():
            patch.setattr(module, name, value)
        yield
    schedules.custom_order.cache_clear()


def _kept(search: Callable[..., Any]) -> Callable[..., Any]:
    """The search, whose orders are kept until this process ends."""
    orders: dict[object, Any] = {}

    def kept(costs: Costs, placement: Sequence[int], **options: Any) -> Any:
        key = (_key_of(costs), tuple(placement), *sorted(options.items()))
        if key not in orders:
            orders[key] = search(costs, placement, **options)
        return orders[key]

    return kept


def _key_of(costs: Costs) -> tuple[object, ...]:
    values = (getattr(costs, field.name) for field in fields(costs))
    return tuple(value.tobytes() if isinstance(value, np.ndarray) else value for value in values)


# Of a proposal the limits are a third of the product's, or a quarter.
_SHORT: dict[tuple[Any, str], Any] = {
    (schedules, "_MAX_EVALUATIONS"): 200,
    (schedules, "_searched"): _kept(schedules._searched),
    (calibrated_orders, "best_order"): _kept(order_search.best_order),
    (candidate_plans, "MAX_OPENED"): 12,
    (candidate_plans, "MAX_CHOICES"): 1200,
    (candidate_plans, "MAX_CUSTOM_LAYOUTS"): 1,
    (candidate_plans, "MAX_ORDERED"): 1,
    (best_moves, "NUM_FIRST"): 4,
}
_FULL = {(module, name): getattr(module, name) for module, name in _SHORT}
