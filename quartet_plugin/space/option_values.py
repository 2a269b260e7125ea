"""The values that an option can have in a layout, whatever the options before it are.

The rules of an option read few other options. It is tried with the values of those alone, so that the work
does not grow with the product of all options that a search asks for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from quartet_plugin.model.layout import Layout
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, LayoutKnob, Value

type Chosen = Mapping[str, Value | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _NotingContext(KnobContext):
    """A context that notes the names of the settings which rules read."""

    names_read: set[str] = field(default_factory=set, compare=False)

    def setting(self, name: str) -> Value | None:
        """A setting's value in the layout, as in every context."""
        self.names_read.add(name)
        return KnobContext.setting(self, name)


def option_values(
    knob: LayoutKnob, layout: Layout, *, before: Sequence[LayoutKnob], shape: ModelShape, rules: KnobRules
) -> Iterator[tuple[Value | None, ...]]:
    """The values that an option can take in `layout`, with the command's.

    They are given for each combination of the earlier options that its rules read. `layout` has no option
    chosen; `before` are the options chosen earlier.
    """
    context = KnobContext(layout=layout, shape=shape, rules=rules)
    command = knob.command_value(context)
    for _, choices in _choices(knob, before, {}, context):
        yield (command, *choices)


def _choices(
    knob: LayoutKnob, before: Sequence[LayoutKnob], chosen: Chosen, bare: KnobContext
) -> Iterator[tuple[Chosen, tuple[Value | None, ...]]]:
    """The choices of an option, with `chosen` and the values of the further options that its rules read."""
    layout = bare.layout
    for other in before:
        # Rules see the options before their own alone. None is the command's value, as in a bare layout.
        value = chosen.get(other.name)
        if value is not None:
            layout = other.put(layout, value)
    context = _NotingContext(layout=layout, shape=bare.shape, rules=bare.rules)
    choices = knob.choices(context)
    unknown = context.names_read - chosen.keys()
    index = next((index for index, other in enumerate(before) if other.name in unknown), None)
    if index is None:
        yield chosen, choices
        return
    for others, values in _choices(before[index], before[:index], chosen, bare):
        for value in values:
            yield from _choices(knob, before, {**others, before[index].name: value}, bare)
