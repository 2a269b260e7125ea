"""Every legal layout of a job as rows of an integer table, and which combinations of degrees are refused."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet_plugin.cost.memory import distinct_numbers
from quartet_plugin.cost.run import ScheduleKind
from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.model.layout import Layout, Setting
from quartet_plugin.model.plan import STOCK
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.tensor_partition import TensorPartition, partition_from_label
from quartet_plugin.planner.described_rules import rules_of
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.table_rows import RECOMPUTE, layout_of, unique_rows
from quartet_plugin.planner.table_schedules import KINDS, placement_of, schedules_of_rows
from quartet_plugin.space.config import SEARCHED
from quartet_plugin.space.expert_stages import fault_of_split, split_with_experts
from quartet_plugin.space.forbidden import forbidden_rows
from quartet_plugin.space.knobs.distributed_optimizer import DISTRIBUTED_OPTIMIZER as OPTIMIZER
from quartet_plugin.space.knobs.divisors import divisors, nearest_words
from quartet_plugin.space.knobs.expert_tensor_parallel import (
    BIASED,
    BIASES_FAULT,
    EXPERT_TENSOR_PARALLEL,
    may_be_whole,
)
from quartet_plugin.space.knobs.knob import KnobContext, LayoutKnob
from quartet_plugin.space.knobs.micro_batch_size import MICRO_BATCH_SIZE
from quartet_plugin.space.knobs.pipeline_parallel import most_stages
from quartet_plugin.space.knobs.recompute import RECOMPUTE as RECOMPUTE_KNOB
from quartet_plugin.space.knobs.registry import SETTINGS
from quartet_plugin.space.knobs.sequence_parallel import SEQUENCE_PARALLEL
from quartet_plugin.space.knobs.tensor_parallel import FP8_MULTIPLE, fits_fp8, sizes_to_divide
from quartet_plugin.space.knobs.tensor_partition import TENSOR_PARTITION
from quartet_plugin.space.knobs.virtual_stages import VIRTUAL_STAGES
from quartet_plugin.space.knobs.zero_stage import ZERO_STAGE
from quartet_plugin.space.layouts import (
    check_offered,
    choices_by_degrees,
    chosen_layouts,
    is_requested,
    requested_groups,
)
from quartet_plugin.space.rules import LayoutRules
from quartet_plugin.space.schedules import MAX_PLANNED_ACTIONS
from quartet_plugin.space.state_space import fault_of_shared_heads
from quartet_plugin.split.layers import even_split, is_legal_split

# The columns of the table.
TP, CP, PP, DP, SIZE, VIRTUAL, EP, SPLIT, MODE, SHARDED, SCHEDULE, PARTITION, OPTION = range(13)
# Values of the column `SPLIT`; larger numbers are the job's `written_splits` in order.
BALANCED, EVEN, WRITTEN = 0, 1, 2
GIB = 2**30


# Sequence parallelism, None where the degrees decide it, and the settings that a layout changes.
type LayoutOptions = tuple[bool | None, tuple[Setting, ...] | None]
STOCK_OPTIONS: LayoutOptions = (None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTable:
    """One row a layout and schedule; the columns are `TP` to `OPTION`.

    `SCHEDULE` is a number of `KINDS`, `PARTITION` one of `partitions`, `OPTION` one of `options`. Layouts of
    the TP and CP in `sequence_parallel` have sequence parallelism, where the option does not say it.
    """

    columns: IntArray
    rules: LayoutRules
    sequence_parallel: frozenset[tuple[int, int]]
    partitions: tuple[TensorPartition | None, ...] = (None,)
    options: tuple[LayoutOptions, ...] = (STOCK_OPTIONS,)

    def __len__(self) -> int:
        return len(self.columns)

    def layout(self, row: int) -> Layout:
        """The layout of one row."""
        tp, cp, pp, dp, size, virtual, ep, _, mode, sharded, _, cut, option = self.columns[row].tolist()
        partition = self.partitions[cut]
        layout = layout_of(tp, cp, pp, dp, size, virtual, mode, sharded, ep=ep, partition=partition)
        sequence_parallel, settings = self.options[option]
        has_it = (tp, cp) in self.sequence_parallel if sequence_parallel is None else sequence_parallel
        if layout.sequence_parallel == has_it and settings is None:
            return layout
        return replace(layout, sequence_parallel=has_it, settings=settings)

    def by_settings(self, job: PlanRequest) -> Iterator[tuple[IntArray, "LayoutTable", PlanRequest]]:
        """The rows of equal settings: their numbers, a table of them, and the job with these settings."""
        known: dict[tuple[Setting, ...] | None, list[int]] = {}
        for option, (_, settings) in enumerate(self.options):
            known.setdefault(settings, []).append(option)
        for settings, options in known.items():
            rows = np.flatnonzero(np.isin(self.columns[:, OPTION], options))
            values = job.values_in(settings)
            with_them = tuple(Setting(name=name, value=value) for name, value in sorted(values.items()))
            yield rows, replace(self, columns=self.columns[rows]), replace(job, settings=with_them)

    def schedule(self, row: int) -> ScheduleKind:
        """The schedule of one row."""
        return KINDS[int(self.columns[row, SCHEDULE])]

    def groups(self, row: int) -> tuple[int | None, ...]:
        """The groups that the row's schedule may have, the smallest first; (None,) where it has none."""
        if self.schedule(row) is not ScheduleKind.INTERLEAVED:
            return (None,)
        return tuple(sorted(requested_groups(self.layout(row), rules=self.rules)))


def layout_table_of(job: PlanRequest, shape: ModelShape, *, is_checked: bool = True) -> LayoutTable:
    """All layouts and schedules of `shape` that run on Megatron and the job allows, in a fixed order.

    Raises ConfigError for a setting if no layout may have any of its requested values, unless `is_checked` is
    False: then layouts keep its usual value.
    """
    rules = rules_of(job)
    sharding = OPTIMIZER if OPTIMIZER.is_of(rules.job.framework) else ZERO_STAGE
    rows, sequence_parallel = [], set()
    for layout, choices in choices_by_degrees(shape, rules=rules):
        offered = [choices.get(knob, (knob.in_layout(layout),)) for knob in (*_OPTIONS, sharding)]
        rows.append(_rows(job, shape.num_layers, layout, offered))
        if True in choices.get(SEQUENCE_PARALLEL, (layout.sequence_parallel,)):
            sequence_parallel.add((layout.tensor_parallel, layout.context_parallel))
    columns = np.concatenate([np.zeros((0, SCHEDULE), dtype=np.int64), *rows])
    kept, kinds = schedules_of_rows(rules, shape, columns, num_microbatches=num_microbatches(job, columns))
    columns = _of_searched(job, np.column_stack([columns[kept], kinds]))
    columns = columns[_has_logged_experts(job, shape, columns)]
    forbidden = forbidden_rows(job.search.forbid, _axes(columns), num_rows=len(columns))
    columns, partitions = _with_partitions(rules, shape, columns[~forbidden])
    columns, options = _with_options(
        rules, shape, columns, frozenset(sequence_parallel), is_checked=is_checked
    )
    return LayoutTable(
        columns=columns,
        rules=rules,
        sequence_parallel=frozenset(sequence_parallel),
        partitions=partitions,
        options=options,
    )


def _has_logged_experts(job: PlanRequest, shape: ModelShape, columns: IntArray) -> NDArray[np.bool_]:
    """Whether each row has a split that gives every pipeline rank one of `job.logged_expert_layers`.

    True for every row where the job has no such layers.
    """
    has_split = np.ones(len(columns), dtype=np.bool_)
    if not job.logged_expert_layers or not len(columns):
        return has_split
    written = written_splits(job)
    keys, _, inverse = unique_rows(columns[:, [PP, VIRTUAL, SPLIT, SCHEDULE]])
    for number, (pp, virtual, kind, schedule) in enumerate(keys.tolist()):
        placement = placement_of(KINDS[schedule], num_devices=pp, num_chunks=virtual)
        split = even_split(shape.num_layers, num_stages=pp * virtual)
        if kind == BALANCED:
            split = split_with_experts(split, placement=placement, expert_layers=job.logged_expert_layers)
        elif kind >= WRITTEN:
            split = written[kind - WRITTEN]
        has_split[inverse == number] = (
            fault_of_split(split, placement=placement, expert_layers=job.logged_expert_layers) is None
        )
    return has_split


def _of_searched(job: PlanRequest, columns: IntArray) -> IntArray:
    """The rows that may have a searched order, where the job asks for no other and some row may have one."""
    if job.search.schedule != (SEARCHED,):
        return columns
    num_actions = 3 * columns[:, PP] * columns[:, VIRTUAL] * num_microbatches(job, columns)
    kept = columns[(columns[:, PP] > 1) & (num_actions <= MAX_PLANNED_ACTIONS)]
    return kept if len(kept) else columns


# The knobs whose choices are columns of a row beside its degrees, the sharding of the optimizer left out.
_OPTIONS = (MICRO_BATCH_SIZE, VIRTUAL_STAGES, RECOMPUTE_KNOB)


def _rows(job: PlanRequest, num_layers: int, layout: Layout, choices: list[tuple[Any, ...]]) -> IntArray:
    """The rows of some degrees without schedules: every choice of micro-batch, chunks, split and memory."""
    sizes, stages, modes, shards = choices
    chunks = [(v, kind) for v in stages for kind in _splits(job, num_layers, layout.pipeline_parallel * v)]
    options = [sizes, chunks, [RECOMPUTE.index(mode) for mode in modes], [int(on) for on in shards]]
    if not all(options):
        return np.zeros((0, SCHEDULE), dtype=np.int64)
    picks = np.indices([len(values) for values in options]).reshape(len(options), -1)
    size, chunk, mode, sharded = (
        np.array(values, dtype=np.int64).reshape(len(values), -1)[pick]
        for values, pick in zip(options, picks, strict=True)
    )
    fixed = np.empty((len(size), 4), dtype=np.int64)
    fixed[:, TP], fixed[:, CP] = layout.tensor_parallel, layout.context_parallel
    fixed[:, PP], fixed[:, DP] = layout.pipeline_parallel, layout.data_parallel
    experts = np.full((len(size), 1), layout.expert_parallel, dtype=np.int64)
    return np.hstack([fixed, size, chunk[:, :1], experts, chunk[:, 1:], mode, sharded])


def _with_partitions(
    rules: LayoutRules, shape: ModelShape, columns: IntArray
) -> tuple[IntArray, tuple[TensorPartition | None, ...]]:
    """The rows once for each partition of a layer that they may have, and the partitions by number.

    The last column is the number of the first option.
    """
    keys, _, inverse = unique_rows(columns[:, [TP, CP, EP, SIZE]])
    layouts = (layout_of(tp, cp, 1, ep, size, 1, 0, 0, ep=ep) for tp, cp, ep, size in keys.tolist())
    contexts = (KnobContext(layout=layout, shape=shape, rules=rules) for layout in layouts)
    choices = [TENSOR_PARTITION.choices(context) for context in contexts]
    labels = list(dict.fromkeys([STOCK, *(str(label) for labels in choices for label in labels)]))
    legal = [[labels.index(str(label)) for label in choice] for choice in choices]
    partitions = tuple(partition_from_label(label) for label in labels)
    rows, each = _repeated(columns, inverse, legal)
    return np.column_stack([rows, each, np.zeros_like(each)]), partitions


def _with_options(
    rules: LayoutRules,
    shape: ModelShape,
    columns: IntArray,
    sequence_parallel: frozenset[tuple[int, int]],
    *,
    is_checked: bool,
) -> tuple[IntArray, tuple[LayoutOptions, ...]]:
    """The rows once for each choice of sequence parallelism and settings that the search leaves them.

    Those with a partition of their layers have sequence parallelism. Where it `is_checked`, ConfigError is
    raised for a setting if no row may have any of its requested values.
    """
    knobs: list[LayoutKnob] = [
        knob for knob in (SEQUENCE_PARALLEL, *SETTINGS) if rules.search.requested(knob.name) != (STOCK,)
    ]
    if not knobs or not len(columns):
        return columns, (STOCK_OPTIONS,)
    is_custom = np.array([kind.is_custom for kind in KINDS])[columns[:, SCHEDULE]]
    degrees = columns[:, [TP, CP, PP, DP, VIRTUAL, EP, MODE, SHARDED]]
    keys, _, inverse = unique_rows(np.column_stack([degrees, columns[:, PARTITION] > 0, is_custom]))
    offered = []
    for tp, cp, pp, dp, virtual, ep, mode, sharded, is_cut, custom in keys.tolist():
        layout = layout_of(tp, cp, pp, dp, 1, virtual, mode, sharded, ep=ep)
        layout = replace(layout, sequence_parallel=(tp, cp) in sequence_parallel)
        layouts = chosen_layouts([layout], knobs, shape, rules, is_custom=bool(custom))
        offered.append([layout for layout in layouts if layout.sequence_parallel or not is_cut])
    if is_checked:
        every = [layout for layouts in offered for layout in layouts]
        check_offered(knobs, every, shape=shape, rules=rules, is_custom=bool(is_custom.all()))
    each = [[(layout.sequence_parallel, layout.settings) for layout in layouts] for layouts in offered]
    options = tuple(dict.fromkeys(option for choices in each for option in choices))
    number = {option: index for index, option in enumerate(options)}
    rows, picked = _repeated(columns, inverse, [[number[option] for option in choices] for choices in each])
    rows[:, OPTION] = picked
    return rows, options


def _repeated(columns: IntArray, keys: IntArray, choices: list[list[int]]) -> tuple[IntArray, IntArray]:
    """The rows once for each choice that their key has, and these choices."""
    counts = np.array([len(choice) for choice in choices], dtype=np.int64)
    each = np.array([number for key in keys.tolist() for number in choices[key]], dtype=np.int64)
    return np.repeat(columns, counts[keys], axis=0), each


def _axes(columns: IntArray) -> dict[str, IntArray]:
    """The columns that rules of `search.forbid` are about; schedules as indices of `TABLE_SCHEDULES`."""
    return {
        "tensor_parallel": columns[:, TP],
        "pipeline_parallel": columns[:, PP],
        "data_parallel": columns[:, DP],
        "virtual_stages": columns[:, VIRTUAL],
        "micro_batch_size": columns[:, SIZE],
        "schedule": columns[:, SCHEDULE],
    }


def num_microbatches(job: PlanRequest, columns: IntArray) -> IntArray:
    """Microbatches an iteration of each row."""
    microbatches: IntArray = job.global_batch_size // (columns[:, DP] * columns[:, SIZE])
    return microbatches


def written_splits(job: PlanRequest) -> tuple[tuple[int, ...], ...]:
    """The splits that the job gives as counts, in its order; `stock` is that of its command."""
    counts = (_counts_of(job, word) for word in job.search.split or ())
    return tuple(split for split in counts if split is not None)


def _counts_of(job: PlanRequest, word: str) -> tuple[int, ...] | None:
    """The layers of each stage that a word of `search.split` means; None for those of the even split."""
    if word == STOCK:
        return job.baseline_split
    return tuple(int(count) for count in word.split("+")) if word[0].isdigit() else None


def fault_of_degrees(job: PlanRequest, shape: ModelShape, tp: int, cp: int, pp: int) -> str | None:
    """The constraint that refuses these degrees whatever else is chosen; None where they are legal.

    It is written `rule: the fault; nearest: the legal values`, for the rules of the knobs.
    """
    dp = job.machines.num_devices // (tp * cp * pp)
    legal = LegalDegrees(job, shape)
    joined = job.largest_tensor_parallel
    if joined % tp:
        fault = f"TP {tp} does not divide the {joined} devices that fast links join on a node"
        return f"scale-up domain: {fault}{nearest_words(tp, legal.tensor_parallel)}"
    undivided = fault_of_tensor_parallel(job, shape, tp, legal=legal.tensor_parallel)
    if undivided is not None:
        return undivided
    if job.precision == "fp8" and not fits_fp8(tp, shape, job.experts):
        return f"fp8 multiple: TP {tp} leaves FP8 products of sizes that are no multiples of {FP8_MULTIPLE}"
    # Megatron balances causal attention in two chunks a rank; sequence parallelism splits further.
    chunks = (2 * cp if cp > 1 else 1) * tp
    if shape.seq_length % tp:
        fault = f"TP {tp} does not divide sequences of {shape.seq_length}"
        return f"sequence: {fault}{nearest_words(tp, legal.tensor_parallel)}"
    if shape.seq_length % chunks:
        fault = (
            f"CP {cp} with TP {tp} does not cut sequences of {shape.seq_length} into {chunks} equal chunks"
        )
        return f"sequence: {fault}"
    if pp > most_stages(shape):
        fault = f"PP {pp} has more stages than {shape.num_layers} layers, embedding and head"
        return f"layers: {fault}{nearest_words(pp, legal.pipeline_parallel)}"
    if unshared := fault_of_shared_heads(shape, tensor=tp, context=cp):
        return f"state-space layers: {unshared}"
    experts = job.logged_expert_layers
    if experts and pp > len(experts):
        fault = f"PP {pp} leaves a device without one of the {len(experts)} layers with experts"
        return f"experts: {fault}{nearest_words(pp, legal.pipeline_parallel)}"
    if job.global_batch_size % dp:
        fault = f"DP {dp} does not divide a batch of {job.global_batch_size}"
        return f"batch: {fault}{nearest_words(dp, legal.data_parallel)}"
    return None


def fault_of_tensor_parallel(
    job: PlanRequest, shape: ModelShape, tp: int, *, legal: Sequence[int]
) -> str | None:
    """The biases that `tp` would share, or the first size that it does not divide, with the nearest `legal`.

    Several ranks may hold one query group, as Megatron lets them.
    """
    if tp > 1 and BIASED in job.features and not _may_have_whole_experts(job):
        fault = f"TP {tp} without --expert-tensor-parallel-size 1: {BIASES_FAULT}"
        return f"biases: {fault}{nearest_words(tp, legal)}"
    heads, *others = sizes_to_divide(shape, job.experts).items()
    for name, size in (heads, ("query groups", shape.num_query_groups), *others):
        if size % tp and not (name == "query groups" and tp % size == 0):
            rule = name.removeprefix("of ").removeprefix("the ")
            return f"{rule}: TP {tp} does not divide {size} {name}{nearest_words(tp, legal)}"
    return None


def _may_have_whole_experts(job: PlanRequest) -> bool:
    name = EXPERT_TENSOR_PARALLEL.name
    return may_be_whole(job.values_in(None).get(name), job.search.requested(name))


@dataclass(frozen=True, slots=True)
class LegalDegrees:
    """The sizes of each kind of parallelism that some layout of `shape` may have, each kind by itself."""

    job: PlanRequest
    shape: ModelShape

    @property
    def tensor_parallel(self) -> list[int]:
        """Divisors of the devices and the sequence that cut the model."""
        job, shape = self.job, self.shape
        sizes = divisors(gcd(job.machines.num_devices, job.largest_tensor_parallel, shape.seq_length))
        return [tp for tp in sizes if fault_of_tensor_parallel(job, shape, tp, legal=()) is None]

    @property
    def context_parallel(self) -> list[int]:
        """Divisors of the devices that cut the sequence in two chunks a rank."""
        seq_length = self.shape.seq_length
        return [cp for cp in divisors(self.job.machines.num_devices) if cp == 1 or seq_length % (2 * cp) == 0]

    @property
    def pipeline_parallel(self) -> list[int]:
        """Divisors of the devices, as far as there are stages to fill, and layers with experts for each."""
        most = most_stages(self.shape)
        most = min(most, len(self.job.logged_expert_layers) or most)
        return [pp for pp in divisors(self.job.machines.num_devices) if pp <= most]

    @property
    def data_parallel(self) -> list[int]:
        """Divisors of the devices and the batch."""
        return divisors(gcd(self.job.machines.num_devices, self.job.global_batch_size))

    def nearest_of_search(self) -> str:
        """The nearest legal values of the first request that has no legal one, in words; "" without one."""
        for name in ("tensor_parallel", "context_parallel", "pipeline_parallel", "data_parallel"):
            requested: tuple[int, ...] | None = getattr(self.job.search, name)
            legal: list[int] = getattr(self, name)
            if requested and not set(requested) & set(legal):
                return nearest_words(requested[0], legal)
        return ""


def degrees(job: PlanRequest) -> Iterator[tuple[int, int, int]]:
    """(tp, cp, pp) whose product divides the devices."""
    world = job.machines.num_devices
    for tp in divisors(world):
        for cp in divisors(world // tp):
            for pp in divisors(world // tp // cp):
                yield tp, cp, pp


def _is_asked(job: PlanRequest, tp: int, cp: int, pp: int) -> bool:
    """Whether the search allows the degrees, and the data parallelism that they leave."""
    search = job.search
    return (
        is_requested(search.tensor_parallel, tp)
        and is_requested(search.context_parallel, cp)
        and is_requested(search.pipeline_parallel, pp)
        and is_requested(search.data_parallel, job.machines.num_devices // (tp * cp * pp))
    )


def _splits(job: PlanRequest, num_layers: int, num_stages: int) -> list[int]:
    """The values of the column `SPLIT` that the job allows for a number of layers and stages.

    Where the command's split does not fit, `stock` is the even one, as in a study (`Space.fixed_splits`).
    """
    requested = job.search.split
    if requested is None:
        return [BALANCED]
    is_legal = partial(
        is_legal_split,
        num_layers=num_layers,
        num_stages=num_stages,
        is_mtp_before_last=job.has_mtp_before_last,
    )
    has_stock = job.baseline_split is not None and is_legal(job.baseline_split)
    splits: list[tuple[int, tuple[int, ...]]] = []
    if "even" in requested or (STOCK in requested and not has_stock):
        is_before_last = job.has_mtp_before_last
        even = even_split(num_layers, num_stages=num_stages, is_mtp_before_last=is_before_last)
        splits.append((EVEN, even))
    splits += enumerate(written_splits(job), start=WRITTEN)
    kinds: dict[tuple[int, ...], int] = {}
    # Every stage of a hybrid model has layers.
    fewest = 0 if job.shape.layer_kinds is None else 1
    for kind, counts in splits:
        if is_legal(counts) and min(counts) >= fewest:
            kinds.setdefault(counts, kind)
    return list(kinds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One constraint and how many it refused: combinations of TP, CP and PP, or layouts for memory."""

    reason: str
    num_refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLarge:
    """Layouts of equal degrees that do not fit, and a lower bound of the bytes that the smallest needs."""

    tensor_parallel: int
    context_parallel: int
    pipeline_parallel: int
    num_layouts: int
    least_bytes: float

    @classmethod
    def by_degrees(cls, columns: IntArray, memory_bytes: FloatArray) -> "list[TooLarge]":
        """Rows of the table with their bounds, grouped by TP, CP and PP."""
        if not len(columns):
            return []
        keys, _, groups = unique_rows(columns[:, [TP, CP, PP]])
        counts = np.bincount(groups, minlength=len(keys))
        least = np.full(len(keys), np.inf)
        np.minimum.at(least, groups, memory_bytes)
        return [
            cls(
                tensor_parallel=tp,
                context_parallel=cp,
                pipeline_parallel=pp,
                num_layouts=int(count),
                least_bytes=float(need),
            )
            for (tp, cp, pp), count, need in zip(keys.tolist(), counts, least, strict=True)
        ]

    def refusal(self, available_bytes: float) -> Refusal:
        """The layouts' refusal for lack of memory."""
        context = f" CP {self.context_parallel}" if self.context_parallel > 1 else ""
        label = f"TP {self.tensor_parallel}{context} PP {self.pipeline_parallel}"
        least, available = distinct_numbers(self.least_bytes / GIB, available_bytes / GIB, digits=0)
        if self.least_bytes > available_bytes:
            need = f"the least of these needs {least} GiB, {available} GiB are usable"
        else:
            need = f"these need more than the {available_bytes / GIB:.0f} GiB that are usable"
        return Refusal(reason=f"memory: {label}: {need}", num_refused=self.num_layouts)


def refused_degrees(job: PlanRequest, shape: ModelShape) -> list[Refusal]:
    """Combinations of degrees that no layout can have, by the first constraint each breaks."""
    return _refused(job, shape, degrees(job))


def refused_requests(job: PlanRequest, shape: ModelShape) -> list[Refusal]:
    """The same of the combinations that the job asks for."""
    return _refused(job, shape, (combination for combination in degrees(job) if _is_asked(job, *combination)))


def _refused(
    job: PlanRequest, shape: ModelShape, combinations: Iterable[tuple[int, int, int]]
) -> list[Refusal]:
    faults = (fault_of_degrees(job, shape, tp, cp, pp) for tp, cp, pp in combinations)
    counted = Counter(fault for fault in faults if fault is not None)
    return [Refusal(reason=reason, num_refused=count) for reason, count in counted.most_common()]
