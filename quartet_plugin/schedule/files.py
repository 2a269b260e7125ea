"""`COSTS.json` and `SCHEDULE.json`: strict schemas, the data types they become, and the way back.

A schedule can also be written as the CSV that `torch.distributed.pipelining` loads as "compute_only".

Every refusal is one ConfigError line that names the field, the value and the rule.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np

from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.model.costs import Costs, LayerCost, NumBytes, Seconds
from quartet_plugin.model.files import read_json, shown, write_json_atomic
from quartet_plugin.model.schema import Bounds, Length, dump, parse, record
from quartet_plugin.schedule.action import (
    MAX_ACTIONS,
    MAX_MICROBATCHES,
    MAX_STAGES,
    ActionKind,
    OverlappedPair,
    parse_entry,
)
from quartet_plugin.schedule.placement import fault_of
from quartet_plugin.schedule.schedule import CodeArray, Schedule

SCHEMA_VERSION = 1
MAX_LAYERS = 65_536

_Name = Annotated[str, Length(least=1, most=200)]
_Count = Annotated[int, Bounds(ge=0, le=MAX_LAYERS)]
_Device = Annotated[int, Bounds(ge=0, lt=MAX_STAGES)]
_Devices = Annotated[int, Bounds(ge=1, le=MAX_STAGES)]
_Microbatches = Annotated[int, Bounds(ge=1, le=MAX_MICROBATCHES)]
_Route = Annotated[int, Bounds(ge=0, le=1)]
# A field that a file does not have, told apart from one that is there and empty.
_ABSENT: Any = ("absent",)

_KIND_NAMES = "".join(kind.name for kind in ActionKind)
_ORDER = re.compile(r"(?:(?:0|[1-9][0-9]{0,4})[FIWB](?:0|[1-9][0-9]{0,5}),)*+", re.ASCII)
_TO_NUMBERS = str.maketrans({kind.name: f" {int(kind)} " for kind in ActionKind} | {",": " "})
_NO_PAIRS = np.empty(0, dtype=np.int64)


@record
class _CostsFile:
    schema_version: Literal[1]
    num_devices: _Devices
    num_microbatches: _Microbatches
    layers: Annotated[tuple[LayerCost, ...], Length(least=1, most=MAX_LAYERS)]
    device_slowdown: tuple[Annotated[float, Bounds(gt=0, le=1e6)], ...] = _ABSENT
    transfer_s: tuple[tuple[Seconds, ...], ...] = _ABSENT
    memory_limit_bytes: tuple[NumBytes, ...] | None = None
    weight_grad_held_fraction: Annotated[float, Bounds(ge=0, le=1)] = 1.0
    backward_fused_s: tuple[Seconds, ...] | None = None
    exchange_s: tuple[Annotated[tuple[Seconds, ...], Length(least=2, most=2)], ...] | None = None

    def __post_init__(self) -> None:
        devices = self.num_devices
        if self.device_slowdown is not _ABSENT:
            _expect_length("device_slowdown", self.device_slowdown, devices, "one a device")
        if self.transfer_s is not _ABSENT:
            _expect_length("transfer_s", self.transfer_s, devices, "one row a device")
            for device, row in enumerate(self.transfer_s):
                _expect_length(f"transfer_s[{device}]", row, devices, "one a device")
                if row[device] != 0:
                    raise ConfigError(
                        f"transfer_s[{device}][{device}]: {row[device]}: the diagonal must be 0"
                    )
        if self.memory_limit_bytes is not None:
            _expect_length("memory_limit_bytes", self.memory_limit_bytes, devices, "one a device")
        if self.backward_fused_s is not None:
            _expect_length("backward_fused_s", self.backward_fused_s, len(self.layers), "one a layer")
        if self.exchange_s is not None:
            _expect_length("exchange_s", self.exchange_s, len(self.layers), "one a layer")
            self._check_exchanges(self.exchange_s)

    def _check_exchanges(self, exchange_s: tuple[tuple[float, ...], ...]) -> None:
        """Raise ConfigError for an exchange that is longer than the action that it is a part of."""
        fused = self.backward_fused_s
        for index, (layer, exchange) in enumerate(zip(self.layers, exchange_s, strict=True)):
            backward_s = layer.input_grad_s if fused is None else min(layer.input_grad_s, fused[index])
            for way, (part_s, whole_s) in enumerate(
                zip(exchange, (layer.forward_s, backward_s), strict=True)
            ):
                if part_s > whole_s:
                    name = ("forward_s", "input_grad_s or backward_fused_s")[way]
                    raise ConfigError(
                        f"exchange_s[{index}][{way}]: {part_s}: must be at most the layer's {name}, {whole_s}"
                    )


@record
class _Origin:
    name: _Name | None = None
    family: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if (self.name is None) == (self.family is None):
            raise ConfigError("origin: needs exactly one of name and family")


@record
class _Predicted:
    makespan_s: Annotated[float, Bounds(ge=0)]
    period_s: Annotated[float, Bounds(ge=0)]
    bubble_fraction: Annotated[float, Bounds(ge=-1e-6, le=1)]
    peak_activation_bytes: tuple[Annotated[float, Bounds(ge=-1e-3)], ...]


@record
class _ScheduleFile:
    schema_version: Literal[1]
    num_devices: _Devices
    num_microbatches: _Microbatches
    placement: Annotated[tuple[_Device, ...], Length(least=1, most=MAX_STAGES)]
    layers_per_stage: Annotated[tuple[_Count, ...], Length(least=1, most=MAX_STAGES)]
    orders: Annotated[tuple[tuple[str, ...], ...], Length(most=MAX_STAGES)]
    origin: _Origin | None = None
    predicted: _Predicted | None = None
    routes: tuple[Annotated[tuple[_Device, ...], Length(most=MAX_STAGES)], ...] | None = None
    route_of_microbatch: Annotated[tuple[_Route, ...], Length(most=MAX_MICROBATCHES)] | None = None

    def __post_init__(self) -> None:
        stages = len(self.placement)
        _expect_length("layers_per_stage", self.layers_per_stage, stages, "one a stage, as in placement")
        _expect_length("orders", self.orders, self.num_devices, "one list a device")
        if self.placement[0] != 0:
            raise ConfigError(f"placement[0]: {self.placement[0]}: stage 0 must be on device 0")
        _expect_placement("placement", self.placement, self.num_devices)
        if self.predicted is not None:
            peaks = self.predicted.peak_activation_bytes
            _expect_length("predicted.peak_activation_bytes", peaks, self.num_devices, "one a device")
        self._check_routes(stages)

    def _check_routes(self, stages: int) -> None:
        if self.routes is None and self.route_of_microbatch is None:
            return
        if self.routes is None or self.route_of_microbatch is None:
            missing = "routes" if self.routes is None else "route_of_microbatch"
            raise ConfigError(f"{missing}: missing; routes and route_of_microbatch go together")
        _expect_length("routes", self.routes, 2, "one placement for each copy of the model")
        if self.routes[0] != self.placement:
            raise ConfigError(f"routes[0]: {shown(list(self.routes[0]))}: must be the placement")
        _expect_length("routes[1]", self.routes[1], stages, "one device a stage")
        _expect_placement("routes[1]", self.routes[1], self.num_devices)
        microbatches = self.num_microbatches
        _expect_length("route_of_microbatch", self.route_of_microbatch, microbatches, "one a microbatch")


def read_costs(path: str | os.PathLike[str]) -> Costs:
    """The cost table in `COSTS.json`; raises ConfigError."""
    return costs_from_json(read_json(path), where=os.fspath(path))


def costs_from_json(data: Any, *, where: str = "costs") -> Costs:
    """The cost table of a parsed `COSTS.json`, defaults filled in; raises ConfigError."""
    file = parse(_CostsFile, data, where=where)
    devices = file.num_devices
    slowdown = [1.0] * devices if file.device_slowdown is _ABSENT else file.device_slowdown
    transfer_s = np.zeros((devices, devices)) if file.transfer_s is _ABSENT else file.transfer_s
    limit, fused = file.memory_limit_bytes, file.backward_fused_s
    return Costs(
        num_devices=devices,
        num_microbatches=file.num_microbatches,
        layers=file.layers,
        device_slowdown=np.array(slowdown, dtype=np.float64),
        transfer_s=np.array(transfer_s, dtype=np.float64),
        memory_limit_bytes=None if limit is None else np.array(limit, dtype=np.float64),
        weight_grad_held_fraction=file.weight_grad_held_fraction,
        backward_fused_s=fused,
        exchange_s=file.exchange_s,
    )


def costs_to_json(costs: Costs) -> dict[str, Any]:
    """The exact inverse of `costs_from_json`: every key but an absent `exchange_s` is written."""
    limit, fused = costs.memory_limit_bytes, costs.backward_fused_s
    exchange = {} if costs.exchange_s is None else {"exchange_s": [list(layer) for layer in costs.exchange_s]}
    return {
        "schema_version": SCHEMA_VERSION,
        "num_devices": costs.num_devices,
        "num_microbatches": costs.num_microbatches,
        "layers": [dump(layer) for layer in costs.layers],
        "device_slowdown": costs.device_slowdown.tolist(),
        "transfer_s": costs.transfer_s.tolist(),
        "memory_limit_bytes": None if limit is None else limit.tolist(),
        "weight_grad_held_fraction": costs.weight_grad_held_fraction,
        "backward_fused_s": None if fused is None else list(fused),
    } | exchange


def read_schedule(path: str | os.PathLike[str]) -> Schedule:
    """The schedule in `SCHEDULE.json`; raises ConfigError.

    Sizes, placement and the text of every action are checked here; completeness and order by `validate`.
    """
    return schedule_from_json(read_json(path), where=os.fspath(path))


def schedule_from_json(data: Any, *, where: str = "schedule") -> Schedule:
    """The schedule of a parsed `SCHEDULE.json`; raises ConfigError."""
    file = parse(_ScheduleFile, data, where=where)
    total = sum(map(len, file.orders))
    if total > MAX_ACTIONS:
        raise ConfigError(f"{where}: orders: {total} actions: at most {MAX_ACTIONS}")
    try:
        rows = [
            parse_entries(row, num_stages=len(file.placement), num_microbatches=file.num_microbatches)
            for row in file.orders
        ]
    except _OrderError as error:
        device = next(index for index, row in enumerate(file.orders) if row is error.row)
        raise ConfigError(f"{where}: orders[{device}]{error}") from error
    routes = file.routes
    return Schedule(
        num_devices=file.num_devices,
        num_microbatches=file.num_microbatches,
        placement=file.placement,
        layers_per_stage=file.layers_per_stage,
        orders=tuple(order for order, _ in rows),
        pairs=tuple(pairs for _, pairs in rows) if any(len(pairs) for _, pairs in rows) else (),
        origin={}
        if file.origin is None
        else {key: value for key, value in dump(file.origin).items() if value is not None},
        routes=None if routes is None else (routes[0], routes[1]),
        route_of_microbatch=file.route_of_microbatch,
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
        "orders": entry_texts(schedule),
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


def to_csv(schedule: Schedule) -> str:
    """PyTorch's CSV: one line a device, its actions in order, as in `0F0,0F1,0B0`.

    The placement follows from the lines; the split and the origin are not kept. Raises PlanError for a
    schedule with two copies of the model.
    """
    if schedule.routes is not None:
        raise PlanError(
            "routes: a CSV has one device a stage; a schedule with two copies cannot be written as one"
        )
    return "".join(",".join(row) + "\n" for row in entry_texts(schedule))


def entry_texts(schedule: Schedule) -> list[list[str]]:
    """The texts of every device's actions, `2F0` and so on, the two parts of a pair as one text."""
    texts = [order_texts(order, num_microbatches=schedule.num_microbatches) for order in schedule.orders]
    if not schedule.pairs:
        return texts
    return [
        row if not len(schedule.pairs[device]) else [str(entry) for entry in schedule.entries(device)]
        for device, row in enumerate(texts)
    ]


def order_texts(order: CodeArray, *, num_microbatches: int) -> list[str]:
    """The texts of codes, `2F0` and so on; a list comprehension over plain integers for speed."""
    stages, microbatches = np.divmod(order >> 2, num_microbatches)
    columns = zip(stages.tolist(), (order & 3).tolist(), microbatches.tolist(), strict=True)
    return [f"{stage}{_KIND_NAMES[kind]}{microbatch}" for stage, kind, microbatch in columns]


class _OrderError(PlanError):
    """A text in `row` that is no action of this schedule; the message starts with its index."""

    def __init__(self, row: Sequence[str], index: int, rule: str) -> None:
        super().__init__(f"[{index}]: {shown(row[index])}: {rule}")
        self.row, self.index, self.rule = row, index, rule


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


def parse_entries(
    texts: Sequence[str], *, num_stages: int, num_microbatches: int
) -> tuple[CodeArray, CodeArray]:
    """The codes of action texts, some of which may be pairs, and the indices of the pairs' forwards.

    Raises PlanError that starts with the index of the first wrong text.
    """
    if not any(text.startswith("(") for text in texts):
        return parse_order(texts, num_stages=num_stages, num_microbatches=num_microbatches), _NO_PAIRS
    flat: list[str] = []
    index_of: list[int] = []
    first: list[int] = []
    for index, text in enumerate(texts):
        parts = [text]
        if text.startswith("("):
            try:
                parts = [str(part) for part in OverlappedPair.parse(text)]
            except PlanError as error:
                raise _OrderError(texts, index, str(error).partition(": ")[2]) from error
            first.append(len(flat))
        flat += parts
        index_of += [index] * len(parts)
    try:
        codes = parse_order(flat, num_stages=num_stages, num_microbatches=num_microbatches)
    except _OrderError as error:
        raise _OrderError(texts, index_of[error.index], error.rule) from error
    return codes, np.array(first, dtype=np.int64)


def _first_bad(texts: Sequence[str]) -> int:
    for index, text in enumerate(texts):
        try:
            parse_entry(text)
        except PlanError:
            return index
    raise AssertionError("the joined text does not match although every action does")


def _expect_length(name: str, values: Sequence[Any], length: int, rule: str) -> None:
    if len(values) != length:
        raise ConfigError(f"{name}: {len(values)} entries: must be {length}, {rule}")


def _expect_placement(name: str, placement: Sequence[int], num_devices: int) -> None:
    fault = fault_of(placement, num_devices=num_devices)
    if fault is not None:
        raise ConfigError(f"{name}{fault}")
