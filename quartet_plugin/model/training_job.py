"""The training job that the framework resolved from the user's command."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import ScheduleChoice, Split
from quartet_plugin.model.schema import Bounds, Length, parse, record
from quartet_plugin.model.shape import ModelShape

Name = Annotated[str, Length(most=512)]
Count = Annotated[int, Bounds(ge=0, le=2**53)]


@record
class TrainingJob:
    """What the framework resolved from the user's command, as RANK 0 reported it.

    `split` is None for a model that is no list of like layers.
    """

    framework: Name
    framework_version: Name
    torch_version: Name
    shape: ModelShape
    layout: Layout
    split: Split | None
    schedule: ScheduleChoice
    global_batch_size: Annotated[int, Bounds(ge=1, le=2**31)]
    train_iters: Count
    precision: Literal["fp32", "bf16", "fp16"]
    features: Annotated[tuple[Name, ...], Length(most=1_000)]
    neutralised: Annotated[tuple[Name, ...], Length(most=1_000)]


def parse_training_job(job: Mapping[str, Any], *, where: str = "job") -> TrainingJob:
    """RANK 0's `job` as a checked object. Raises ConfigError."""

    return parse(TrainingJob, job, where=where)
