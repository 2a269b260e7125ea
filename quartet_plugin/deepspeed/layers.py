"""The layers of a PipelineModule as a plan counts them: what comes before, the like layers, what comes after.

A plan's split counts transformer layers. In a list of layer specifications these are the ones of the type
that repeats most; what lies before the first belongs to stage 0, what lies behind the last to the last stage,
and what lies between two to the earlier one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from quartet_plugin.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerList:
    """`blocks[i]` is where like layer i begins among `num_entries` layer specifications."""

    num_entries: int
    blocks: tuple[int, ...]

    def bounds(self, layers_per_stage: Sequence[int]) -> tuple[int, ...]:
        """Entry boundaries, one more than stages, of a split that counts like layers.

        Raises PlanError for counts that do not cover the layers, or leave a stage without any entry.
        """
        num_stages = len(layers_per_stage)
        if num_stages > self.num_entries:
            raise PlanError(
                f"split: {num_stages} stages; the model has {self.num_entries} layers, the ends included: "
                "use fewer stages"
            )
        if sum(layers_per_stage) != len(self.blocks):
            raise PlanError(
                f"split: {list(layers_per_stage)} sums to {sum(layers_per_stage)}; "
                f"the model has {len(self.blocks)} layers"
            )
        edges, done = [0], 0
        for count in list(layers_per_stage)[:-1]:
            done += count
            edges.append(self.blocks[done] if done < len(self.blocks) else self._after())
        edges.append(self.num_entries)
        if any(low >= high for low, high in pairwise(edges)):
            raise PlanError(
                f"split: {list(layers_per_stage)} leaves a stage of {self.num_entries} layers without any; "
                "use fewer stages"
            )
        return tuple(edges)

    def counts(self, bounds: Sequence[int]) -> tuple[int, ...]:
        """The like layers of each stage between `bounds`: undoes `bounds` where a split can say it."""
        return tuple(sum(int(low <= block < high) for block in self.blocks) for low, high in pairwise(bounds))

    def counts_of_entries(self, entries_per_stage: Sequence[int]) -> tuple[int, ...]:
        """Like layers a stage from a schedule file's counts, where embedding and head are entries too."""
        counts = list(entries_per_stage)
        if sum(counts) == len(self.blocks) + self.has_first + self.has_last:
            counts[0] -= self.has_first
            counts[-1] -= self.has_last
        return tuple(counts)

    @property
    def has_first(self) -> bool:
        """Whether an entry lies before the like layers, so that the first stage may do without these."""
        return self.blocks[0] > 0

    @property
    def has_last(self) -> bool:
        """Whether an entry lies behind the like layers, so that the last stage may do without these."""
        return self._after() < self.num_entries

    def _after(self) -> int:
        """The index of the first entry behind the like layers."""
        return self.blocks[-1] + 1


def layer_list(specs: Sequence[Any]) -> LayerList:
    """Find the like layers among the entries of `PipelineModule(layers=...)`.

    Where no type repeats in most of the list, every entry is a layer of its own.
    """
    if not specs:
        raise PlanError("the PipelineModule has no layers")
    names = [type_of(spec) for spec in specs]
    name, count = Counter(names).most_common(1)[0]
    blocks = tuple(index for index, other in enumerate(names) if other == name)
    between = blocks[-1] + 1 - blocks[0] - count
    if count < 2 or between > count:
        return LayerList(num_entries=len(specs), blocks=tuple(range(len(specs))))
    return LayerList(num_entries=len(specs), blocks=blocks)


def type_of(spec: Any) -> str:
    """The type that an entry builds, by its name: entries are specifications, modules or functions."""
    typename = getattr(spec, "typename", None)
    if typename is not None:
        return f"{typename.__module__}.{typename.__qualname__}"
    name = getattr(spec, "__qualname__", None)
    return str(name) if name is not None else f"{type(spec).__module__}.{type(spec).__qualname__}"
