"""`JOB.yaml`: a model, a cluster and a batch to plan for. Strict, and read with the safe YAML loader."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from quartet_plugin.cost.devices import Device, device_named
from quartet_plugin.cost.jobs import machines_of
from quartet_plugin.cost.run import Machines
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import shown, validate
from quartet_plugin.model.layout import Recompute
from quartet_plugin.model.plan import MAX_RANKS
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.search.config import Degrees, SearchConfig, _distinct, _load_yaml

Size = Annotated[int, Field(ge=1, le=2**31)]
Bandwidth = Annotated[float, Field(gt=0, lt=1e20, allow_inf_nan=False)]
VOCABULARY_MULTIPLE = 128


def _choices(value: Any) -> Any:
    if value == "auto":
        return None
    return tuple(value) if isinstance(value, list) else (value,)


Modes = Annotated[tuple[Recompute, ...] | None, BeforeValidator(_choices), AfterValidator(_distinct)]
Switches = Annotated[tuple[bool, ...] | None, BeforeValidator(_choices), AfterValidator(_distinct)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelSection(_Section):
    """The model. What is left open: an FFN of 4 x hidden, as many query groups as heads, no gated FFN.

    Embeddings are tied, and positions learned, where the FFN is not gated and queries are not grouped.
    """

    num_layers: Size
    hidden_size: Size
    num_attention_heads: Size
    seq_length: Size
    vocab_size: Size
    ffn_hidden_size: Size | None = None
    num_query_groups: Size | None = None
    kv_channels: Size | None = None
    max_position_embeddings: Size | None = None
    gated_ffn: bool = False
    tied_embeddings: bool | None = None
    position_embedding: Literal["learned_absolute", "rope", "none"] | None = None
    precision: Literal["bf16", "fp16"] = "bf16"


class ClusterSection(_Section):
    """The devices, by name; bandwidths a device and direction where they are not the device's usual ones."""

    device: Annotated[str, Field(min_length=1, max_length=200)]
    num_nodes: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    devices_per_node: Annotated[int, Field(ge=1, le=1024)] | None = None
    scale_up_bandwidth_bytes_per_s: Bandwidth | None = None
    scale_out_bandwidth_bytes_per_s: Bandwidth | None = None
    memory_bytes: Annotated[int, Field(ge=1, le=2**50)] | None = None


class BatchSection(_Section):
    """Sequences an iteration."""

    global_batch_size: Size


class PlanSearch(SearchConfig):
    """The tuner's axes, and those that only the planner moves. A key left out is `auto`, but one is 1."""

    context_parallel: Degrees = (1,)
    recompute: Modes = None
    distributed_optimizer: Switches = None


class _JobFile(_Section):
    model: ModelSection
    cluster: ClusterSection
    batch: BatchSection
    search: PlanSearch = PlanSearch()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanJob:
    """What is planned for; `shape` has its vocabulary padded for every tensor-parallel degree."""

    shape: ModelShape
    machines: Machines
    global_batch_size: int
    precision: Literal["bf16", "fp16"]
    search: PlanSearch


def read_job(path: Path, *, devices: Mapping[str, Device] | None = None) -> PlanJob:
    """The job in `path`; `devices` go before the library's. Raises ConfigError in one line."""
    return parse_job(_load_yaml(path), where=str(path), devices=devices)


def parse_job(data: Any, *, where: str, devices: Mapping[str, Device] | None = None) -> PlanJob:
    """Plain data as a job. Raises ConfigError: the field, the value and the rule."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: a job is a mapping with model, cluster and batch; this is {shown(data)}")
    if "search" in data and data["search"] is None:
        data = {key: value for key, value in data.items() if key != "search"}
    file = validate(_JobFile, data, where=where)
    try:
        machines = _machines(file.cluster, devices)
        _check_search(file.search)
        return PlanJob(
            shape=_shape(file.model, machines=machines),
            machines=machines,
            global_batch_size=file.batch.global_batch_size,
            precision=file.model.precision,
            search=file.search,
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _machines(cluster: ClusterSection, devices: Mapping[str, Device] | None) -> Machines:
    device = device_named(cluster.device, extra=devices)
    per_node = cluster.devices_per_node or device.devices_per_node
    if cluster.num_nodes * per_node > MAX_RANKS:
        raise ConfigError(
            f"cluster: {cluster.num_nodes} nodes x {per_node} devices; must be at most {MAX_RANKS} devices"
        )
    found = machines_of(device, num_devices=cluster.num_nodes * per_node, devices_per_node=per_node)
    return replace(
        found,
        scale_up_bytes_per_s=cluster.scale_up_bandwidth_bytes_per_s or found.scale_up_bytes_per_s,
        scale_out_bytes_per_s=cluster.scale_out_bandwidth_bytes_per_s or found.scale_out_bytes_per_s,
        memory_bytes=cluster.memory_bytes or found.memory_bytes,
    )


def _shape(model: ModelSection, *, machines: Machines) -> ModelShape:
    heads = model.num_attention_heads
    if model.kv_channels is None and model.hidden_size % heads:
        raise ConfigError(
            f"model.hidden_size: {model.hidden_size}; must be a multiple of num_attention_heads ({heads}), "
            "or give kv_channels"
        )
    plain = not model.gated_ffn and model.num_query_groups in (None, heads)
    multiple = VOCABULARY_MULTIPLE * machines.devices_per_node
    return ModelShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size or 4 * model.hidden_size,
        num_attention_heads=heads,
        num_query_groups=model.num_query_groups or heads,
        kv_channels=model.kv_channels or model.hidden_size // heads,
        seq_length=model.seq_length,
        vocab_size=-(-model.vocab_size // multiple) * multiple,
        max_position_embeddings=model.max_position_embeddings or model.seq_length,
        gated_ffn=model.gated_ffn,
        tied_embeddings=plain if model.tied_embeddings is None else model.tied_embeddings,
        position_embedding=model.position_embedding or ("learned_absolute" if plain else "rope"),
    )


def _check_search(search: PlanSearch) -> None:
    if any(name != "stock" for name in search.mapping or ()):
        raise ConfigError(f"search.mapping: {search.mapping}; a plan without a run has the stock order")
    if search.group is not None:
        raise ConfigError(
            f"search.group: {search.group}; a plan without a run has groups of pipeline_parallel microbatches"
        )
    if any(name not in ("stock", "even") for name in search.split or ()) or len(search.split or ()) > 1:
        raise ConfigError(f"search.split: {search.split}; must be auto (balanced) or even")
