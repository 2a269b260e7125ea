"""What `quartet knobs` lists: every knob, its value in the command, its choices, and why one is kept."""

from collections.abc import Iterable
from dataclasses import dataclass

from quartet_plugin.model.plan import STOCK
from quartet_plugin.space.config import DEFAULT_NAMES, STOCK_NAMES, SearchConfig
from quartet_plugin.space.knobs.knob import Knob, KnobContext, LayoutKnob, SettingKnob, Value
from quartet_plugin.space.knobs.mapping import MAPPING
from quartet_plugin.space.knobs.mtp_stage import MTP_STAGE, kept_mtp_stage
from quartet_plugin.space.knobs.registry import KNOBS, OPTIONS
from quartet_plugin.space.knobs.schedule import SCHEDULE
from quartet_plugin.space.knobs.shape import SHAPE
from quartet_plugin.space.plan_space import Space

TUNED, FIXED = "tuned", "fixed by the search section"
NOT_ASKED = "kept unless search asks for it"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobRow:
    """One knob; `value`, `choices` and `state` are of a job, None and empty where none is known.

    `choices` are empty too for a knob whose values are not listed, such as a split that is tuned. `left_out`
    are values that the search section does not name, where it names some. `state` is `tuned`, `fixed by the
    search section`, or why the command's value is kept.
    """

    knob: Knob
    value: str | None = None
    choices: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    state: str

    def record(self) -> dict[str, object]:
        """The row as JSON."""
        knob = self.knob
        return {
            "name": knob.name,
            "label": knob.label,
            "meaning": knob.meaning,
            "change_class": knob.change_class,
            "rule": knob.rule,
            "flag": knob.flag or None,
            "ds_config": knob.ds_key or None,
            "default": knob.default,
            "value": self.value,
            "choices": list(self.choices),
            "left_out": list(self.left_out),
            "state": self.state,
        }


def knob_rows(space: Space | None = None) -> list[KnobRow]:
    """Every knob, for the job of `space` where one is given."""
    if space is None:
        return [KnobRow(knob=knob, state=TUNED if knob.default == "auto" else NOT_ASKED) for knob in KNOBS]
    return [
        KnobRow(
            knob=knob,
            value=_value(knob, space),
            choices=_choices(knob, space),
            left_out=_schedules_left_out(space.search) if knob is SCHEDULE else (),
            state=_state(knob, space),
        )
        for knob in KNOBS
        if knob.is_of(space.job.framework)
    ]


def _value(knob: Knob, space: Space) -> str:
    value = space.job.setting(knob.name) if isinstance(knob, SettingKnob) else knob.value_of(space.baseline)
    return "-" if value is None else knob.text(value)


def _choices(knob: Knob, space: Space) -> tuple[str, ...]:
    layouts = [layout for kept in space.layouts.values() for layout in kept]
    if knob is SHAPE:
        return tuple(shape.label_beside(space.job.shape) for shape in space.shapes)
    if knob is SCHEDULE:
        names: dict[str, None] = {}
        for shape, kept in space.layouts.items():
            for layout in kept:
                names |= dict.fromkeys(space.schedules_of(layout, shape=shape))
        return tuple(names)
    if knob is MTP_STAGE:
        stages: dict[str, None] = {}
        for shape, kept in space.layouts.items():
            for layout in kept:
                stages |= dict.fromkeys(space.mtp_stages_of(layout, shape=shape))
        return tuple(stages) if space.job.mtp_layers else ()
    if knob is MAPPING:
        orders: dict[str, None] = {}
        for layout in {layout.degrees: layout for layout in layouts}.values():
            orders |= dict.fromkeys(order.name for order in space.orders_of(layout))
        return tuple(orders)
    if not isinstance(knob, LayoutKnob):
        return ()
    if knob not in OPTIONS:
        return _texts(knob, (knob.in_layout(layout) for layout in layouts))
    values: dict[Value | None, None] = {}
    for shape, kept in space.layouts.items():
        for layout in kept:
            context = KnobContext(layout=layout, shape=shape, rules=space.rules())
            values |= dict.fromkeys(knob.choices(context))
    return _texts(knob, values)


def _schedules_left_out(search: SearchConfig) -> tuple[str, ...]:
    """The schedules that `auto` offers and that the search section, which names others, does not."""
    requested = search.requested(SCHEDULE.name)
    if requested is None or requested == (STOCK,):
        return ()
    return tuple(name for name in (*STOCK_NAMES, *DEFAULT_NAMES) if name not in requested)


def _texts(knob: Knob, values: Iterable[Value | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(STOCK if value is None else knob.text(value) for value in values))


def _state(knob: Knob, space: Space) -> str:
    reason = space.locked.get(knob.axis)
    if reason is not None:
        return f"kept: {reason}"
    requested = _requested(knob, space.search)
    kept = knob.kept(space.rules()) if isinstance(knob, LayoutKnob) else None
    if knob is MTP_STAGE:
        kept = kept_mtp_stage(space.rules())
    if kept is not None and requested in (None, (STOCK,)):
        return f"kept: {kept}"
    if isinstance(knob, SettingKnob) and not knob.used_by and space.job.setting(knob.name) is None:
        return "kept: the framework did not report it"
    if requested is None:
        return TUNED
    if requested == (STOCK,):
        return NOT_ASKED
    return TUNED if len(requested) > 1 else FIXED


def _requested(knob: Knob, search: SearchConfig) -> tuple[object, ...] | None:
    if knob is SHAPE:
        return (STOCK,) if search.scaling is None else search.scaling.shapes
    return search.requested(knob.name)
