"""Every plan of a space, by making every choice in turn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quartet_plugin.model.plan import Plan
from quartet_plugin.space.param_sources import SPLIT_HEAD
from quartet_plugin.space.plan_space import Space
from quartet_plugin.space.split_shifts import SHIFT


@dataclass(slots=True)
class _Choice:
    at: int
    count: int


class _Walker:
    """Repeats the choices on its path, and takes the first of each that comes after.

    Layers are not shifted: the ends' weights lead to the splits by themselves.
    """

    def __init__(self, path: list[_Choice], *, embedding: Sequence[float], head: Sequence[float]) -> None:
        self._path = path
        self._embedding = embedding
        self._head = head
        self._depth = 0

    def category(self, name: str, choices: Sequence[str]) -> str:
        if name.startswith(SHIFT):
            return choices[0]
        return choices[self._next(len(choices))]

    def integer(self, name: str, low: int, high: int) -> int:
        del name
        return low + self._next(high - low + 1)

    def unit_float(self, name: str) -> float:
        weights = self._head if name == SPLIT_HEAD else self._embedding
        return weights[self._next(len(weights))]

    def attribute(self, name: str) -> None:
        del name

    def _next(self, count: int) -> int:
        if self._depth == len(self._path):
            self._path.append(_Choice(at=0, count=count))
        choice = self._path[self._depth]
        self._depth += 1
        return choice.at


def every_plan(space: Space, *, embedding: Sequence[float], head: Sequence[float]) -> dict[str, Plan]:
    """The plans by `key_of`; the weights of a pipeline's ends take the values that are given."""
    found: dict[str, Plan] = {}
    for plan in _walk(space, embedding=embedding, head=head):
        found.setdefault(key_of(plan), plan)
    return found


def _walk(space: Space, *, embedding: Sequence[float], head: Sequence[float]) -> Iterator[Plan]:
    path: list[_Choice] = []
    while True:
        yield space.decode(_Walker(path, embedding=embedding, head=head), trial=0)
        while path and path[-1].at + 1 == path[-1].count:
            path.pop()
        if not path:
            return
        path[-1].at += 1


def key_of(plan: Plan) -> str:
    """What a plan executes, in words: two plans with one key do the same, whatever they expect of it."""
    custom = plan.schedule.custom
    order = plan.schedule.label if custom is None or custom.named is not None else plan.key
    return " | ".join((plan.shape.label, plan.layout.label, plan.split.label, order, plan.mapping.label))
