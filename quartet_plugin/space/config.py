"""The `search` section of q.yaml and JOB.yaml: the user's request for every axis.

Three forms hold for every axis: `auto` is tuned, a literal is fixed, a list is searched.
"""

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from quartet_plugin.model.sections import Section
from quartet_plugin.schedule.named import NAMED, Offer

MAX_CHOICES = 64


def _offered(offer: Offer) -> tuple[str, ...]:
    return tuple(name for name, schedule in NAMED.items() if schedule.offer is offer)


SEARCHED = "searched"
STOCK_NAMES = ("no-pipelining", *_offered(Offer.STOCK))
DEFAULT_NAMES = (*_offered(Offer.DEFAULT), SEARCHED)
CUSTOM_NAMES = (*DEFAULT_NAMES, *_offered(Offer.REQUESTED))

if TYPE_CHECKING:
    ScheduleRequest = str
else:
    ScheduleRequest = Literal["stock", *STOCK_NAMES, *CUSTOM_NAMES]

_SPLIT = re.compile(r"auto|stock|even|\d{1,4}(\+\d{1,4}){0,1023}")
_ORDER = re.compile(r"auto|stock|[a-z][a-z0-9-]{0,39}|\d{1,5}(,\d{1,5}){0,65535}")
_SHAPE = re.compile(r"\d{1,6}x\d{1,7}")


def choices(value: Any) -> Any:
    """The choices of a request: a literal is a single one, `auto` is None, no request."""
    if value == "auto":
        return None
    return tuple(value) if isinstance(value, list) else (value,)


def distinct[T](values: tuple[T, ...] | None) -> tuple[T, ...] | None:
    """The choices of a list; raises ValueError for an empty list, too many choices, or one twice."""
    if values is None:
        return None
    if not 1 <= len(values) <= MAX_CHOICES:
        raise ValueError(f"a list has from 1 to {MAX_CHOICES} entries")
    if len(set(values)) != len(values):
        raise ValueError("a list names each choice once")
    return values


def _matching(pattern: re.Pattern[str], rule: str) -> AfterValidator:
    def check(values: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for value in values or ():
            if value == "auto" or not pattern.fullmatch(value):
                raise ValueError(rule)
        return values

    return AfterValidator(check)


_Degree = Annotated[int, Field(ge=1, le=2**20)]
_BucketSize = Annotated[int, Field(ge=2, le=2**40, multiple_of=2)]
Degrees = Annotated[tuple[_Degree, ...] | None, BeforeValidator(choices), AfterValidator(distinct)]
BucketSizes = Annotated[tuple[_BucketSize, ...] | None, BeforeValidator(choices), AfterValidator(distinct)]
_Names = Annotated[tuple[str, ...] | None, BeforeValidator(choices), AfterValidator(distinct)]
Splits = Annotated[_Names, _matching(_SPLIT, "auto, stock, even, or counts like 6+2")]
Orders = Annotated[_Names, _matching(_ORDER, "auto, stock, the name of an order, or slots like 1,0")]
Shapes = Annotated[_Names, _matching(_SHAPE, "layers x hidden size, like 24x2048")]
Schedules = Annotated[tuple[ScheduleRequest, ...] | None, BeforeValidator(choices), AfterValidator(distinct)]


class ScalingConfig(Section):
    """Other shapes of an equal budget; without this section the user's shape is never changed.

    `shapes` lists the labels to choose from, like `24x2048` (layers x hidden size).
    """

    budget: Literal["parameters", "flops"] = Field(
        default="parameters", description="what stays equal: parameters, or model FLOPs a token (flops)"
    )
    tolerance: float = Field(
        default=0.02, gt=0.0, le=0.5, description="the largest relative deviation from the budget"
    )
    depth_width_band: float = Field(
        default=4.0, ge=1.0, le=64.0, description="how many times depth over width may differ from yours"
    )
    max_shapes: int = Field(default=8, ge=2, le=MAX_CHOICES, description="shapes that are tried, at most")
    shapes: Shapes = Field(
        default=None, description="layers x hidden size, like 24x2048; auto: by the budget"
    )


class _Axes(Section):
    """The axes of a search and of its rules."""

    tensor_parallel: Degrees = Field(default=None, description="devices that share each layer")
    pipeline_parallel: Degrees = Field(default=None, description="devices that the layers are spread over")
    data_parallel: Degrees = Field(default=None, description="copies of the model")
    virtual_stages: Degrees = Field(default=None, description="stages a device")
    micro_batch_size: Degrees = Field(default=None, description="sequences a microbatch")
    group: Degrees = Field(default=None, description="microbatches a group of the interleaved schedule")
    split: Splits = Field(default=None, description="layers a stage: even, stock, or counts like 6+2")
    schedule: Schedules = Field(
        default=None, description="a name of `quartet schedule list`, or searched; ours pass the parity gate"
    )
    mapping: Orders = Field(
        default=None, description="ranks on devices: stock, an order's name, or slots like 1,0"
    )


class Forbidden(_Axes):
    """A rule: a value or a list for some axes; no plan may match all of them."""

    shape: Shapes = None

    @model_validator(mode="after")
    def _names_an_axis(self) -> "Forbidden":
        if not self.axes:
            raise ValueError("names at least one axis with the values that no plan may have")
        return self

    @property
    def axes(self) -> dict[str, tuple[Any, ...]]:
        """The values of each axis that is named."""
        return {name: values for name, values in self if values is not None}

    @property
    def label(self) -> str:
        """The rule as q.yaml has it."""
        words = (f"{name}: {_written(values)}" for name, values in self.axes.items())
        return f"{{{', '.join(words)}}}"


def _written(values: tuple[Any, ...]) -> str:
    words = ", ".join(str(value) for value in values)
    return words if len(values) == 1 else f"[{words}]"


class SearchConfig(_Axes):
    """The axes. None is `auto`. No plan matches one of the `forbid` rules.

    `change_class` limits how far a plan may change the training (docs/support.md): `A` the order of work
    alone, `B` the rounding of reductions, `C` possibly the objective. Another model (D) needs `scaling`.
    """

    reduce_bucket_size: BucketSizes = Field(default=None, description="elements, DeepSpeed with ZeRO 1")
    allgather_bucket_size: BucketSizes = Field(default=None, description="elements, DeepSpeed with ZeRO 1")
    scaling: ScalingConfig | None = Field(
        default=None, description="other widths and depths: another model, so only where this key stands"
    )
    change_class: Literal["A", "B", "C"] = Field(
        default="B",
        description="what may change in training: A its order, B also rounding, C also the objective",
    )
    forbid: Annotated[
        tuple[Forbidden, ...],
        BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else (v,)),
        Field(max_length=MAX_CHOICES),
    ] = Field(default=(), description="rules like {schedule: zb-v}: no plan may match all of one")
