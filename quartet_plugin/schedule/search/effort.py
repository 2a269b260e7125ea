"""The budget of a schedule search, and the rounds that it is spent in.

Everything that a search does is a fixed sequence of rounds, whatever the budget: the budget only says where
the sequence ends. A search with more evaluations or more seconds therefore does all that a shorter one did.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

# The evaluations of the first round, and the factor from one round to the next. A limit cuts off at most
# one round.
FIRST_ROUND = 64.0
GROWTH = 1.15


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def never_stop() -> None:
    """Do nothing: the check of a search that nobody stops."""


_CHECK_STOP: ContextVar[Callable[[], None]] = ContextVar("check_stop", default=never_stop)


@contextmanager
def stopped_by(check_stop: Callable[[], None]) -> Iterator[None]:
    """Let searches in the block, on this thread, call `check_stop` between tasks of a tenth of a second.

    What it raises ends the search without a result.
    """
    token = _CHECK_STOP.set(check_stop)
    try:
        yield
    finally:
        _CHECK_STOP.reset(token)


def stop_check() -> Callable[[], None]:
    """The check of the innermost `stopped_by` around the caller."""
    return _CHECK_STOP.get()


class OutOfTimeError(Exception):
    """The time limit has passed in the middle of a round."""


@dataclass(slots=True, kw_only=True)
class Effort:
    """A search's budget, in seconds or in evaluations, and what is used of it.

    Compilations are not counted: `compiling` tells their seconds. `goal_s` is a proven lower bound of the
    score, 0 for none; the search ends where it is reached. `check_stop` raises where the caller ends it.
    `has_result`: there is an order to return. `is_cut`: the time limit has ended the search.
    """

    clock: Callable[[], float]
    started_s: float
    time_limit_s: float | None
    evaluations: int | None
    goal_s: float = 0.0
    compiling: Callable[[], float] = float
    check_stop: Callable[[], None] = never_stop
    used: int = 0
    is_met: bool = False
    has_result: bool = False
    is_cut: bool = False

    def reached(self, score: float) -> None:
        """Tell that `score` is reached; nothing is left to do if that is the bound."""
        self.is_met = self.is_met or score <= self.goal_s * (1 + 1e-9)

    @property
    def left_s(self) -> float:
        """Seconds before the limit; inf where evaluations count."""
        return math.inf if self.time_limit_s is None else self.time_limit_s - self.elapsed_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start, but for compilations."""
        return self.clock() - self.started_s - self.compiling()

    def allows(self, evaluations: float) -> bool:
        """Whether the budget has room for a round of `evaluations`, and the goal is not reached."""
        if self.is_met or (self.evaluations is not None and self.used + evaluations > self.evaluations):
            return False
        return not self._record_cut()

    def check(self) -> None:
        """Call `check_stop`; raise OutOfTimeError once the time limit has passed and there is a result."""
        self.check_stop()
        if self.has_result and self._record_cut():
            raise OutOfTimeError

    def _record_cut(self) -> bool:
        """Record in `is_cut` whether the time limit has passed, and return it."""
        self.is_cut = self.left_s <= 0
        return self.is_cut
