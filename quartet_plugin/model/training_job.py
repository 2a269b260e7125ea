"""The training job that the framework resolved from the user's command."""

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, Any, Literal

from quartet_plugin.model.cluster import Precision
from quartet_plugin.model.hierarchical_context import SIZES
from quartet_plugin.model.job_description import Experts, LatentAttention
from quartet_plugin.model.layout import Layout, Setting, SettingValue
from quartet_plugin.model.packed_lengths import PackedLengths
from quartet_plugin.model.plan import ScheduleChoice, Split
from quartet_plugin.model.schema import ADDED, Bounds, Length, parse, record
from quartet_plugin.model.shape import MAX_LAYERS, LayerKinds, ModelShape

Name = Annotated[str, Length(most=512)]
Count = Annotated[int, Bounds(ge=0, le=2**53)]
LayerNumbers = Annotated[tuple[Annotated[int, Bounds(ge=0, le=MAX_LAYERS)], ...], Length(most=MAX_LAYERS + 1)]


@record
class TrainingJob:
    """What the framework resolved from the user's command, as RANK 0 reported it."""

    framework: Name
    framework_version: Name
    torch_version: Name
    shape: ModelShape
    layout: Layout
    split: Split | None
    """The split; None for a model that is no list of layers."""
    schedule: ScheduleChoice
    global_batch_size: Annotated[int, Bounds(ge=1, le=2**31)]
    train_iters: Count
    precision: Literal["fp32", "bf16", "fp16"]
    features: Annotated[tuple[Name, ...], Length(most=1_000)]
    neutralised: Annotated[tuple[Name, ...], Length(most=1_000)]
    settings: Annotated[tuple[Setting, ...], Length(most=1_000)] | None = field(default=None, metadata=ADDED)
    """The values of the framework's settings that a plan can change.

    None where the report is of a release that did not read them.
    """
    full_backward: Name | None = field(default=None, metadata=ADDED)
    """Why the layers make every backward in full, which no schedule can split; None where they do not."""
    layer_impl: Name | None = field(default=None, metadata=ADDED)
    """The implementation of the layers (`local`, `transformer_engine`)."""
    shares_sequences: bool | None = field(default=None, metadata=ADDED)
    """Whether the attention where trials run gives one answer for any number of devices of a sequence.

    None where that is not known.
    """
    no_custom_schedules: Name | None = field(default=None, metadata=ADDED)
    """Why the plugin's runtime steps aside and the framework's own schedules stay; None where it does not."""
    no_tensor_partition: Name | None = field(default=None, metadata=ADDED)
    """Why layers are cut in the framework's own way alone; None where they need not be."""
    experts: Experts | None = field(default=None, metadata=ADDED)
    """The model's experts; None where it has none, or some that no plan describes."""
    latent: LatentAttention | None = field(default=None, metadata=ADDED)
    """The model's latent attention; None where it has none, or one that no plan describes."""
    mtp_layers: Annotated[int, Bounds(ge=1, le=MAX_LAYERS)] | None = field(default=None, metadata=ADDED)
    """The layers that predict further tokens; None where there are none."""
    mtp_kinds: LayerKinds | None = field(default=None, metadata=ADDED)
    """The layers of each of these in a hybrid model; None where it is one layer as the model's last is."""
    logged_expert_layers: LayerNumbers | None = field(default=None, metadata=ADDED)
    """The layers of a hybrid model, from 0, whose routers record a loss for the framework's log.

    Every pipeline rank needs one of them. Layers of multi-token prediction count as one behind the last. None
    where nothing is logged.
    """
    normalization: Name | None = field(default=None, metadata=ADDED)
    """The norms' kind by the framework's name; None where it was not read."""
    changed_functions: Annotated[tuple[Name, ...], Length(most=1_000)] | None = field(
        default=None, metadata=ADDED
    )
    """The framework's functions whose source is not a known one, which keeps custom schedules off."""
    accepted_sources: Annotated[tuple[Name, ...], Length(most=1_000)] | None = field(
        default=None, metadata=ADDED
    )
    """The changed functions, with their sources, that the user accepted; None where nothing was."""
    stage_divisor: Annotated[int, Bounds(ge=2, le=2**16)] | None = field(default=None, metadata=ADDED)
    """How many times fewer stages and layers this job has, a trial's, than the training.

    None where a replica of the training has no more processes than a trial.
    """
    packed: PackedLengths | None = field(default=None, metadata=ADDED)
    """The documents packed into its sequences, as all ranks counted them; None where nothing says them."""

    @property
    def product_precision(self) -> Precision:
        """The format of the layers' products: a narrow one that the command asks for, else the job's."""
        narrow: tuple[Precision, ...] = ("fp4", "fp8")
        return next((name for name in narrow if name in self.features), self.precision)

    def setting(self, name: str) -> SettingValue | None:
        """The command's value of a setting; None where it was not read."""
        # Asked for every knob of every plan: most plans have no settings.
        for setting in self.settings or ():
            if setting.name == name:
                return setting.value
        return None


def parse_training_job(job: Mapping[str, Any], *, where: str = "job") -> TrainingJob:
    """RANK 0's `job` as a checked object. Raises ConfigError.

    Reports of older releases have --hybrid-context-parallel under the name of hierarchical sizes.
    """
    parsed = parse(TrainingJob, job, where=where)
    if parsed.setting(SIZES) is not None:
        return parsed
    names = {"hierarchical_context_parallel": "hybrid_context_parallel"}
    return replace(parsed, features=tuple(names.get(name, name) for name in parsed.features))
