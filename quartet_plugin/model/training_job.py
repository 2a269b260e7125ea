"""What the framework resolved from the user's command, as RANK 0 reported it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter

from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import ScheduleChoice, Split
from quartet_plugin.model.schema import parse
from quartet_plugin.model.shape import ModelShape

_STRICT: dict[str, object] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
Name = Annotated[str, Field(max_length=512)]
Count = Annotated[int, Field(ge=0, le=2**53)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """What the framework resolved from the user's command, as RANK 0 reported it.

    `split` is None for a model that is no list of like layers.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = _STRICT

    framework: Name
    framework_version: Name
    torch_version: Name
    shape: ModelShape
    layout: Layout
    split: Split | None
    schedule: ScheduleChoice
    global_batch_size: Annotated[int, Field(ge=1, le=2**31)]
    train_iters: Count
    precision: Literal["fp32", "bf16", "fp16"]
    features: Annotated[tuple[Name, ...], Field(max_length=1_000)]
    neutralised: Annotated[tuple[Name, ...], Field(max_length=1_000)]


_JOB: TypeAdapter[TrainingJob] = TypeAdapter(TrainingJob)


def parse_training_job(job: Mapping[str, Any], *, where: str = "job") -> TrainingJob:
    """RANK 0's `job` as a checked object. Raises ConfigError."""

    return parse(_JOB, job, where=where)
