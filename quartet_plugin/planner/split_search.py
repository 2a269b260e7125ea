"""The best splits of a pipeline under the calibrated iteration model, for one mapping or for several.

The best split is proven where the iteration model simulates every action and the enumeration was not cut off:
see `split_kernel`. Where it extrapolates from fewer microbatches, bounds hold for what it extrapolates from.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quartet_plugin.cost.iteration.split_kernel import SplitArrays, evaluate
from quartet_plugin.cost.iteration.split_model import CalibratedSplits, SlotOrder, SplitTimes
from quartet_plugin.model.costs import IntArray
from quartet_plugin.model.plan import Mapping
from quartet_plugin.planner import split_kernel
from quartet_plugin.split.kinds import KindLoads, balanced_by_kinds

# Work of one search, after which it is cut off, and that of preparing one mapping, in simulated actions (some
# 40 nanoseconds each).
MAX_WORK = 200_000
WORK_OF_MAPPING = 4_000
# The best splits that one search returns; how many times as many are asked for where all are refused, and how
# many at most.
NUM_SPLITS = 5
MORE_SPLITS, MOST_SPLITS = 4, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSplit:
    """A split under a mapping, with its seconds an iteration as `SplitTimes` has them."""

    split: tuple[int, ...]
    mapping: Mapping
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitsFound:
    """The best of several mappings and splits; `work` in simulated actions.

    `num_cut_off` searches ended at their limit of work.
    """

    splits: tuple[FoundSplit, ...]
    work: int
    num_cut_off: int


def _any_split(split: tuple[int, ...], mapping: Mapping) -> bool:
    """No split is refused under any mapping."""
    del split, mapping
    return True


def best_splits(
    calibrated: CalibratedSplits,
    mappings: Sequence[tuple[SlotOrder, Mapping]],
    *,
    num_layers: int,
    incumbent_s: float = float("inf"),
    allowed: Sequence[tuple[int, ...]] | None = None,
    least_of_end_stages: tuple[int, int] = (0, 0),
    max_work: int = MAX_WORK,
    num_splits: int = NUM_SPLITS,
    may_have: Callable[[tuple[int, ...], Mapping], bool] = _any_split,
) -> SplitsFound:
    """The best splits of the mappings, the fastest first, without those proven no better than `incumbent_s`.

    Each mapping is given with the indices of its slots; those that take the same time count once. `allowed`
    are the splits to choose from, None for all. Those that a mapping may not have are left out, and rule out
    no slower ones.
    """
    first: dict[object, tuple[SlotOrder, Mapping]] = {}
    for slots, mapping in mappings:
        first.setdefault(calibrated.signature(slots), (slots, mapping))
    started: list[tuple[float, int, Pipeline, tuple[int, ...], Mapping]] = []
    for slots, mapping in first.values():
        times = calibrated.times(slots, mapping)
        start = balanced_split(times, num_layers, least_of_end_stages=least_of_end_stages)
        pipeline = Pipeline(times)
        started.append((pipeline.seconds(start), len(started), pipeline, start, mapping))
    timed_splits: list[FoundSplit] = []
    work, num_cut_off = WORK_OF_MAPPING * len(first), 0
    limit = incumbent_s
    for _, _, pipeline, start, mapping in sorted(started, key=lambda entry: entry[:2]):
        if allowed is not None:
            given = [split for split in allowed if may_have(split, mapping)]
            timed = sorted((pipeline.seconds(split), split) for split in given)[:num_splits]
            timed_splits += [
                FoundSplit(split=split, mapping=mapping, seconds=seconds)
                for seconds, split in timed
                if seconds < incumbent_s
            ]
            continue
        least, asked = least_layers(pipeline.times, least_of_end_stages), num_splits
        while True:
            done, splits = pipeline.search(
                start, least, incumbent_s=limit, max_work=max_work, num_splits=asked
            )
            work += abs(done)
            kept = [(split, seconds) for split, seconds in splits if may_have(split, mapping)]
            if kept or len(splits) < asked or asked >= MOST_SPLITS:
                break
            asked *= MORE_SPLITS
        num_cut_off += done < 0 or (not kept and len(splits) == asked)
        timed_splits += [FoundSplit(split=split, mapping=mapping, seconds=seconds) for split, seconds in kept]
        limit = min([limit, *(seconds for _, seconds in kept)])
    ranked = heapq.nsmallest(num_splits, timed_splits, key=lambda split: split.seconds)
    return SplitsFound(splits=tuple(ranked), work=work, num_cut_off=num_cut_off)


def least_layers(times: SplitTimes, least_of_end_stages: tuple[int, int]) -> IntArray:
    """The fewest layers a stage may hold [S]: `least_of_end_stages` the first and the last, the others one.

    Dense layers that are cheaper than the others count on the first stage, which must have as many layers
    that no time is below 0. A last stage that has the head alone holds none, and the one before it counts as
    the last.
    """
    least = np.ones(len(times.placement), dtype=np.int64)
    least[0], least[times.num_layer_stages - 1 :] = least_of_end_stages[0], 0
    if times.num_layer_stages > 1:
        least[times.num_layer_stages - 1] = least_of_end_stages[1]
    missing_s = np.maximum(0.0, -times.fixed_s[:, 0])
    layer_s = times.layer_s[:, :, 0].min(axis=0)
    least[0] = max(least[0], int(np.ceil(missing_s / np.maximum(layer_s, 1e-300)).max()))
    return least


def balanced_split(
    times: SplitTimes, num_layers: int, *, least_of_end_stages: tuple[int, int] = (0, 0)
) -> tuple[int, ...]:
    """The split whose busiest device has the least work a microbatch: exact for one kind, in any placement.

    Layers go one by one to the device that then has the least to do, there to its stage with the least to do.
    Of layers of several kinds see `balanced_by_kinds`.
    """
    counts, fixed_s, layer_s = (
        least_layers(times, least_of_end_stages),
        times.fixed_s.sum(axis=0),
        times.layer_s.sum(axis=1),
    )
    if len(layer_s) > 1:
        loads = KindLoads(
            fixed=fixed_s, layer=layer_s, before=times.before, placement=times.placement.tolist()
        )
        return balanced_by_kinds(loads, counts.tolist())
    split_kernel.balance(counts, num_layers, times.placement, fixed_s, layer_s[0], times.num_layer_stages)
    return tuple(counts.tolist())


class Pipeline:
    """`SplitTimes` as the kernel takes them."""

    def __init__(self, times: SplitTimes) -> None:
        self.times = times
        orders = [order for order, _ in times.orders]
        starts = np.cumsum([0, *(len(order.orders) for order in orders)])
        self._arrays = SplitArrays(
            np.concatenate([order.orders for order in orders]),
            starts.astype(np.int64),
            np.stack([order.offsets for order in orders]),
            np.array([order.num_microbatches for order in orders], dtype=np.int64),
            np.array([weight for _, weight in times.orders]),
            times.placement,
            np.ascontiguousarray(times.fixed_s),
            np.ascontiguousarray(times.layer_s),
            times.sends_s,
            times.is_blocking,
            times.before,
        )
        self._placement = times.placement

    def seconds(self, split: Sequence[int]) -> float:
        """Seconds an iteration of a split, infinite where its orders do not run."""
        counts = self.times.counts(split)
        seconds, _ = evaluate(counts, self._arrays, np.zeros(counts.shape))
        if seconds < 0.0:
            return float("inf")
        num_ranks = int(self._placement.max()) + 1
        return float(seconds + split_kernel.step_s(counts, self._placement, num_ranks, self.times.step))

    def search(
        self, start: Sequence[int], least: IntArray, *, incumbent_s: float, max_work: int, num_splits: int
    ) -> tuple[int, list[tuple[tuple[int, ...], float]]]:
        """The work, negative where it was cut off, and the best splits with their seconds.

        `least` [S] are the fewest layers of the stages. No splits where none is better than `incumbent_s`.
        """
        best = split_kernel.Best(
            np.full(num_splits, np.inf), np.zeros((num_splits, len(start)), dtype=np.int64)
        )
        work = split_kernel.search(
            np.array(start, dtype=np.int64),
            least,
            incumbent_s,
            max_work,
            self._arrays,
            self.times.step,
            best,
            self.times.num_layer_stages,
        )
        if best.seconds[0] >= incumbent_s:
            return work, []
        return work, [
            (tuple(counts), seconds)
            for counts, seconds in zip(best.counts.tolist(), best.seconds.tolist(), strict=True)
            if seconds < float("inf")
        ]
