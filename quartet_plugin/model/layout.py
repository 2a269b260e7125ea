"""The layout, which divides a model over devices: degrees of parallelism, micro-batch, memory options."""

from dataclasses import field, replace
from typing import Annotated, Literal

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.schema import ADDED, Bounds, Length, Matches, record
from quartet_plugin.model.tensor_partition import TensorPartition

Recompute = Literal["none", "selective", "full"]
# A fraction, or words or numbers with commas or + between, never free text.
_TEXT = r"0\.[0-9]{1,6}|[a-z0-9][a-z0-9_-]*([,+][a-z0-9][a-z0-9_-]*)*"
# The value of a setting.
SettingValue = (
    bool | Annotated[int, Bounds(ge=0, le=2**53)] | Annotated[str, Length(most=200), Matches(pattern=_TEXT)]
)


@record
class Setting:
    """A setting of the framework by the name of its knob (space/knobs), and its value."""

    name: Annotated[str, Length(most=64), Matches(pattern=r"[a-z][a-z0-9_]*")]
    value: SettingValue

    @property
    def label(self) -> str:
        """The setting for tables: `overlap_grad_reduce on`, `ddp_bucket_size 40000000`."""
        value = self.value
        return f"{self.name} {('off', 'on')[value] if isinstance(value, bool) else value}"


@record
class Layout:
    """Degrees of parallelism, micro-batch size and memory options of one job.

    `virtual_stages` is the number of chunks a device. `reduce_bucket_size` and `allgather_bucket_size` are
    DeepSpeed's, in elements, where a sharded optimizer reduces and gathers in buckets; None leaves the
    ds_config's own. `settings` are those that the plan changes, by name; a setting that is absent stays as
    the command has it. `tensor_partition` says how a layer's linears are cut where that is not the
    framework's own way. Raises ConfigError for a degree below 1.
    """

    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    virtual_stages: int
    context_parallel: int
    expert_parallel: int
    micro_batch_size: int
    sequence_parallel: bool
    distributed_optimizer: bool
    recompute: Recompute
    reduce_bucket_size: int | None = field(default=None, metadata=ADDED)
    allgather_bucket_size: int | None = field(default=None, metadata=ADDED)
    settings: Annotated[tuple[Setting, ...], Length(least=1, most=64)] | None = field(
        default=None, metadata=ADDED
    )
    tensor_partition: TensorPartition | None = field(default=None, metadata=ADDED)

    def __post_init__(self) -> None:
        for name in (
            "tensor_parallel",
            "pipeline_parallel",
            "data_parallel",
            "virtual_stages",
            "context_parallel",
            "expert_parallel",
            "micro_batch_size",
        ):
            value = getattr(self, name)
            if not 1 <= value <= 2**20:
                raise ConfigError(f"layout.{name}: {value}; must be from 1 to 2^20")
        for name in ("reduce_bucket_size", "allgather_bucket_size"):
            size = getattr(self, name)
            if size is None:
                continue
            # DeepSpeed wants a multiple of its alignment, which is 2 for half precision.
            if not 2 <= size <= 2**40 or size % 2:
                raise ConfigError(f"layout.{name}: {size}; must be an even number from 2 to 2^40")
            if not self.distributed_optimizer:
                raise ConfigError(f"layout.{name}: {size}; buckets go with distributed_optimizer")
        names = [setting.name for setting in self.settings or ()]
        if names != sorted(set(names)):
            raise ConfigError(f"layout.settings: {', '.join(names)}; must be in order of names, each once")
        if self.pipeline_parallel == 1 and self.virtual_stages > 1:
            raise ConfigError(
                f"layout.virtual_stages: {self.virtual_stages}; virtual stages need pipeline_parallel > 1"
            )
        if self.tensor_partition is not None:
            self._check_partition(self.tensor_partition)

    def _check_partition(self, partition: TensorPartition) -> None:
        if not self.sequence_parallel:
            raise ConfigError(f"layout.tensor_partition: {partition.label}; goes with sequence_parallel")
        try:
            partition.check_devices(self.tensor_parallel)
        except ConfigError as error:
            raise ConfigError(f"layout.tensor_partition: {error}") from None

    @property
    def world_size(self) -> int:
        """Processes, one a device."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel * self.context_parallel

    @property
    def needs_whole_experts(self) -> bool:
        """Whether experts are spread over tensor-parallel ranks, too, so that no two of these share one."""
        return bool(self.data_parallel * self.context_parallel % self.expert_parallel)

    @property
    def num_stages(self) -> int:
        """Pipeline stages, all devices together."""
        return self.pipeline_parallel * self.virtual_stages

    def setting(self, name: str) -> SettingValue | None:
        """The value of a setting that the plan changes; None where it stays as the command has it."""
        # Asked for every knob of every plan: most plans have no settings.
        for setting in self.settings or ():
            if setting.name == name:
                return setting.value
        return None

    def with_setting(self, name: str, value: SettingValue | None) -> "Layout":
        """The layout with one setting changed; None leaves it to the command."""
        kept = [setting for setting in self.settings or () if setting.name != name]
        if value is not None:
            kept.append(Setting(name=name, value=value))
        return replace(self, settings=tuple(sorted(kept, key=lambda setting: setting.name)) or None)

    @property
    def batching(self) -> tuple[int, int]:
        """The micro-batch size and the number of replicas, which decide the samples of a microbatch."""
        return self.micro_batch_size, self.data_parallel

    @property
    def reductions(self) -> tuple[object, ...]:
        """The parts that decide in which order sums over samples and devices are rounded: class B."""
        return (
            self.tensor_parallel,
            self.data_parallel,
            self.context_parallel,
            self.expert_parallel,
            self.micro_batch_size,
            self.sequence_parallel,
            self.distributed_optimizer,
            self.settings,
            self.tensor_partition,
        )

    def num_microbatches(self, global_batch_size: int) -> int:
        """Microbatches an iteration. Raises ConfigError where the batch does not divide."""
        sequences = self.micro_batch_size * self.data_parallel
        if global_batch_size % sequences:
            raise ConfigError(
                f"global batch size {global_batch_size}: must be a multiple of "
                f"micro_batch_size x data_parallel ({self.micro_batch_size} x {self.data_parallel})"
            )
        return global_batch_size // sequences

    @property
    def degrees(self) -> tuple[int, int, int, int, int, int]:
        """TP, PP, DP, virtual stages, CP, EP."""
        return (
            self.tensor_parallel,
            self.pipeline_parallel,
            self.data_parallel,
            self.virtual_stages,
            self.context_parallel,
            self.expert_parallel,
        )

    @property
    def label(self) -> str:
        """A short name: degrees that are not 1, micro-batch, partition, bucket sizes and settings."""
        degrees = (
            ("tp", self.tensor_parallel),
            ("pp", self.pipeline_parallel),
            ("v", self.virtual_stages),
            ("dp", self.data_parallel),
            ("cp", self.context_parallel),
            ("ep", self.expert_parallel),
        )
        used = [f"{name}{degree}" for name, degree in degrees if degree > 1]
        buckets = (("reduce", self.reduce_bucket_size), ("gather", self.allgather_bucket_size))
        sizes = [f"{name} {size:.3g}" for name, size in buckets if size is not None]
        settings = [setting.label for setting in self.settings or ()]
        cut = [] if self.tensor_partition is None else [f"partition {self.tensor_partition.label}"]
        return " ".join([*used, f"mb{self.micro_batch_size}", *cut, *sizes, *settings])
