"""The `search` section of q.yaml and JOB.yaml: the user's request for every knob.

Three forms hold for every knob: `auto` is tuned, a literal is fixed, a list is searched. `stock`, the
command's own value, is a form of the knobs that have it by default, and of schedule, split and mapping.
"""

import math
import re
import types
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    WrapValidator,
    create_model,
    model_validator,
)

from quartet_plugin.errors import ConfigError
from quartet_plugin.mapping.orders import ORDER_NAMES
from quartet_plugin.model.hierarchical_context import sizes_of, sizes_text
from quartet_plugin.model.plan import STOCK
from quartet_plugin.model.schema import nearest_word
from quartet_plugin.model.sections import Section
from quartet_plugin.model.tensor_partition import RULE as PARTITION_RULE
from quartet_plugin.model.tensor_partition import partition_from_label
from quartet_plugin.schedule.named import NAMED, Offer
from quartet_plugin.schedule.placement import PlacementKind
from quartet_plugin.schedule.search.limits import FREE, FamilyLimits
from quartet_plugin.space.knobs.knob import AUTO, Kind, Knob
from quartet_plugin.space.knobs.registry import KNOBS

MAX_CHOICES = 64


def _offered(offer: Offer) -> tuple[str, ...]:
    return tuple(name for name, schedule in NAMED.items() if schedule.offer is offer)


SEARCHED = "searched"
STOCK_NAMES = ("no-pipelining", *_offered(Offer.STOCK))
DEFAULT_NAMES = (*_offered(Offer.DEFAULT), SEARCHED)
CUSTOM_NAMES = (*DEFAULT_NAMES, *_offered(Offer.REQUESTED))
# The schedules that a plan without a run is ranked with.
TABLE_SCHEDULES = (*STOCK_NAMES, *(name for name in CUSTOM_NAMES if name != SEARCHED))

SCHEDULE_NAMES = ("stock", *STOCK_NAMES, *CUSTOM_NAMES)

_SPLIT = re.compile(r"auto|stock|even|\d{1,4}(\+\d{1,4}){0,1023}")
_ORDER = re.compile(rf"{'|'.join(map(re.escape, ORDER_NAMES))}|\d{{1,5}}(,\d{{1,5}}){{0,65535}}")
_SHAPE = re.compile(r"\d{1,6}x\d{1,7}")
_SCHEDULE = re.compile("|".join(map(re.escape, SCHEDULE_NAMES)))
_SCHEDULE_OR_FILE = re.compile(rf"{_SCHEDULE.pattern}|[^\x00]{{1,4091}}\.json")


def is_schedule_file(name: str) -> bool:
    """Whether a requested schedule is the path of a file."""
    return name.endswith(".json")


def choices(value: Any) -> Any:
    """The choices of a request: a literal is a single one, `auto` is None, no request."""
    if value == AUTO:
        return None
    return tuple(value) if isinstance(value, list) else (value,)


def distinct[T](values: tuple[T, ...] | None) -> tuple[T, ...] | None:
    """The choices of a list; raises ValueError for an empty list, too many choices, or one twice."""
    if values is None:
        return None
    if not 1 <= len(values) <= MAX_CHOICES:
        raise ValueError(f"must have 1 to {MAX_CHOICES} entries")
    if len(set(values)) != len(values):
        raise ValueError("must not repeat an entry")
    return values


def _listed(value: Any) -> Any:
    """The values of a request that has no `auto`: a literal is a single one."""
    if value == AUTO:
        raise ValueError("must list values to try, not auto; omit the key to keep your own value")
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _matching(pattern: re.Pattern[str], rule: str, *, words: Sequence[str] = ()) -> AfterValidator:
    def check(values: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for value in values or ():
            if value == "auto" or not pattern.fullmatch(value):
                raise ValueError(f"{rule}{nearest_word(value, known=words)}")
        return values

    return AfterValidator(check)


_Degree = Annotated[int, Field(ge=1, le=2**20)]
_Size = Annotated[int, Field(ge=2, le=2**40, multiple_of=2)]
Degrees = Annotated[tuple[_Degree, ...] | None, BeforeValidator(choices), AfterValidator(distinct)]
_Names = Annotated[tuple[str, ...] | None, BeforeValidator(choices), AfterValidator(distinct)]
Shapes = Annotated[_Names, _matching(_SHAPE, "layers x hidden size, like 24x2048")]


def _form_of(knob: Knob, *, takes_stock: bool, is_rule: bool) -> Any:
    """The type of a knob's key: `auto`, a value or a list of values, among them `stock` where it is taken.

    A rule of `forbid` names schedules, a search also files of them.
    """
    items: dict[Kind, Any] = {
        "degree": _Degree,
        "size": _Size,
        "sizes": Annotated[str, BeforeValidator(_two_sizes)],
        "switch": bool,
        "word": Annotated[Literal[*(knob.words or ("",))], BeforeValidator(partial(_word_of, knob))],
        "partition": Annotated[str, BeforeValidator(_partition_label)],
    }
    names = f"one of {', '.join(SCHEDULE_NAMES)}"
    patterns: dict[Kind, AfterValidator] = {
        "schedule": _matching(_SCHEDULE, names, words=SCHEDULE_NAMES)
        if is_rule
        else _matching(_SCHEDULE_OR_FILE, f"{names}, or a SCHEDULE.json", words=SCHEDULE_NAMES),
        "split": _matching(_SPLIT, "auto, stock, even, or counts like 6+2", words=("auto", "stock", "even")),
        "order": _matching(
            _ORDER, f"auto, {', '.join(ORDER_NAMES)}, or slots like 1,0", words=("auto", *ORDER_NAMES)
        ),
        "shape": _matching(_SHAPE, "layers x hidden size, like 24x2048"),
    }
    if knob.kind in patterns:
        return Annotated[_Names, patterns[knob.kind]]
    item = items[knob.kind]
    if takes_stock:
        item = Annotated[item, WrapValidator(_stock_or), PlainSerializer(_as_is)]
    items_or_auto: Any = types.GenericAlias(tuple, (item, ...)) | None
    listed = _choices_of_sizes if knob.kind == "sizes" else choices
    return Annotated[items_or_auto, BeforeValidator(listed), AfterValidator(distinct)]


def _rule_of(knob: Knob, value: Any) -> Any:
    """What a rule says of a knob, where `auto` is a word of the knob. Raises ValueError where it is none."""
    if value != AUTO:
        return value
    if AUTO not in knob.words:
        raise ValueError("must be a value or a list; auto is not allowed in search.forbid")
    return [AUTO]


def _stock_or(value: Any, check: Callable[[Any], Any]) -> Any:
    return value if value == STOCK else check(value)


_FfnRatio = Annotated[float, Field(ge=0.5, le=16.0)]
_HeadSize = Annotated[int, Field(ge=8, le=1024, multiple_of=8)]
_AS_LIST = BeforeValidator(_listed)
# A run's folder has an empty list where nothing is named.
_ANY_DISTINCT = AfterValidator(lambda values: distinct(values) if values else values)


class ScalingConfig(Section):
    """Other shapes of an equal budget; without this section the user's shape is never changed.

    `shapes` lists the labels to choose from, like `24x2048` (layers x hidden size). Proportions that are not
    named are kept.
    """

    budget: Literal["parameters", "flops"] = Field(
        default="parameters", description="what stays equal: parameters, or model FLOPs per token (flops)"
    )
    tolerance: float = Field(
        default=0.02, gt=0.0, le=0.5, description="the largest relative deviation from the budget"
    )
    depth_width_band: float = Field(
        default=4.0, ge=1.0, le=64.0, description="factor by which depth over width may differ from yours"
    )
    max_shapes: int = Field(
        default=8, ge=2, le=MAX_CHOICES, description="the largest number of shapes that are tried"
    )
    shapes: Shapes = Field(
        default=None, description="layers x hidden size, like 24x2048; auto: by the budget"
    )
    ffn_ratios: Annotated[tuple[_FfnRatio, ...], _AS_LIST, _ANY_DISTINCT] = Field(
        default=(),
        description="FFN sizes over the hidden size, tried in addition to your own ratio, like [3, 3.5]",
    )
    query_groups: Annotated[tuple[_Degree, ...], _AS_LIST, _ANY_DISTINCT] = Field(
        default=(), description="key-value groups, tried in addition to your own ratio of heads to groups"
    )
    head_sizes: Annotated[tuple[_HeadSize, ...], _AS_LIST, _ANY_DISTINCT] = Field(
        default=(),
        description="head sizes, tried in addition to your own: more, smaller heads or fewer, larger ones",
    )


UNLIMITED = "unlimited"
_Slack = Annotated[float, Field(ge=0.0, le=1e4)] | Literal["unlimited"]
_Waiting = Annotated[int, Field(ge=0, le=10**4)] | Literal["unlimited"]
_Cap = Annotated[float, Field(ge=1.0, le=1e6)] | Literal["unlimited"]
_Placement = Literal["linear", "loop", "v", "snake"]


class FamilyConfig(Section):
    """What searched orders may use of the family of schedules; without this section all of it.

    An order under `slack` or `weight_gradients` is a point of the family: no single action is moved, and no
    named schedule stands in for it.
    """

    slack: Annotated[tuple[_Slack, ...] | None, BeforeValidator(choices), AfterValidator(distinct)] = Field(
        default=None,
        description="microbatches that an action may run ahead of the static order; 0: none; auto: any",
    )
    weight_gradients: Annotated[
        tuple[_Waiting, ...] | None, BeforeValidator(choices), AfterValidator(distinct)
    ] = Field(
        default=None,
        description="largest number of delayed weight gradients on a device; 0: none; auto: any number",
    )
    memory_cap: _Cap = Field(
        default="unlimited",
        description="largest number of microbatches whose activations a device may hold",
    )
    placement: Annotated[
        tuple[_Placement, ...] | None, BeforeValidator(choices), AfterValidator(distinct)
    ] = Field(
        default=None, description="how stages are placed on devices: linear, loop, v or snake; auto: any"
    )

    @property
    def limits(self) -> FamilyLimits:
        """The section as a search takes it."""
        return FamilyLimits(
            slacks=_numbers(self.slack),
            w_limits=_numbers(self.weight_gradients),
            memory_cap=_number(self.memory_cap),
            placements=None if self.placement is None else tuple(map(PlacementKind, self.placement)),
        )


def _numbers(values: Sequence[float | str] | None) -> tuple[float, ...] | None:
    """The numbers of a request."""
    return None if values is None else tuple(map(_number, values))


def _number(value: float | str) -> float:
    """A number, infinity for `unlimited`."""
    return math.inf if value == UNLIMITED else float(value)


def _partition_label(value: Any) -> str:
    """A tensor partition's label: a text, `{outer: N, inner: grid}`, or these for attention and mlp.

    Raises ValueError for something else.
    """
    try:
        if isinstance(value, dict) and set(value) == {"attention", "mlp"}:
            blocks = (f"{name} {_block_label(value[name])}" for name in ("attention", "mlp"))
            text = ", ".join(blocks)
        else:
            text = _block_label(value)
        known = partition_from_label(text)
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("tensor_partition ")) from None
    return STOCK if known is None else known.label


def _block_label(value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"outer", "inner"} and value["inner"] == "grid":
        return f"grid outer {value['outer']}"
    if not isinstance(value, str):
        raise ValueError(PARTITION_RULE)
    return value


def _choices_of_sizes(value: Any) -> Any:
    """The choices of a request for sizes, of which two numbers in a list are a single one."""
    is_pair = isinstance(value, list) and all(isinstance(size, int) for size in value)
    return choices([value] if is_pair else value)


def _two_sizes(value: Any) -> str:
    """The text of two sizes, from itself or a list of them. Raises ValueError for something else."""
    text = value if isinstance(value, str) else sizes_text(value)
    if len(sizes_of(text) or ()) != 2:
        raise ValueError("must be two numbers from 1 on, like 4+2 or [4, 2]")
    return str(text)


def _word_of(knob: Knob, value: Any) -> Any:
    """A value, or the word of the knob that a number is written as.

    Raises ValueError for `true` and `false`, which Python takes for the numbers 1 and 0.
    """
    if isinstance(value, bool):
        raise ValueError("must be one of the knob's values, not true or false")
    is_text = isinstance(value, int | float) and f"{value:g}" in knob.words
    return f"{value:g}" if is_text else value


def _as_is(value: Any) -> Any:
    return value


def _axes(name: str, *, knobs: Iterable[Knob], has_defaults: bool) -> Any:
    """A section with a key for each knob, typed by its descriptor."""
    fields: dict[str, Any] = {}
    for knob in knobs:
        is_stock = has_defaults and knob.default == STOCK
        form = _form_of(knob, takes_stock=is_stock, is_rule=not has_defaults)
        if not has_defaults:
            form = Annotated[form, BeforeValidator(partial(_rule_of, knob))]
        default = (STOCK,) if is_stock else None
        fields[knob.name] = (form, Field(default=default, description=knob.description))
    return create_model(name, __base__=Section, **fields)


# Classes that are made while the program runs have no static type.
_RuleAxes: Any = _axes("_RuleAxes", knobs=KNOBS, has_defaults=False)
_SearchAxes: Any = _axes("_SearchAxes", knobs=[x for x in KNOBS if x.kind != "shape"], has_defaults=True)


class Forbidden(_RuleAxes):  # type: ignore[misc]
    """A rule: a value or a list for some knobs; no plan may match all of them."""

    @model_validator(mode="after")
    def _names_an_axis(self) -> "Forbidden":
        if not self.axes:
            raise ValueError("must name at least one axis, with values that no plan may have")
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


class SearchConfig(_SearchAxes):  # type: ignore[misc]
    """The knobs of a search. None is `auto`. No plan matches one of the `forbid` rules.

    `change_class` limits how far a plan may change the training (docs/support.md): `A` the order of work
    alone, `B` the rounding of reductions, `C` possibly the objective. Another model (D) needs `scaling`.
    """

    scaling: ScalingConfig | None = Field(
        default=None,
        description="search other widths and depths, so another model; off unless this section is present",
    )
    schedule_family: FamilyConfig | None = Field(
        default=None, description="limits of searched orders; named schedules have no such parameters"
    )
    change_class: Literal["A", "B", "C"] = Field(
        default="B",
        description="what may change in training: A its order, B also rounding, C also the objective",
    )
    forbid: Annotated[
        tuple[Forbidden, ...],
        BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else (v,)),
        Field(max_length=MAX_CHOICES),
    ] = Field(default=(), description="rules such as {schedule: zb-v}; no plan that matches one is tried")

    def requested(self, name: str) -> tuple[Any, ...] | None:
        """The values that are requested for a knob; None is `auto`."""
        values: tuple[Any, ...] | None = getattr(self, name)
        return values

    @property
    def family_limits(self) -> FamilyLimits:
        """What searched orders may use of the family."""
        return FREE if self.schedule_family is None else self.schedule_family.limits

    def stated(self) -> dict[str, Any]:
        """The keys that are not at their defaults, as a file has them."""
        stated = self.model_dump(mode="json", exclude_defaults=True)
        return {name: "auto" if value is None else value for name, value in stated.items()}
