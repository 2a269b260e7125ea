"""How devices that share a sequence bring its keys and values to each other's queries.

Of `a2a+p2p` also which of them exchange heads: sizes of hierarchical context parallelism.
"""

import math
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.hierarchical_context import SIZES, sizes_of, sizes_text, two_level_sizes
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import STOCK
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.context_parallel import CONTEXT_PARALLEL
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, SettingKnob, Value, kept_fault

NAME = "cp_comm_type"
P2P, ALL_GATHER, A2A, A2A_P2P = WORDS = ("p2p", "all_gather", "a2a", "a2a+p2p")
# Features with which a plan keeps the command's.
_KEPT = {
    "cp_comm_by_layer": "the command has a type for each layer",
    "packing": "some releases of Transformer Engine have p2p alone for packed sequences",
    "attention_variant": "its attention is none of Transformer Engine's",
    "heterogeneous": "its layers have query groups of their own",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _TypeKnob(SettingKnob):
    """A word of Megatron's argument, which is a list of one word or of one for each layer."""

    def read(self, args: Namespace) -> Value | None:
        """The type of all layers; None where they have types of their own, or this release has none."""
        return _type_in(args)


def _type_in(owner: Any) -> str | None:
    """The type of all layers in arguments, or in a model's configuration: without one Megatron's, p2p."""
    if not hasattr(owner, NAME):
        return None
    value = getattr(owner, NAME)
    types = value if isinstance(value, list | tuple) else (P2P if value is None else value,)
    return str(types[0]) if len(types) == 1 and types[0] in WORDS else None


def _offers(context: KnobContext) -> tuple[str, ...]:
    return WORDS


def _fault(value: Value, context: KnobContext) -> str | None:
    rules = context.rules
    if kept := kept_fault(value, rules.job.setting(NAME) or P2P, _kept(rules)):
        return kept
    return _attention_fault(value, rules) or _degrees_fault(value, context)


def _kept(rules: KnobRules) -> str | None:
    job = rules.job
    kinds = job.shape.layer_kinds
    if kinds is not None and not kinds.attention:
        return "the model has no attention"
    if "hybrid_context_parallel" in job.features:
        return "--hybrid-context-parallel makes groups of its own for each sequence"
    return next((reason for name, reason in _KEPT.items() if name in job.features), None)


def _attention_fault(value: Value, rules: KnobRules) -> str | None:
    """The kind of attention that Transformer Engine does not have with a type (`context_parallel.py`)."""
    features = rules.job.features
    if "attention_sink" in features and value != A2A:
        return "must be a2a with --softmax-type"
    if "sliding_window" in features and value in (P2P, A2A_P2P):
        return "must be all_gather or a2a with --window-size"
    if "multi_latent_attention" in features and value in (ALL_GATHER, A2A):
        return "must be p2p or a2a+p2p with latent attention"
    return None


def _degrees_fault(value: Value, context: KnobContext) -> str | None:
    """The rule that degrees break with a type: ranks that exchange heads have equal numbers of them."""
    if value == A2A:
        return _heads_fault(context.layout.context_parallel, context)
    if value != A2A_P2P:
        return None
    faults = [_sizes_fault(sizes, context) for sizes in _asked_sizes(context)] or [_sizes_fault("", context)]
    return None if None in faults else faults[-1]


def _asked_sizes(context: KnobContext) -> tuple[str, ...]:
    """The texts of sizes that the search asks for, fitting or not; the command's own come first."""
    rules = context.rules
    command, asked = rules.job.setting(SIZES), rules.search.requested(SIZES)
    if Axis.OPTIONS in rules.locked or _kept(rules):
        asked = (STOCK,)
    elif asked is None:
        asked = (STOCK, *_offers_sizes(context))
    texts = dict.fromkeys(command if text == STOCK else text for text in asked)
    return tuple(sorted((str(text) for text in texts if text), key=lambda text: text != command))


def _offers_sizes(context: KnobContext) -> tuple[str, ...]:
    return two_level_sizes(context.layout.context_parallel)


def _sizes_fault(value: Value, context: KnobContext) -> str | None:
    """The rule that a text of sizes breaks with `a2a+p2p`, which hands Transformer Engine two groups."""
    sizes, size = sizes_of(value), context.layout.context_parallel
    if sizes is None or len(sizes) != 2 or math.prod(sizes) != size:
        return f"needs two --hierarchical-context-parallel-sizes whose product is CP ({size})"
    return _heads_fault(sizes[0], context)


def _heads_fault(size: int, context: KnobContext) -> str | None:
    """The rule that `size` ranks break which exchange heads."""
    layout, shape = context.layout, context.shape
    tensor, heads, groups = layout.tensor_parallel, shape.num_attention_heads, shape.num_query_groups
    # Several tensor-parallel ranks may hold one query group.
    if heads % (tensor * size) or max(1, groups // tensor) % size:
        return (
            f"{size} x TP ({tensor}) ranks that exchange heads must divide {heads} heads and {groups} "
            "query groups"
        )
    return None


def has_no_type(context: KnobContext) -> bool:
    """Whether the search leaves degrees the command's type alone, which they cannot have.

    The command's own degrees have it, with its own shape.
    """
    layout, job = context.layout, context.rules.job
    command, baseline = job.setting(NAME) or P2P, job.layout
    degrees = (layout.tensor_parallel, layout.context_parallel)
    is_commands = degrees == (baseline.tensor_parallel, baseline.context_parallel)
    if (is_commands and context.shape == job.shape) or not _shares(layout):
        return False
    if (_attention_fault(command, context.rules) or _degrees_fault(command, context)) is None:
        return False
    return CP_COMM_TYPE.choices(context) == (None,)


def _shares(layout: Layout) -> bool:
    """Whether several devices share a sequence."""
    return layout.context_parallel > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _SizesKnob(SettingKnob):
    """Two numbers of Megatron's argument, which a plan with `a2a+p2p` alone needs."""

    def choices(self, context: KnobContext) -> tuple[Value | None, ...]:
        """The sizes that the search asks for and that fit; None for the command's own, or for none."""
        if not self.is_of(context.rules.job.framework) or not _has_rings_of_groups(context):
            return (None,)
        command = self.command_value(context)
        fitting = [text for text in _asked_sizes(context) if _sizes_fault(text, context) is None]
        return tuple(None if text == command else text for text in fitting) or (None,)

    def read(self, args: Namespace) -> Value | None:
        """The sizes in Megatron's arguments; None without any."""
        return sizes_text(getattr(args, self.destination, None))

    def write(self, value: Value) -> Any:
        """The sizes as a list of numbers."""
        return [*(sizes_of(value) or ())]


def _has_rings_of_groups(context: KnobContext) -> bool:
    """Whether a layout has `a2a+p2p`, as the plan or the command says it."""
    return _shares(context.layout) and context.setting(NAME) == A2A_P2P


def _fault_of_hierarchy(value: Value, context: KnobContext) -> str | None:
    return _sizes_fault(value, context) if _has_rings_of_groups(context) else f"needs {NAME} {A2A_P2P}"


def may_have_hierarchy(rules: KnobRules) -> bool:
    """Whether a plan of the job may have sizes that its command does not say."""
    search, job = rules.search, rules.job
    types, degrees = search.requested(NAME), search.requested(CONTEXT_PARALLEL.name)
    may_share = job.layout.context_parallel > 1 or degrees not in ((STOCK,), (1,))
    may_have_type = job.setting(NAME) == A2A_P2P or types is None or A2A_P2P in types
    return may_share and may_have_type and search.requested(SIZES) != (STOCK,)


CP_COMM_TYPE = _TypeKnob(
    name=NAME,
    label=NAME,
    meaning="how devices that share a sequence exchange it: p2p, all_gather, a2a or a2a+p2p",
    kind="word",
    words=WORDS,
    axis=Axis.OPTIONS,
    change_class="B",
    rule="CP above 1; a2a where CP x TP divides heads and query groups, a2a+p2p with "
    "hierarchical_context_parallel_sizes (megatron/training/arguments.py); with a sliding window all_gather "
    "and a2a, with --softmax-type a2a, with latent attention p2p and a2a+p2p "
    "(megatron/core/extensions/transformer_engine.py); kept with types by layer, packed sequences, "
    "--hybrid-context-parallel, other attention variants, heterogeneous layers, or no attention",
    flag="--cp-comm-type",
    destination=NAME,
    unset=P2P,
    default="stock",
    offers=_offers,
    fault=_fault,
    kept=_kept,
    read_back=lambda live: _type_in(live.model),
    framework=MEGATRON.framework,
    applies=_shares,
)

HIERARCHICAL_SIZES = _SizesKnob(
    name=SIZES,
    label="cp_sizes",
    meaning="two sizes for a2a+p2p: ranks that exchange heads, ranks of each ring, like 4+2",
    kind="sizes",
    axis=Axis.OPTIONS,
    change_class="B",
    rule="with cp_comm_type a2a+p2p; two numbers whose product is CP (megatron/training/arguments.py, "
    "megatron/core/parallel_state.py), of which the first x TP divides heads and query groups "
    "(megatron/core/extensions/transformer_engine.py); auto: those above 1; kept where cp_comm_type is",
    flag="--hierarchical-context-parallel-sizes",
    destination=SIZES,
    default="stock",
    used_by=NAME,
    offers=_offers_sizes,
    fault=_fault_of_hierarchy,
    kept=_kept,
    read_back=lambda live: sizes_text(getattr(live.model, SIZES, None)),
    framework=MEGATRON.framework,
    applies=_shares,
)
