"""Named schedules as candidates: every one that fits, with the same search of the split."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quartet_plugin.schedule.named import NAMED, named, refusal_of
from quartet_plugin.schedule.placement import Placement
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.search.climb import TOO_LARGE, climb_split
from quartet_plugin.schedule.search.problem import ScheduleProblem
from quartet_plugin.schedule.simulate import flatten
from quartet_plugin.split.entries import Entries


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedStart:
    """A named schedule with a split; `score` in seconds, inf if not known, 1e30 or more if unfit."""

    schedule: Schedule
    split: Entries
    score: float = math.inf

    @property
    def fits(self) -> bool:
        """Whether it runs and fits the memory limit."""
        return self.score < TOO_LARGE

    @property
    def order(self) -> Schedule:
        """The schedule with its split."""
        return replace(self.schedule, layers_per_stage=self.split)

    @property
    def label(self) -> str:
        """The name, with chunks and group where it has them."""
        origin = self.schedule.origin
        chunks = self.schedule.num_stages // self.schedule.num_devices
        text = str(origin["name"]) + (f" v{chunks}" if chunks > 2 else "")
        return text + (f" g{origin['group']}" if "group" in origin else "")

    def climb(self, problem: ScheduleProblem, *, steps: int, seed: int) -> "NamedStart":
        """The same schedule with its score after `steps` random moves of layers."""
        counts = np.array(self.split, dtype=np.int64)
        score = climb_split(
            *flatten(self.schedule),
            counts,
            problem.least_counts(len(counts)),
            problem.costs_under(self.schedule.placement),
            steps,
            seed,
        )
        return replace(self, split=tuple(counts.tolist()), score=float(score))


def named_schedules(
    placements: Sequence[Placement], *, num_devices: int, num_microbatches: int, with_pairs: bool = False
) -> Iterator[Schedule]:
    """Every executable named schedule on one of `placements`.

    Interleaved ones with several groups, or `with_pairs` each with its overlapped pairs and its usual group.
    """
    by_chunks = sorted({len(placement) // num_devices for placement in placements})
    groups = sorted({min(g, num_microbatches) for g in (num_devices, 2 * num_devices)})
    for name, spec in NAMED.items():
        if not spec.executable or (with_pairs and spec.make_paired is None):
            continue
        for chunks in by_chunks:
            for group in groups if spec.has_group and not with_pairs else [None]:
                sizes: dict[str, Any] = {
                    "num_devices": num_devices,
                    "num_microbatches": num_microbatches,
                    "num_chunks": chunks,
                    "group": group,
                }
                if refusal_of(name, **sizes) is not None:
                    continue
                schedule = named(name, **sizes, with_pairs=with_pairs)
                if schedule.placement in placements:
                    yield schedule
