"""`COSTS.json` and `SCHEDULE.json`: strict schemas, the data types they become, and the way back.

Every refusal is one ConfigError line that names the field, the value and the rule.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

import numpy as np
from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.model.costs import Costs, LayerCost
from quartet_plugin.model.files import read_json, shown, write_json_atomic
from quartet_plugin.model.sections import Section, validate
from quartet_plugin.schedule.action import MAX_ACTIONS, MAX_MICROBATCHES, MAX_STAGES, Action, ActionKind
from quartet_plugin.schedule.schedule import CodeArray, Schedule
from quartet_plugin.schedule.validate import check_placement

SCHEMA_VERSION = 1
MAX_LAYERS = 65_536
MAX_SECONDS = 1e9
MAX_BYTES = 1e18


def _known_version(version: int) -> int:
    if version != SCHEMA_VERSION:
        raise _fault(
            f"schema_version: {shown(version)}: must be {SCHEMA_VERSION}, the version this release knows"
        )
    return version


_Version = Annotated[int, AfterValidator(_known_version)]
_Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
_Bytes = Annotated[float, Field(ge=0, le=MAX_BYTES)]
_Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
_Count = Annotated[int, Field(ge=0, le=MAX_LAYERS)]
_Device = Annotated[int, Field(ge=0, lt=MAX_STAGES)]
_Devices = Annotated[int, Field(ge=1, le=MAX_STAGES)]
_Microbatches = Annotated[int, Field(ge=1, le=MAX_MICROBATCHES)]
_Route = Annotated[int, Field(ge=0, le=1)]

_KIND_NAMES = "".join(kind.name for kind in ActionKind)
_ORDER = re.compile(r"(?:(?:0|[1-9][0-9]{0,4})[FIWB](?:0|[1-9][0-9]{0,5}),)*+", re.ASCII)
_TO_NUMBERS = str.maketrans({kind.name: f" {int(kind)} " for kind in ActionKind} | {",": " "})


class _Layer(Section):
    name: _Name
    forward_s: _Seconds
    input_grad_s: _Seconds
    weight_grad_s: _Seconds
    activation_bytes: _Bytes


class _CostsFile(Section):
    schema_version: _Version
    num_devices: _Devices
    num_microbatches: _Microbatches
    layers: Annotated[list[_Layer], Field(min_length=1, max_length=MAX_LAYERS)]
    device_slowdown: list[Annotated[float, Field(gt=0, le=1e6)]] = Field(default_factory=list)
    transfer_s: list[list[_Seconds]] = Field(default_factory=list)
    memory_limit_bytes: list[_Bytes] | None = None
    weight_grad_held_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    backward_fused_s: list[_Seconds] | None = None

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        devices, given = self.num_devices, self.model_fields_set
        if "device_slowdown" in given:
            _expect_length("device_slowdown", self.device_slowdown, devices, "one a device")
        if "transfer_s" in given:
            _expect_length("transfer_s", self.transfer_s, devices, "one row a device")
            for at, row in enumerate(self.transfer_s):
                _expect_length(f"transfer_s[{at}]", row, devices, "one a device")
                if row[at] != 0:
                    raise _fault(f"transfer_s[{at}][{at}]: {row[at]}: the diagonal must be 0")
        if self.memory_limit_bytes is not None:
            _expect_length("memory_limit_bytes", self.memory_limit_bytes, devices, "one a device")
        if self.backward_fused_s is not None:
            _expect_length("backward_fused_s", self.backward_fused_s, len(self.layers), "one a layer")
        return self


class _Origin(Section):
    name: _Name | None = None
    family: dict[str, JsonValue] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.name is None) == (self.family is None):
            raise _fault("origin: needs exactly one of name and family")
        return self


class _Predicted(Section):
    makespan_s: Annotated[float, Field(ge=0)]
    period_s: Annotated[float, Field(ge=0)]
    bubble_fraction: Annotated[float, Field(ge=-1e-6, le=1)]
    peak_activation_bytes: list[Annotated[float, Field(ge=-1e-3)]]


class _ScheduleFile(Section):
    schema_version: _Version
    num_devices: _Devices
    num_microbatches: _Microbatches
    placement: Annotated[list[_Device], Field(min_length=1, max_length=MAX_STAGES)]
    layers_per_stage: Annotated[list[_Count], Field(min_length=1, max_length=MAX_STAGES)]
    orders: Annotated[list[list[str]], Field(max_length=MAX_STAGES)]
    origin: _Origin | None = None
    predicted: _Predicted | None = None
    routes: list[Annotated[list[_Device], Field(max_length=MAX_STAGES)]] | None = None
    route_of_microbatch: Annotated[list[_Route], Field(max_length=MAX_MICROBATCHES)] | None = None

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        stages = len(self.placement)
        _expect_length("layers_per_stage", self.layers_per_stage, stages, "one a stage, as in placement")
        _expect_length("orders", self.orders, self.num_devices, "one list a device")
        if self.placement[0] != 0:
            raise _fault(f"placement[0]: {self.placement[0]}: stage 0 must be on device 0")
        _expect_placement("placement", self.placement, self.num_devices)
        if self.predicted is not None:
            peaks = self.predicted.peak_activation_bytes
            _expect_length("predicted.peak_activation_bytes", peaks, self.num_devices, "one a device")
        self._check_routes(stages)
        return self

    def _check_routes(self, stages: int) -> None:
        if self.routes is None and self.route_of_microbatch is None:
            return
        if self.routes is None or self.route_of_microbatch is None:
            missing = "routes" if self.routes is None else "route_of_microbatch"
            raise _fault(f"{missing}: missing; routes and route_of_microbatch go together")
        _expect_length("routes", self.routes, 2, "one placement for each copy of the model")
        if self.routes[0] != self.placement:
            raise _fault(f"routes[0]: {shown(self.routes[0])}: must be the placement")
        _expect_length("routes[1]", self.routes[1], stages, "one device a stage")
        _expect_placement("routes[1]", self.routes[1], self.num_devices)
        microbatches = self.num_microbatches
        _expect_length("route_of_microbatch", self.route_of_microbatch, microbatches, "one a microbatch")


def read_costs(path: str | os.PathLike[str]) -> Costs:
    """The cost table in `COSTS.json`; raises ConfigError."""
    return costs_from_json(read_json(path), where=os.fspath(path))


def costs_from_json(data: Any, *, where: str = "costs") -> Costs:
    """The cost table of a parsed `COSTS.json`, defaults filled in; raises ConfigError."""
    file = validate(_CostsFile, data, where=where)
    devices = file.num_devices
    layers = tuple(LayerCost(**layer.model_dump()) for layer in file.layers)
    limit, fused = file.memory_limit_bytes, file.backward_fused_s
    return Costs(
        num_devices=devices,
        num_microbatches=file.num_microbatches,
        layers=layers,
        device_slowdown=np.array(file.device_slowdown or [1.0] * devices, dtype=np.float64),
        transfer_s=np.array(file.transfer_s or np.zeros((devices, devices)), dtype=np.float64),
        memory_limit_bytes=None if limit is None else np.array(limit, dtype=np.float64),
        weight_grad_held_fraction=file.weight_grad_held_fraction,
        backward_fused_s=None if fused is None else tuple(fused),
    )


def costs_to_json(costs: Costs) -> dict[str, Any]:
    """The exact inverse of `costs_from_json`, every key written."""
    limit, fused = costs.memory_limit_bytes, costs.backward_fused_s
    return {
        "schema_version": SCHEMA_VERSION,
        "num_devices": costs.num_devices,
        "num_microbatches": costs.num_microbatches,
        "layers": [
            {name: getattr(layer, name) for name in LayerCost.__dataclass_fields__} for layer in costs.layers
        ],
        "device_slowdown": costs.device_slowdown.tolist(),
        "transfer_s": costs.transfer_s.tolist(),
        "memory_limit_bytes": None if limit is None else limit.tolist(),
        "weight_grad_held_fraction": costs.weight_grad_held_fraction,
        "backward_fused_s": None if fused is None else list(fused),
    }


def write_costs(path: str | os.PathLike[str], costs: Costs) -> None:
    """Write `COSTS.json` atomically."""
    write_json_atomic(path, costs_to_json(costs))


def read_schedule(path: str | os.PathLike[str]) -> Schedule:
    """The schedule in `SCHEDULE.json`; raises ConfigError.

    Sizes, placement and the text of every action are checked here; completeness and order by `validate`.
    """
    return schedule_from_json(read_json(path), where=os.fspath(path))


def schedule_from_json(data: Any, *, where: str = "schedule") -> Schedule:
    """The schedule of a parsed `SCHEDULE.json`; raises ConfigError."""
    file = validate(_ScheduleFile, data, where=where)
    total = sum(map(len, file.orders))
    if total > MAX_ACTIONS:
        raise ConfigError(f"{where}: orders: {total} actions: at most {MAX_ACTIONS}")
    try:
        orders = [
            parse_order(row, num_stages=len(file.placement), num_microbatches=file.num_microbatches)
            for row in file.orders
        ]
    except _OrderError as error:
        device = next(at for at, row in enumerate(file.orders) if row is error.row)
        raise ConfigError(f"{where}: orders[{device}]{error}") from error
    routes = file.routes
    return Schedule(
        num_devices=file.num_devices,
        num_microbatches=file.num_microbatches,
        placement=tuple(file.placement),
        layers_per_stage=tuple(file.layers_per_stage),
        orders=tuple(orders),
        origin={} if file.origin is None else file.origin.model_dump(exclude_none=True),
        routes=None if routes is None else (tuple(routes[0]), tuple(routes[1])),
        route_of_microbatch=None if file.route_of_microbatch is None else tuple(file.route_of_microbatch),
    )


def schedule_to_json(schedule: Schedule, *, predicted: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The exact inverse of `schedule_from_json`; `predicted` is `SCHEDULE.json`'s key of that name.

    Of `origin` the file holds a name or parameters; a named order that was changed has no name. Raises
    ConfigError for a schedule whose split is not known: the file has to say it.
    """
    if schedule.layers_per_stage is None:
        raise ConfigError("layers_per_stage: not known for this schedule; a schedule file holds the split")
    value: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "num_devices": schedule.num_devices,
        "num_microbatches": schedule.num_microbatches,
        "placement": list(schedule.placement),
        "layers_per_stage": list(schedule.layers_per_stage),
        "orders": [
            order_texts(order, num_microbatches=schedule.num_microbatches) for order in schedule.orders
        ],
    }
    if schedule.origin:
        value["origin"] = _origin_to_json(schedule.origin)
    if predicted is not None:
        value["predicted"] = dict(predicted)
    if schedule.routes is not None and schedule.route_of_microbatch is not None:
        value["routes"] = [list(route) for route in schedule.routes]
        value["route_of_microbatch"] = list(schedule.route_of_microbatch)
    return value


def _origin_to_json(origin: Mapping[str, Any]) -> dict[str, Any]:
    if not origin.get("inserted"):
        return {key: origin[key] for key in ("name", "family") if key in origin}
    return {"family": {**origin.get("family", {"start": origin.get("name")}), "inserted": True}}


def write_schedule(
    path: str | os.PathLike[str], schedule: Schedule, *, predicted: Mapping[str, Any] | None = None
) -> None:
    """Write `SCHEDULE.json` atomically."""
    write_json_atomic(path, schedule_to_json(schedule, predicted=predicted))


def order_texts(order: CodeArray, *, num_microbatches: int) -> list[str]:
    """The texts of codes, `2F0` and so on; a list comprehension over plain integers for speed."""
    stages, microbatches = np.divmod(order >> 2, num_microbatches)
    columns = zip(stages.tolist(), (order & 3).tolist(), microbatches.tolist(), strict=True)
    return [f"{stage}{_KIND_NAMES[kind]}{microbatch}" for stage, kind, microbatch in columns]


class _OrderError(PlanError):
    """A text in `row` that is no action of this schedule; the message starts with its index."""

    def __init__(self, row: Sequence[str], index: int, rule: str) -> None:
        super().__init__(f"[{index}]: {shown(row[index])}: {rule}")
        self.row = row


def parse_order(texts: Sequence[str], *, num_stages: int, num_microbatches: int) -> CodeArray:
    """The codes of action texts: the inverse of `order_texts`, one pass of the regex engine and of numpy.

    Raises PlanError that starts with the index of the first wrong text.
    """
    joined = ",".join(texts) + "," if texts else ""
    if _ORDER.fullmatch(joined) is None or joined.count(",") != len(texts):
        raise _OrderError(texts, _first_bad(texts), "must be {stage}{F|I|W|B}{microbatch} like 2F0")
    numbers = np.fromstring(joined.translate(_TO_NUMBERS), dtype=np.int64, sep=" ").reshape(-1, 3)
    stages, kinds, microbatches = numbers.T
    for values, limit, name in (
        (stages, num_stages, "stages"),
        (microbatches, num_microbatches, "microbatches"),
    ):
        wrong = np.flatnonzero(values >= limit)
        if len(wrong):
            raise _OrderError(texts, int(wrong[0]), f"{name} are numbered 0 to {limit - 1}")
    return (stages * num_microbatches + microbatches) * 4 + kinds


def _first_bad(texts: Sequence[str]) -> int:
    for index, text in enumerate(texts):
        try:
            Action.parse(text)
        except PlanError:
            return index
    raise AssertionError("the joined text does not match although every action does")


def _expect_length(name: str, values: Sequence[Any], length: int, rule: str) -> None:
    if len(values) != length:
        raise _fault(f"{name}: {len(values)} entries: must be {length}, {rule}")


def _expect_placement(name: str, placement: Sequence[int], num_devices: int) -> None:
    try:
        check_placement(placement, num_devices=num_devices)
    except PlanError as error:
        raise _fault(str(error).replace("placement", name, 1)) from error


def _fault(message: str) -> PydanticCustomError:
    # A type of its own: `validate` shows the message alone, as it names the field and the value itself.
    return PydanticCustomError("rule", "{message}", {"message": message})
