"""A plan: everything chosen for one job, as data.

A plan file is shared between people, so it is not trusted: strict schema, size caps, a sha256 digest
over its canonical JSON, no code, no paths to code and no free command-line words.
"""

import hashlib
import itertools
from collections.abc import Callable
from collections.abc import Mapping as Values
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from quartet_plugin.errors import PlanError, QuartetError
from quartet_plugin.model.canonical import digest
from quartet_plugin.model.cluster import Precision
from quartet_plugin.model.custom_schedule import PAIRS_ONLY_SIMULATED, CustomSchedule
from quartet_plugin.model.files import read_json, write_json_atomic
from quartet_plugin.model.job_description import (
    Experts,
    JobDescription,
    LatentAttention,
    model_flops_per_sequence,
)
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.measurement import Comparison, Prediction
from quartet_plugin.model.packed_lengths import PackedLengths
from quartet_plugin.model.schema import ADDED, Bounds, dump, parse, record
from quartet_plugin.model.shape import MAX_LAYERS, ModelShape

MAX_RANKS = 65_536
MAX_BATCH = 2**31
MAX_BYTES = 64 * 2**20
STOCK = "stock"

ScheduleName = Literal["no-pipelining", "1f1b", "interleaved", "custom"]


class _Remembering:
    """A place for what is computed once, beside the fields: no copy, comparison or file has it."""

    __slots__ = ("_computed",)
    _computed: dict[object, Any]

    def remembered[T](self, name: object, compute: Callable[[], T]) -> T:
        """What `compute` made the first time: a value never changes."""
        try:
            known: dict[object, T] = self._computed
        except AttributeError:
            known = {}
            object.__setattr__(self, "_computed", known)
        if name not in known:
            known[name] = compute()
        return known[name]


@record
class CoreGroup:
    """Slots of a node, by local index, whose processes share fewer processor cores than they are."""

    locals: tuple[Annotated[int, Bounds(ge=0, lt=MAX_RANKS)], ...]
    num_cores: Annotated[int, Bounds(ge=1, le=2**20)]


@record
class NodeInfo:
    """One node of the cluster a plan was made on: its host name, what it is, and its slots.

    `crowds` are those of its slots that train on processor cores and share them. `network_namespaces` are the
    slots of each network namespace, by local index, where those that train on processor cores are in several.
    """

    host: str
    node_class: str
    num_slots: Annotated[int, Bounds(ge=1, le=MAX_RANKS)]
    crowds: tuple[CoreGroup, ...] | None = field(default=None, metadata=ADDED)
    network_namespaces: tuple[tuple[Annotated[int, Bounds(ge=0, lt=MAX_RANKS)], ...], ...] | None = field(
        default=None, metadata=ADDED
    )

    @property
    def has_no_accelerator(self) -> bool:
        """Whether its slots are processor cores."""
        return self.node_class.lower().startswith("cpu")


@record
class Split:
    """Transformer layers of each stage, in stage order; embedding first, head last, not counted.

    `mtp_before_last`: the layers of multi-token prediction lie on the stage before the last one, which has
    the head alone; None where they lie on the last stage, or where there are none.
    """

    transformer_layers_per_stage: tuple[Annotated[int, Bounds(ge=0, le=MAX_LAYERS)], ...]
    mtp_before_last: Literal[True] | None = field(default=None, metadata=ADDED)

    @classmethod
    def of(cls, counts: tuple[int, ...], *, is_mtp_before_last: bool = False) -> "Split":
        """The split with these layers of each stage."""
        return cls(transformer_layers_per_stage=counts, mtp_before_last=True if is_mtp_before_last else None)

    @property
    def label(self) -> str:
        """The counts, for tables."""
        return "+".join(str(count) for count in self.transformer_layers_per_stage)

    @property
    def megatron_layout(self) -> str:
        """Megatron's `--pipeline-model-parallel-layout`, every layer written out: `Ettt|tt|tL`."""
        return self.layout_text()

    @property
    def mtp_stage_index(self) -> int:
        """The stage that layers of multi-token prediction lie on, where the model has some."""
        return len(self.transformer_layers_per_stage) - (2 if self.mtp_before_last else 1)

    def layout_text(self, *, mtp_layers: int = 0) -> str:
        """The same with layers of multi-token prediction: `Ettt|tt|tmL`, or `Ettt|ttm|L` before the last."""
        stages = ["t" * count for count in self.transformer_layers_per_stage]
        stages[self.mtp_stage_index] += "m" * mtp_layers
        return f"E{'|'.join(stages)}L"


@record
class ScheduleChoice:
    """The pipeline schedule by name; `group` (interleaved): microbatches a chunk before the next chunk.

    `custom` goes with the name "custom": a schedule that the plugin's runtime executes.
    """

    name: ScheduleName
    group: Annotated[int, Bounds(ge=1, le=MAX_BATCH)] | None = None
    custom: CustomSchedule | None = field(default=None, metadata=ADDED)

    def __post_init__(self) -> None:
        if self.custom is not None and self.custom.has_pairs:
            raise PlanError(f"schedule.custom.orders: {PAIRS_ONLY_SIMULATED}")

    @property
    def placement(self) -> tuple[int, ...] | None:
        """The pipeline rank of each stage where it is not Megatron's own order; None where it is."""
        return None if self.custom is None else self.custom.placement

    @property
    def label(self) -> str:
        """The name, with the group where there is one."""
        if self.custom is not None:
            return self.custom.label
        return self.name if self.group is None else f"{self.name} g{self.group}"


@record
class Baseline:
    """The user's configuration, which a plan is compared with; its mapping is the launcher's order."""

    layout: Layout
    split: Split
    schedule: ScheduleChoice


# What a plan of a run says of its model beside the shape: the same plan has the same key without it.
_NOT_IN_KEYS = ("precision", "experts", "latent_attention", "packed")


@record
class MadeFor(_Remembering):
    """The job that a plan fits: the user's model, batch and configuration, the framework and the cluster.

    `batching_features` of the job are those by which another micro-batch or DP may change the
    training objective.
    `job` is what the job's file says besides, in a plan that was made without a run. `mtp_layers` predict
    further tokens, after the last layer and before the head; None for a model without them. In a plan of a
    run `precision` is the format of the layers' products, `experts` and `latent_attention` are the model's,
    `packed` are the documents in its sequences as the run's first trial counted them; they are no part of the
    plan's key.
    """

    framework: str
    framework_version: str
    shape: ModelShape
    global_batch_size: Annotated[int, Bounds(ge=1, le=MAX_BATCH)]
    baseline: Baseline
    world_size: int
    nodes: tuple[NodeInfo, ...]
    batching_features: tuple[str, ...] | None = field(default=None, metadata=ADDED)
    job: JobDescription | None = field(default=None, metadata=ADDED)
    mtp_layers: Annotated[int, Bounds(ge=1, le=MAX_LAYERS)] | None = field(default=None, metadata=ADDED)
    precision: Precision | None = field(default=None, metadata=ADDED)
    experts: Experts | None = field(default=None, metadata=ADDED)
    latent_attention: LatentAttention | None = field(default=None, metadata=ADDED)
    packed: PackedLengths | None = field(default=None, metadata=ADDED)

    @property
    def slots_of_nodes(self) -> tuple[int, ...]:
        """The number of slots of each node."""
        return self.remembered("slots_of_nodes", lambda: tuple(node.num_slots for node in self.nodes))

    @property
    def described_model(self) -> "MadeFor | JobDescription":
        """What says the model's precision, experts and latent attention: the job's file, else the run."""
        return self if self.job is None else self.job

    @property
    def peak_precision(self) -> Precision:
        """The format of the layers' products, bf16 where nothing says it."""
        return self.described_model.precision or "bf16"

    def tokens_per_sequence(self, shape: ModelShape) -> float:
        """Tokens of a sequence of `shape`, padding left out where it is known."""
        return shape.seq_length if self.packed is None else self.packed.tokens_per_sequence

    def model_flops_per_sequence(self, shape: ModelShape) -> int:
        """FLOPs of the forward and backward of a sequence in a model of `shape`, without recomputation."""
        model = self.described_model
        return model_flops_per_sequence(
            shape, experts=model.experts, latent_attention=model.latent_attention, packed=self.packed
        )

    def differences(self, here: Values[str, Any]) -> dict[str, Any]:
        """The values of this plan that differ from those of `here`, by name.

        Names are fields of this class, of its shape, of its job's `model_words`, or the ds_config's
        `zero_optimization.stage`.
        """
        zero = int(self.baseline.layout.distributed_optimizer)
        planned = {**dump(self), **dump(self.shape), "zero_optimization.stage": zero}
        if self.job is not None:
            planned |= self.job.model_words
        # What was added to the file is left out of it where it is None.
        return {name: planned.get(name) for name, value in here.items() if value != planned.get(name)}

    def check_same_job(self, here: Values[str, Any]) -> None:
        """Raises PlanError naming every value of `here` that differs from the plan's."""
        different = self.differences(here)
        if different:
            words = ", ".join(f"{name} {here[name]} (plan: {planned})" for name, planned in different.items())
            raise PlanError(f"the plan was made for another job: {words}; make one with `quartet tune`")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Slot:
    """A physical place for one process: the node's index in `made_for.nodes` and the local index on it."""

    node: Annotated[int, Bounds(ge=0, lt=MAX_RANKS)]
    local: Annotated[int, Bounds(ge=0, lt=MAX_RANKS)]


@record
class Mapping(_Remembering):
    """`slots[r]` plays Megatron's RANK r."""

    slots: tuple[Slot, ...]

    @property
    def is_stock(self) -> bool:
        """Whether ranks lie on slots in launcher order."""
        return self.remembered("is_stock", self._is_stock)

    def _is_stock(self) -> bool:
        # To compare tuples takes a tenth of the time that slots take.
        order = [(slot.node, slot.local) for slot in self.slots]
        return order == sorted(order)

    @property
    def key(self) -> bytes:
        """A digest that tells mappings apart as `hash` and `==` of all slots would, taken once."""
        return self.remembered(
            "key",
            lambda: hashlib.sha256(",".join(f"{s.node}.{s.local}" for s in self.slots).encode()).digest(),
        )

    def indices(self, slots_of_nodes: tuple[int, ...]) -> tuple[int, ...] | None:
        """The number of each rank's slot, counted node by node, on nodes with `slots_of_nodes` slots each.

        None unless every slot is there exactly once.
        """
        return self.remembered(slots_of_nodes, lambda: self._indices(slots_of_nodes))

    def _indices(self, slots_of_nodes: tuple[int, ...]) -> tuple[int, ...] | None:
        first = [0, *itertools.accumulate(slots_of_nodes)]
        is_known = all(s.node < len(slots_of_nodes) and s.local < slots_of_nodes[s.node] for s in self.slots)
        indices = tuple(first[slot.node] + slot.local for slot in self.slots) if is_known else ()
        return indices if len(indices) == first[-1] == len(set(indices)) else None

    @property
    def label(self) -> str:
        """The slot of each rank, for tables."""
        if self.is_stock:
            return STOCK
        if len(self.slots) > 16:
            moved = sum(a != b for a, b in zip(self.slots, sorted(self.slots), strict=True))
            return f"{moved} of {len(self.slots)} moved"
        order = sorted(self.slots)
        return ",".join(str(order.index(slot)) for slot in self.slots)


@record
class Provenance:
    """The run, trial, seed and version that a plan came from."""

    run: str
    trial: Annotated[int, Bounds(ge=0, lt=2**63)]
    seed: Annotated[int, Bounds(ge=0, lt=2**63)]
    quartet_version: str


class PlanIdentity:
    """A plan's parts but for what nobody executes, as a key of dictionaries whose hash is taken once."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, *parts: object) -> None:
        self._parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlanIdentity) and self._parts == other._parts


@record
class Plan(_Remembering):
    """Everything chosen for one job. See docs/formats.md for the file.

    Raises PlanError when the parts contradict each other.
    """

    made_for: MadeFor
    shape: ModelShape
    layout: Layout
    split: Split
    schedule: ScheduleChoice
    mapping: Mapping
    provenance: Provenance
    prediction: Prediction | None = None
    measurement: Comparison | None = None
    schema_version: Literal[1] = 1

    def __post_init__(self) -> None:
        _check_split(self)
        _check_schedule(self)
        _check_mapping(self)

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON without the digest itself."""
        return digest(dump(self))

    @property
    def key(self) -> str:
        """sha256 of the plan without its provenance, prediction and measurement."""
        return self.remembered("key", lambda: digest(self._bare()))

    @property
    def identity(self) -> PlanIdentity:
        """A key that differs between the plans of one run, cheaper than `key`."""
        return self.remembered("identity", self._identity)

    def _identity(self) -> PlanIdentity:
        custom = self.schedule.custom
        family = None if custom is None else repr(custom.family)
        return PlanIdentity(self.shape, self.layout, self.split, self.schedule, family, self.mapping.key)

    @property
    def execution(self) -> str:
        """The key without the origin of a custom order: equal for all plans that execute the same actions."""
        custom = self.schedule.custom
        if custom is None:
            return self.key
        bare = replace(self.schedule, custom=custom.bare)
        return self.remembered("execution", lambda: digest({**self._bare(), "schedule": dump(bare)}))

    def _bare(self) -> dict[str, Any]:
        """The plan as data, as nobody has made, predicted or measured it."""
        nobody = Provenance(run="", trial=0, seed=0, quartet_version="")
        content = {**dump(self), "prediction": None, "measurement": None, "provenance": dump(nobody)}
        made_for = {name: value for name, value in content["made_for"].items() if name not in _NOT_IN_KEYS}
        return {**content, "made_for": made_for}

    @property
    def num_microbatches(self) -> int:
        """Microbatches an iteration."""
        return self.layout.num_microbatches(self.made_for.global_batch_size)

    @property
    def is_other_model(self) -> bool:
        """Whether it trains another shape than the user's own (class D)."""
        return self.shape != self.made_for.shape

    @property
    def shape_label(self) -> str:
        """The shape's label, with what is not in the proportions of the user's own."""
        return self.shape.label_beside(self.made_for.shape)


def stock_schedule(layout: Layout) -> ScheduleName:
    """The stock schedule of a layout."""
    if layout.pipeline_parallel == 1:
        return "no-pipelining"
    return "1f1b" if layout.virtual_stages == 1 else "interleaved"


def _check_split(plan: Plan) -> None:
    counts = plan.split.transformer_layers_per_stage
    if len(counts) != plan.layout.num_stages:
        raise PlanError(
            f"split: {len(counts)} counts; one for each of {plan.layout.num_stages} stages is needed"
        )
    if min(counts) < 0 or sum(counts) != plan.shape.num_layers:
        raise PlanError(
            f"split: {list(counts)}; counts must be >= 0 and sum to {plan.shape.num_layers} layers"
        )
    if plan.split.mtp_before_last:
        if not plan.made_for.mtp_layers or len(counts) < 2 or counts[-1]:
            raise PlanError(
                f"split.mtp_before_last: {list(counts)}; needs layers of multi-token prediction "
                "(made_for.mtp_layers) and a last stage without any layer"
            )
        if plan.schedule.custom is not None:
            raise PlanError(
                "split.mtp_before_last: the plugin's schedules run multi-token prediction on the last stage"
            )
    if 0 in counts[1 : plan.split.mtp_stage_index]:
        raise PlanError(f"split: {list(counts)}; only the first and the last stage may hold no layer")


def _check_schedule(plan: Plan) -> None:
    layout = plan.layout
    if plan.schedule.name == "custom" or plan.schedule.custom is not None:
        _check_custom(plan)
        return
    expected = stock_schedule(layout)
    if plan.schedule.name != expected:
        raise PlanError(
            f"schedule.name: {plan.schedule.name!r}; pipeline_parallel {layout.pipeline_parallel} with "
            f"{layout.virtual_stages} virtual stages needs {expected!r}"
        )
    microbatches = plan.num_microbatches
    group = plan.schedule.group
    if expected != "interleaved":
        if group is not None:
            raise PlanError(f"schedule.group: {group}; only the interleaved schedule has a group")
    elif group is None or not layout.pipeline_parallel <= group <= max(
        microbatches, layout.pipeline_parallel
    ):
        raise PlanError(
            f"schedule.group: {group}; must be from pipeline_parallel ({layout.pipeline_parallel}) "
            f"to the microbatches ({microbatches})"
        )


def _check_custom(plan: Plan) -> None:
    layout, custom = plan.layout, plan.schedule.custom
    if plan.schedule.name != "custom" or custom is None:
        raise PlanError(
            f"schedule.name: {plan.schedule.name!r} {'without' if custom is None else 'with'} a custom part; "
            "the two go together"
        )
    if plan.schedule.group is not None:
        raise PlanError(f"schedule.group: {plan.schedule.group}; only the interleaved schedule has a group")
    if (custom.num_devices, len(custom.placement)) != (layout.pipeline_parallel, layout.num_stages):
        raise PlanError(
            f"schedule.custom.placement: {len(custom.placement)} stages on {custom.num_devices} ranks; the "
            f"layout has {layout.num_stages} on {layout.pipeline_parallel}"
        )


def _check_mapping(plan: Plan) -> None:
    nodes, slots = plan.made_for.nodes, plan.mapping.slots
    if plan.layout.world_size != plan.made_for.world_size:
        raise PlanError(
            f"layout: {plan.layout.label} needs {plan.layout.world_size} processes; "
            f"made_for.world_size is {plan.made_for.world_size}"
        )
    num_slots = sum(plan.made_for.slots_of_nodes)
    if plan.made_for.world_size > MAX_RANKS or num_slots != plan.made_for.world_size:
        raise PlanError(
            f"made_for: {num_slots} slots on {len(nodes)} nodes; must equal "
            f"world_size {plan.made_for.world_size}, at most {MAX_RANKS}"
        )
    if plan.mapping.indices(plan.made_for.slots_of_nodes) is None:
        raise PlanError(
            f"mapping.slots: {len(slots)} entries; every slot of made_for.nodes exactly once is needed"
        )
    if slots[0].node != 0:
        raise PlanError(
            f"mapping.slots[0]: node {slots[0].node}; RANK 0 must stay on node 0, the master's host"
        )


def read_plan(path: Path) -> Plan:
    """Read and check a plan file. Raises PlanError in one line: the field, the value and the rule."""
    try:
        data = read_json(path, max_bytes=MAX_BYTES)
        if not isinstance(data, dict):
            raise PlanError(f"{path}: a plan is a JSON object; this is a {type(data).__name__}")
        stated = data.pop("digest", None)
        if not isinstance(stated, str):
            raise PlanError(f"{path}: digest: missing; this is no plan of `quartet tune` or `quartet plan`")
        actual = digest(data)
        if stated != actual:
            raise PlanError(
                f"{path}: digest {stated[:12]!r} does not match its content ({actual[:12]}); "
                "the file was edited or damaged: create it again with `quartet tune`"
            )
        return parse(Plan, data, where=str(path))
    except PlanError:
        raise
    except QuartetError as error:
        raise PlanError(str(error)) from error


def write_plan(plan: Plan, *, path: Path) -> None:
    """Write the plan with its digest, whole or not at all."""
    write_json_atomic(path, {**dump(plan), "digest": plan.digest})
