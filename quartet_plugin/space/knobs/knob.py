"""A knob: one quantity that a search chooses, with all that the product knows of it in one place.

Adding a knob takes a file in this folder with its descriptor, a line in `registry`, its price in cost/ and
its test (docs/contributing/knob.md). Key of q.yaml, parameter of the study, flag, label, rules of
`search.forbid`, `quartet knobs` and what a rank reads back follow from the descriptor.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from quartet_plugin.model.hierarchical_context import sizes_of
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.megatron_arguments import value_in_words
from quartet_plugin.model.plan import STOCK, Plan
from quartet_plugin.model.recompute_modules import modules_of
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.space.features import Axis

type Value = bool | int | str
# The form of a knob's values in q.yaml.
Kind = Literal[
    "degree", "size", "sizes", "switch", "word", "split", "order", "schedule", "shape", "partition"
]
ChangeClass = Literal["A", "B", "D"]
# In q.yaml it stands for a search of the knob; a knob's word of this name is written as a list.
AUTO = "auto"


class Request(Protocol):
    """What the search asks of each knob."""

    def requested(self, name: str) -> tuple[Any, ...] | None:
        """The values that are requested for a knob; None is `auto`."""


class KnobRules(Protocol):
    """What knobs look at of a job: `space.rules.LayoutRules`."""

    @property
    def job(self) -> TrainingJob:
        """What the framework made of the user's command."""

    @property
    def search(self) -> Request:
        """What `search` of q.yaml asks of every knob."""

    @property
    def locked(self) -> Mapping[Axis, str]:
        """The axes that stay at stock, each with the feature that locks it."""

    @property
    def slots_per_node(self) -> int:
        """The number that a TP group must divide."""

    @property
    def joined_devices(self) -> int:
        """The number that a group must divide to stay inside fast links."""

    @property
    def is_planned(self) -> bool:
        """Whether nothing is launched, so that no command's own value is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobContext:
    """What a knob's choices depend on; in `layout` the knobs before it are chosen.

    `is_custom`: the plugin's runtime executes the plan's schedule, which settings are chosen behind.
    """

    layout: Layout
    shape: ModelShape
    rules: KnobRules
    is_custom: bool = False

    def setting(self, name: str) -> "Value | None":
        """A setting's value in the layout: the plan's, or the command's where the plan keeps it."""
        planned = self.layout.setting(name)
        return self.rules.job.setting(name) if planned is None else planned

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """The modules that selective recompute repeats, as the plan or the command says them."""
        return modules_of(str(self.setting("recompute_modules") or ""))

    def is_on(self, name: str, *, feature: str) -> bool:
        """Whether a switch is on; `feature` tells it of a command whose settings were not read."""
        value = self.setting(name)
        return feature in self.rules.job.features if value is None else value is True


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One tuned quantity of a plan.

    `name` is its key in q.yaml and its attribute in the study, `label` stands before its value in tables.
    `change_class` says how far another value changes the training (docs/support.md), `rule` when a value is
    legal, with the framework's file that decides it. `flag` and `ds_key` are the names of Megatron and
    DeepSpeed.
    With `default` "stock" the command's own value is kept unless the search asks for another.
    `words` are the values of a knob of words; `stock` is none of them. `framework` is the only one that has
    it, "" for all.
    """

    name: str
    label: str
    meaning: str
    kind: Kind
    axis: Axis
    change_class: ChangeClass
    rule: str
    flag: str = ""
    ds_key: str = ""
    default: Literal["auto", "stock"] = "auto"
    words: tuple[str | int, ...] = ()
    framework: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for a word that q.yaml takes for the command's own value."""
        if STOCK in self.words:
            raise ValueError(f"{self.name}: the word {STOCK} is the command's own value; take another word")

    def is_of(self, framework: str) -> bool:
        """Whether a framework has the knob."""
        return self.framework in ("", framework)

    @property
    def title(self) -> str:
        """The name in a sentence."""
        return self.name.replace("_", " ")

    @property
    def description(self) -> str:
        """The meaning, with how a word is written that q.yaml takes for a search of the knob."""
        note = f"; write [{AUTO}] for its value {AUTO}; {AUTO} alone tunes it" if AUTO in self.words else ""
        return f"{self.meaning}{note}"

    def value_of(self, plan: Plan) -> Value | None:
        """The plan's value; None where the knob has none there."""
        raise NotImplementedError(self.name)

    def takes(self, value: Value) -> bool:
        """Whether a value has the knob's type."""
        if self.kind == "switch":
            return isinstance(value, bool)
        if self.kind == "word":
            return value in self.words
        if self.kind == "sizes":
            return len(sizes_of(value) or ()) == 2
        return isinstance(value, int) and not isinstance(value, bool)

    def text(self, value: Value | None) -> str:
        """A value as tables have it."""
        return STOCK if value is None else value_text(value)

    def request_text(self, value: Value) -> str:
        """A value as `search` of q.yaml asks for it alone."""
        return f"[{AUTO}]" if value == AUTO else self.text(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveJob:
    """A job that runs, as its adapter reads it on a rank.

    `degrees` are sizes as they were built, by the knob's name. `model` is the configuration that the model
    holds; `optimizer` decides how gradients and parameters are shared, Megatron's DDP configuration or
    DeepSpeed's engine. `tensor_partition` is the label of what cuts the layers, None where nothing tells.
    `offloads_optimizer`: the optimizer that was built steps on the host; None where it was not seen.
    `optimizer_offload_fraction` is the part of it that does; None for an optimizer of the device.
    `shards_layers`: the copies of the model share the optimizer by whole layers. `shards_parameters`:
    Megatron-FSDP shards parameters and gradients, too; None where it shards by another strategy.
    """

    degrees: Mapping[str, int]
    model: Any = None
    optimizer: Any = None
    tensor_partition: str | None = None
    offloads_optimizer: bool | None = None
    optimizer_offload_fraction: float | None = None
    shards_layers: bool = False
    shards_parameters: bool | None = None


def degree_of(name: str) -> Callable[[LiveJob], Value | None]:
    """Reads a size as it was built."""
    return lambda live: live.degrees.get(name)


def always(layout: Layout) -> bool:
    """True: the knob does something in every layout."""
    return True


def has_copies(layout: Layout) -> bool:
    """Whether a layout has several copies of the model, which reduce gradients with each other."""
    return layout.data_parallel * layout.context_parallel > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutKnob(Knob):
    """A knob whose value is a field of the layout, chosen after those before it in the registry.

    `offers` are the values of `auto`; `fault` is the rule that a value breaks, None for a legal one; `kept`
    is why a job keeps the command's value, None where it is free; `applies` is whether another value would do
    anything in a layout; `read_back` is the value in a job that runs, None where that does not have the knob.
    """

    offers: Callable[[KnobContext], Sequence[Value | None]]
    fault: Callable[[Value, KnobContext], str | None]
    kept: Callable[[KnobRules], str | None]
    read_back: Callable[[LiveJob], Value | None]
    applies: Callable[[Layout], bool] = always

    def value_of(self, plan: Plan) -> Value | None:
        """The plan's value."""
        return self.in_layout(plan.layout)

    def in_layout(self, layout: Layout) -> Value | None:
        """The layout's value."""
        value: Value | None = getattr(layout, self.name)
        return value

    def put(self, layout: Layout, value: Value | None) -> Layout:
        """The layout with another value."""
        changes: dict[str, Any] = {self.name: value}
        return replace(layout, **changes)

    def command_value(self, context: KnobContext) -> Value | None:
        """The user's value, which a layout has before the knob's turn."""
        return self.in_layout(context.layout)

    def automatic(self, context: KnobContext) -> Sequence[Value | None]:
        """The values that `auto` searches."""
        return self.offers(context)

    def choices(self, context: KnobContext) -> tuple[Value | None, ...]:
        """The legal values to choose from, each once, as requested; the command's own where it is kept."""
        rules, command = context.rules, self.command_value(context)
        requested = rules.search.requested(self.name)
        is_kept = self.axis in rules.locked or (requested is None and self.kept(rules) is not None)
        if is_kept or not self.is_of(rules.job.framework) or not self.applies(context.layout):
            return (command,)
        if requested is None:
            asked: Sequence[Value | None] = self.automatic(context)
        else:
            asked = [command if value == STOCK else value for value in requested]
        return tuple(
            value for value in dict.fromkeys(asked) if value is None or self.fault(value, context) is None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingKnob(LayoutKnob):
    """A setting of the framework that a plan changes; a plan that keeps the command's value does not name it.

    `destination` is the name in Megatron's arguments, `unset` the value where the flag is absent: True for a
    switch that its flag turns off. An argument that is a member of an enumeration is known by the member's
    name, which its flag takes. With `needs_gpu` no processor runs another value than that of an absent flag.
    `used_by` names the setting that needs this one for some of its values, and without which this one has no
    effect: a command need not have a value, and a request that no layout can have is no fault.
    """

    destination: str
    unset: Value | None = None
    needs_gpu: bool = False
    used_by: str = ""

    @property
    def without_flag(self) -> Value | None:
        """The value where the flag is absent; None where the descriptor does not say it."""
        return False if self.kind == "switch" and self.unset is None else self.unset

    def in_layout(self, layout: Layout) -> Value | None:
        """The plan's value; None where it keeps the command's."""
        return layout.setting(self.name)

    def put(self, layout: Layout, value: Value | None) -> Layout:
        """The layout with the setting changed; None keeps the command's."""
        return layout.with_setting(self.name, value)

    def automatic(self, context: KnobContext) -> Sequence[Value | None]:
        """The values that `auto` searches: what is offered, and the command's own."""
        return (self.command_value(context), *self.offers(context))

    def choices(self, context: KnobContext) -> tuple[Value | None, ...]:
        """As for every knob, with None for the command's own value, which is offered first."""
        command = self.command_value(context)
        if command is None:
            return (None,)
        values = LayoutKnob.choices(self, context)
        kept = tuple(None if value in (None, command) else value for value in values)
        return tuple(sorted(dict.fromkeys(kept), key=lambda value: value is not None)) or (None,)

    def command_value(self, context: KnobContext) -> Value | None:
        """The value of the user's command, as RANK 0 read it back; None where it did not."""
        return context.rules.job.setting(self.name)

    def read(self, args: Namespace) -> Value | None:
        """The value in Megatron's arguments; None where this release does not have it."""
        if not hasattr(args, self.destination):
            return None
        value: Value | None = value_in_words(getattr(args, self.destination))
        return self.unset if value is None else value

    def write(self, value: Value) -> Any:
        """Megatron's argument for a value; None takes the flag out of the command."""
        return None if value == self.without_flag else value

    def arguments(self, value: Value) -> dict[str, Any]:
        """Megatron's arguments for a value, as `write` has them, by their names: most values have one."""
        return {self.destination: self.write(value)}

    def is_for_gpus(self, value: Value) -> bool:
        """Whether a value runs on GPUs only."""
        return self.needs_gpu and value != self.without_flag


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKnob(Knob):
    """A knob that is no field of the layout: the space chooses it together with others."""

    part: Callable[[Plan], Value | None]

    def value_of(self, plan: Plan) -> Value | None:
        """The plan's value; None where the knob has none there."""
        return self.part(plan)


def value_text(value: Value) -> str:
    """A value as q.yaml and tables have it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def kept_fault(value: Value, command: Value, reason: str | None) -> str | None:
    """The rule that another value than the command's breaks where `reason` keeps the command's."""
    if reason is None or value == command:
        return None
    words = value_text(command)
    return f"must be the command's own {words}: {reason}"


def reason_among(reasons: Mapping[str, str], rules: KnobRules) -> str | None:
    """The reason of the job's first feature that has one in `reasons`; None without such a feature."""
    return next((reasons[name] for name in rules.job.features if name in reasons), None)


def off_and_on(context: KnobContext) -> tuple[bool, ...]:
    """The values of a switch."""
    return (False, True)


def never_faulty(value: Value, context: KnobContext) -> str | None:
    """No rule but the range that q.yaml allows."""
    return None


def never_kept(rules: KnobRules) -> str | None:
    """No reason to keep the command's value but a locked axis."""
    return None
