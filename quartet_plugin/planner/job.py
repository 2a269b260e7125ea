"""`JOB.yaml`: a model, a cluster and a batch to plan for. The reader is strict and uses the safe YAML loader.

The cluster is equal devices by name (`ClusterSection`), or a cluster file (docs/formats.md), named or inline.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from quartet_plugin.cost.cluster import (
    ResolvedCluster,
    look_up,
    topology_of,
    uniform_cluster_of,
    uniform_topology_of,
)
from quartet_plugin.cost.constants import Constants, fitted
from quartet_plugin.cost.devices import DeviceSpec, device_named
from quartet_plugin.cost.iteration.plan_terms import with_recompute
from quartet_plugin.cost.layer_kinds import priced_layers
from quartet_plugin.cost.run import (
    ON_CPU,
    HalfPrecision,
    ScheduleKind,
    Software,
    TrainingRun,
    UniformCluster,
    mtp_depth_of,
    run_of,
    uniform_cluster_of_device,
    with_layers,
)
from quartet_plugin.cost.software import imbalance_of, with_features, with_settings
from quartet_plugin.errors import ConfigError
from quartet_plugin.mapping.topology import Topology
from quartet_plugin.model.cluster import parse_cluster, read_cluster
from quartet_plugin.model.files import shown
from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.job_description import Experts, JobPrecision, LatentAttention
from quartet_plugin.model.layout import Layout, Recompute, Setting, SettingValue
from quartet_plugin.model.packed_lengths import PackedLengths
from quartet_plugin.model.plan import MAX_RANKS, STOCK, NodeInfo
from quartet_plugin.model.sections import Section, load_yaml, validate
from quartet_plugin.model.shape import LayerKinds, ModelShape
from quartet_plugin.planner.hybrid_keys import check_hybrid_keys, with_pattern_counts
from quartet_plugin.planner.model_presets import with_preset
from quartet_plugin.planner.model_section import ModelSection, Size, described_model
from quartet_plugin.space.config import (
    SEARCHED,
    TABLE_SCHEDULES,
    Degrees,
    SearchConfig,
    choices,
    distinct,
)
from quartet_plugin.space.features import Axis
from quartet_plugin.space.forbidden import check_table_rules
from quartet_plugin.space.knobs.knob import SettingKnob
from quartet_plugin.space.knobs.mtp_stage import BEFORE_LAST, LAST, MTP_STAGE, asked_mtp_stages
from quartet_plugin.space.knobs.overlap_grad_reduce import OVERLAP_GRAD_REDUCE
from quartet_plugin.space.knobs.registry import LAYOUT_KNOBS, SETTINGS
from quartet_plugin.space.knobs.token_dispatcher import ALLGATHER, TOKEN_DISPATCHER
from quartet_plugin.space.rules import LayoutRules

Bandwidth = Annotated[float, Field(gt=0, lt=1e20, allow_inf_nan=False)]
# Generations of devices that are no accelerators, or unknown.
PROCESSORS = ("cpu", "plain")
# GPUs on which Megatron refuses grouped products of experts (megatron/training/arguments.py).
WITHOUT_GROUPED_GEMM = ("volta",)
SCHEDULES = ("stock", *TABLE_SCHEDULES, SEARCHED)


Modes = Annotated[tuple[Recompute, ...] | None, BeforeValidator(choices), AfterValidator(distinct)]
Switches = Annotated[tuple[bool, ...] | None, BeforeValidator(choices), AfterValidator(distinct)]
Groups = Annotated[
    tuple[Literal["context", "expert"], ...], BeforeValidator(choices), AfterValidator(distinct)
]


class ClusterSection(Section):
    """The devices, by name; bandwidths a device and direction where they are not the device's usual ones."""

    device: Annotated[str, Field(min_length=1, max_length=200)]
    num_nodes: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    devices_per_node: Annotated[int, Field(ge=1, le=1024)] | None = None
    scale_up_bandwidth_bytes_per_s: Bandwidth | None = None
    scale_out_bandwidth_bytes_per_s: Bandwidth | None = None
    memory_bytes: Annotated[int, Field(ge=1, le=2**50)] | None = None


class BatchSection(Section):
    """Sequences an iteration."""

    global_batch_size: Size


class PlanSearch(SearchConfig):
    """The tuner's axes, and those that only the planner moves. Defaults are `auto`, context parallelism is 1.

    `inside` names the groups that may not leave a scale-up domain, because their dispatcher cannot.
    """

    context_parallel: Degrees = (1,)
    expert_parallel: Degrees = None
    inside: Groups = ()
    recompute: Modes = None
    distributed_optimizer: Switches = None


class ClusterFileSection(Section):
    """A cluster file; a relative path starts at the job's folder."""

    file: Annotated[str, Field(min_length=1, max_length=4096)]


Price = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Tokens = Annotated[float, Field(gt=0, le=1e18, allow_inf_nan=False)]


class CostSection(Section):
    """The price of one device for one hour, in any currency, and the tokens that the job trains on."""

    price_per_device_hour: Price | None = None
    tokens: Tokens | None = None


class _JobFile(Section):
    model: ModelSection
    batch: BatchSection
    search: PlanSearch = PlanSearch()
    cost: CostSection = CostSection()


# The keys of a JOB.yaml.
JOB_SECTIONS = ("cluster", *_JobFile.model_fields)


# The release that a plan is for where no Megatron is here and none is asked for.
DEFAULT_RELEASE = "0.19.2"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A request to plan; `shape` has its vocabulary padded for every tensor-parallel degree, from the job's
    `vocab_size` where that is known.

    `machines` are equal devices; where `cluster` is given they have its fastest device and slowest link.
    `rules` are those of a study's space, None for a job that is described and not run. `features`
    and `settings` are those of a command, or of recipes where there is none, that limit its plans or are
    priced, and that no other field has. `batching_features` of a command are those by which another
    micro-batch or DP may change the training objective. `baseline_split` is the number of layers of each
    stage of the command, which `stock` in `search.split` means; None without a command, where `stock` means
    the even split. `mtp_kinds` are the layers of each depth of multi-token prediction in a hybrid model.
    `logged_expert_layers` of one are those of which every pipeline rank needs one
    (`TrainingJob.logged_expert_layers`).
    `no_custom_schedules` is why none runs with the command's flags, None where some may. `packed` are the
    documents in a study's sequences, None where nothing counted them. `release` is that of Megatron for
    which the plans of a described job are made.
    """

    shape: ModelShape
    machines: UniformCluster
    global_batch_size: int
    precision: JobPrecision
    search: PlanSearch
    experts: Experts | None = None
    latent: LatentAttention | None = None
    cluster: ResolvedCluster | None = None
    cost: CostSection = field(default_factory=CostSection)
    vocab_size: int | None = None
    rules: LayoutRules | None = None
    normalization: str | None = None
    mtp_layers: int = 0
    mtp_kinds: LayerKinds | None = None
    logged_expert_layers: tuple[int, ...] = ()
    features: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    batching_features: tuple[str, ...] = ()
    baseline_split: tuple[int, ...] | None = None
    no_custom_schedules: str | None = None
    packed: PackedLengths | None = None
    release: str = DEFAULT_RELEASE

    @property
    def half(self) -> HalfPrecision:
        """The precision of everything but a layer's matrix products."""
        return "bf16" if self.precision == "fp8" else self.precision

    @property
    def software(self) -> Software:
        """The software's properties: on processors plain fp32 operations."""
        return self._software_with(None)

    def _software_with(self, settings: tuple[Setting, ...] | None) -> Software:
        on_cpu = _is_on_processors(self.precision, self.machines.device)
        return _software_of(on_cpu, self.features, (*self.settings, *(settings or ())))

    def values_in(self, settings: tuple[Setting, ...] | None) -> dict[str, SettingValue]:
        """The values of the job's settings, with those that a layout changes, by name."""
        return {setting.name: setting.value for setting in (*self.settings, *(settings or ()))}

    @property
    def mtp_stages(self) -> tuple[str, ...]:
        """The stages of multi-token prediction that plans may have; `last` without such layers."""
        if not self.mtp_layers:
            return (LAST,)
        is_kept = self.rules is not None and Axis.SPLIT in self.rules.locked
        return asked_mtp_stages(self.search.mtp_stage, features=self.features, is_kept=is_kept)

    @property
    def has_mtp_before_last(self) -> bool:
        """Whether every pipeline has multi-token prediction on the stage before the last one."""
        return self.mtp_stages == (BEFORE_LAST,)

    def of_mtp_stage(self, stage: str) -> "PlanRequest":
        """The request for plans with multi-token prediction on this stage alone."""
        if self.mtp_stages == (stage,):
            return self
        asked, rules = {MTP_STAGE.name: (stage,)}, self.rules
        if rules is not None:
            rules = replace(rules, search=rules.search.model_copy(update=asked))
        return replace(self, search=self.search.model_copy(update=asked), rules=rules)

    def run(
        self,
        shape: ModelShape,
        layout: Layout,
        split: tuple[int, ...],
        *,
        schedule: ScheduleKind | None = None,
        group: int | None = None,
        is_mtp_before_last: bool | None = None,
    ) -> TrainingRun:
        """The run that a planned layout stands for; `schedule` None is the stock one.

        `split` may have another number of layers than the shape: each is then a mean layer of the shape.
        `is_mtp_before_last` None: where the request has multi-token prediction on that stage alone.
        """
        if is_mtp_before_last is None:
            is_mtp_before_last = layout.pipeline_parallel > 1 and self.has_mtp_before_last
        is_whole = sum(split) == shape.num_layers
        layers = priced_layers(shape if is_whole else shape.without_pattern, self.experts, self.latent)
        values = self.values_in(layout.settings)
        run = run_of(
            layers.shape if is_whole else replace(layers.shape, num_layers=sum(split)),
            layout,
            global_batch_size=self.global_batch_size,
            layers_per_stage=split,
            cluster=self.machines,
            schedule=schedule,
            group=group,
            precision=self.half,
            software=self._software_with(layout.settings),
        )
        depth = None
        if self.mtp_layers:
            depth = mtp_depth_of(shape, self.experts, self.latent, self.mtp_kinds)
        return replace(
            with_layers(with_recompute(run, values) if values else run, layers),
            matmul=self.precision,
            normalization=self.normalization,
            mtp_layers=self.mtp_layers,
            mtp_depth=depth,
            is_mtp_before_last=is_mtp_before_last,
            has_whole_experts=values.get("expert_tensor_parallel") == 1,
            imbalance=imbalance_of(self.features),
            packed=self.packed,
        )

    @property
    def nodes(self) -> tuple[NodeInfo, ...]:
        """The nodes of the cluster, numbered where it does not name them."""
        if self.cluster is not None:
            return self.cluster.nodes
        per_node = self.machines.devices_per_node
        node_class = f"{self.machines.device.name} x{per_node}"
        return tuple(
            NodeInfo(host=f"node-{index:04d}", node_class=node_class, num_slots=per_node)
            for index in range(self.machines.num_devices // per_node)
        )

    def topology(self, constants: Constants) -> Topology:
        """The slots of the cluster and their links."""
        if self.cluster is None:
            return uniform_topology_of(self.machines, constants)
        return topology_of(self.cluster, constants)

    @property
    def has_unequal_devices(self) -> bool:
        """Whether some slots are slower than others."""
        return self.cluster is not None and bool((self.cluster.slowdown > 1).any())

    @property
    def largest_tensor_parallel(self) -> int:
        """The number that every tensor-parallel size divides, so that no group leaves its node and domain."""
        return self.machines.devices_per_node if self.cluster is None else self.cluster.largest_block


def read_job(path: Path, *, devices: Mapping[str, DeviceSpec] | None = None) -> PlanRequest:
    """The job in `path`; `devices` go before the library's. Raises ConfigError in one line."""
    return parse_job(load_yaml(path), where=str(path), devices=devices, folder=path.parent)


def parse_job(
    data: Any,
    *,
    where: str,
    devices: Mapping[str, DeviceSpec] | None = None,
    folder: Path | None = None,
    has_command: bool = False,
) -> PlanRequest:
    """Plain data as a job; cluster files are looked for in `folder`.

    `has_command`: model and batch are those of a training command, whose own values a plan may keep.
    Raises ConfigError: the field, the value and the rule.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: a job is a mapping with model, cluster and batch; this is {shown(data)}")
    if "search" in data and data["search"] is None:
        data = {key: value for key, value in data.items() if key != "search"}
    if "cluster" not in data:
        raise ConfigError(f"{where}: cluster: missing; the key is required")
    rest = {key: value for key, value in data.items() if key != "cluster"}
    try:
        rest["model"] = with_pattern_counts(with_preset(rest.get("model"), folder=folder))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if rest["model"] is None:
        del rest["model"]
    file = validate(_JobFile, rest, where=where)
    machines, cluster = _cluster(
        data["cluster"], precision=file.model.precision, where=where, devices=devices, folder=folder
    )
    try:
        _check_precision(file.model.precision, machines.device)
        check_hybrid_keys(file.model)
        _check_search(file.search, model=file.model, has_command=has_command)
        _check_orders(file.search, cluster=cluster)
        largest = machines.devices_per_node if cluster is None else cluster.largest_block
        model = described_model(file.model, largest=largest)
        return PlanRequest(
            shape=model.shape,
            machines=machines,
            global_batch_size=file.batch.global_batch_size,
            precision=file.model.precision,
            search=file.search,
            experts=model.experts,
            latent=model.latent,
            cluster=cluster,
            cost=file.cost,
            vocab_size=file.model.vocab_size,
            mtp_layers=file.model.mtp_layers,
            mtp_kinds=model.mtp_kinds,
            logged_expert_layers=model.logged_expert_layers,
            features=_usual_features(file, machines.device),
            settings=_usual_settings(file.search),
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _cluster(
    data: Any,
    *,
    precision: JobPrecision,
    where: str,
    devices: Mapping[str, DeviceSpec] | None,
    folder: Path | None,
) -> tuple[UniformCluster, ResolvedCluster | None]:
    """The machines of any of the three forms, and the cluster where it is described in full."""
    here = f"{where}: cluster"
    if isinstance(data, dict) and ("nodes" in data or "file" in data):
        if "nodes" in data:
            read = parse_cluster(data, where=here)
        else:
            path = Path(validate(ClusterFileSection, data, where=here).file)
            here = str(path)
            read = read_cluster(path if folder is None else folder / path)
        try:
            cluster = look_up(read, precision=precision, devices=devices)
        except ConfigError as error:
            raise ConfigError(f"{here}: {error}") from error
        return uniform_cluster_of(cluster, fitted()), cluster
    section = validate(ClusterSection, data, where=here)
    try:
        return machines_of(section, devices), None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def machines_of(cluster: ClusterSection, devices: Mapping[str, DeviceSpec] | None) -> UniformCluster:
    """The equal devices of a cluster section. Raises ConfigError for an unknown device or too many."""
    device = device_named(cluster.device, extra=devices)
    per_node = cluster.devices_per_node or device.devices_per_node
    if cluster.num_nodes * per_node > MAX_RANKS:
        raise ConfigError(
            f"cluster: {cluster.num_nodes} nodes x {per_node} devices; must be at most {MAX_RANKS} devices"
        )
    machines = uniform_cluster_of_device(
        device, num_devices=cluster.num_nodes * per_node, devices_per_node=per_node
    )
    return replace(
        machines,
        scale_up_bytes_per_s=cluster.scale_up_bandwidth_bytes_per_s or machines.scale_up_bytes_per_s,
        scale_out_bytes_per_s=cluster.scale_out_bandwidth_bytes_per_s or machines.scale_out_bytes_per_s,
        memory_bytes=cluster.memory_bytes or machines.memory_bytes,
    )


def searched_settings(search: SearchConfig) -> list[SettingKnob]:
    """The settings of Megatron that a search does not leave at the command's."""
    return [knob for knob in SETTINGS if search.requested(knob.name) != (STOCK,)]


def _usual_settings(search: PlanSearch) -> tuple[Setting, ...]:
    """What a job without a command has of the settings that it searches: Megatron's without their flags.

    Gradients are reduced beside the backward, which buckets and gathered parameters need, unless that is
    searched. Parts of layers in CUDA graphs have no value: nothing captures graphs.
    """
    asked = searched_settings(search)
    values: dict[str, SettingValue] = {OVERLAP_GRAD_REDUCE.name: True} if asked else {}
    for knob in asked:
        usual = ALLGATHER if knob is TOKEN_DISPATCHER else knob.without_flag
        if usual is not None:
            values[knob.name] = usual
    return tuple(Setting(name=name, value=value) for name, value in sorted(values.items()))


def _usual_features(file: _JobFile, device: DeviceSpec) -> tuple[str, ...]:
    """The features that a job without a command is predicted with, or by which its settings are legal.

    They are those that recipes turn on, and a plan's flags say them.
    """
    model = file.model
    has_experts = model.num_experts is not None
    is_grouped = has_experts and not (
        _is_on_processors(model.precision, device) or device.generation in WITHOUT_GROUPED_GEMM
    )
    is_bare = bool(searched_settings(file.search)) and (has_experts or model.gated_ffn)
    present = {
        "hybrid": model.hybrid_layer_pattern is not None,
        "moe_grouped_gemm": is_grouped,
        "no_linear_bias": is_bare,
    }
    return tuple(name for name, is_on in present.items() if is_on)


@lru_cache(maxsize=1024)
def _software_of(on_cpu: bool, features: tuple[str, ...], settings: tuple[Setting, ...]) -> Software:
    """The software's properties under features and settings; the later setting of a name counts."""
    software = with_features(ON_CPU if on_cpu else Software(), features)
    return with_settings(software, {setting.name: setting.value for setting in settings})


def _is_on_processors(precision: JobPrecision, device: DeviceSpec) -> bool:
    return precision == "fp32" and device.generation in PROCESSORS


def _check_precision(precision: JobPrecision, device: DeviceSpec) -> None:
    if precision == "fp8" and not {"fp8", "fp4"} & set(device.peak_flops):
        raise ConfigError(
            f"model.precision: fp8; {device.name} multiplies in {', '.join(device.peak_flops)} only"
        )


def _check_search(search: PlanSearch, *, model: ModelSection, has_command: bool) -> None:
    if search.change_class == "A" and not has_command:
        raise ConfigError(
            "search.change_class: A; keeps the command's own values, and this job has no command; write the "
            "command after --, or omit the key"
        )
    for knob in LAYOUT_KNOBS:
        requested = search.requested(knob.name)
        if not knob.is_of(MEGATRON.framework) and requested not in (None, (STOCK,)):
            raise ConfigError(
                f"search.{knob.name}: {knob.request_text(requested[0])}; `quartet plan` plans for Megatron, "
                "which has no such knob; omit it"
            )
    check_table_rules(search.forbid)
    unknown = [name for name in search.schedule or () if name not in SCHEDULES]
    if unknown:
        raise ConfigError(
            f"search.schedule: {unknown[0]!r}; `quartet plan` supports {', '.join(SCHEDULES[:-1])} or "
            f"{SCHEDULES[-1]}; use `quartet tune` for schedule files"
        )
    if model.num_experts is None and search.expert_parallel not in (None, (1,)):
        asked = _listed(search.expert_parallel)
        raise ConfigError(f"search.expert_parallel: {asked}; needs model.num_experts; nearest: 1")
    if search.scaling is not None and (model.num_experts, model.latent_attention) != (None, None):
        raise ConfigError("search.scaling: known for dense models with plain attention only; remove it")
    if BEFORE_LAST in (search.mtp_stage or ()) and not model.mtp_layers:
        raise ConfigError(f"search.{MTP_STAGE.name}: {BEFORE_LAST}; needs model.mtp_layers; nearest: {LAST}")
    if search.scaling is not None and model.mtp_layers:
        raise ConfigError("search.scaling: not known with multi-token prediction (mtp_layers); remove it")
    if search.scaling is not None and model.hybrid_layer_pattern is not None:
        raise ConfigError("search.scaling: not known for hybrid models (hybrid_layer_pattern); remove it")
    is_hybrid = model.hybrid_layer_pattern is not None
    counted = "the letters of the pattern" if is_hybrid else "counting transformer layers alone"
    for text in search.split or ():
        if text[0].isdigit() and sum(int(count) for count in text.split("+")) != model.num_layers:
            raise ConfigError(
                f"search.split: {text!r}; must sum to num_layers ({model.num_layers}), {counted}"
            )


def _check_orders(search: PlanSearch, *, cluster: ResolvedCluster | None) -> None:
    """Raises ConfigError for orders of ranks that no plan of the devices can have."""
    named = [name for name in search.mapping or () if name != STOCK]
    if named and cluster is None:
        raise ConfigError(
            f"search.mapping: {_listed(search.mapping or ())}; needs a cluster file, which says where "
            "devices and links differ; otherwise auto (solved) or stock"
        )


def _listed(values: Iterable[object]) -> str:
    """The values of a request as one writes them."""
    return ", ".join(map(str, values))
