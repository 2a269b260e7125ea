"""The parts of a layer that are replayed from CUDA graphs, in a command that captures some."""

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.megatron_arguments import value_in_words
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, SettingKnob, Value, kept_fault

# Sets that both implementations of graphs have: the local one captures both parts of routing, or none.
_ROUTING = "moe_preprocess+moe_router"
SETS = ("attn", "mlp", "attn+mlp", _ROUTING, f"attn+{_ROUTING}", f"attn+mlp+{_ROUTING}", f"mlp+{_ROUTING}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartsKnob(SettingKnob):
    """A setting that is a list of members of an enumeration, which Megatron's flag takes as words."""

    def read(self, args: Namespace) -> Value | None:
        """The parts in Megatron's arguments; None where graphs hold whole layers, or there are none."""
        return _text(getattr(args, self.destination, None) or ())

    def write(self, value: Value) -> Any:
        """The names as a list."""
        return _parts(value)


def _text(parts: Iterable[Any]) -> str | None:
    return "+".join(sorted(str(value_in_words(part)) for part in parts)) or None


def _parts(value: Value) -> list[str]:
    return str(value).split("+")


def _offers(context: KnobContext) -> list[str]:
    return [text for text in SETS if _parts_fault(text, context) is None]


def _fault(value: Value, context: KnobContext) -> str | None:
    command = context.rules.job.setting("cuda_graph_modules")
    if value == command:
        return None
    return kept_fault(value, command or "whole layers", _kept(context.rules)) or _parts_fault(value, context)


def _parts_fault(value: Value, context: KnobContext) -> str | None:
    """The rule that a set of parts breaks; None for a legal one."""
    job, parts = context.rules.job, set(_parts(value))
    features = job.features
    has_routing = "moe_router" in parts
    if has_routing and "moe" not in features:
        return "the model has no experts"
    if "mlp" in parts and "moe" in features and not (job.experts and job.experts.num_dense_layers):
        return "mlp: every layer has experts"
    if "mlp" in parts and context.is_on("overlap_moe_expert_parallel_comm", feature="overlap_moe"):
        return "mlp: not supported with --overlap-moe-expert-parallel-comm"
    if has_routing and {"moe_capacity", "fp8"} & set(features):
        return "moe_preprocess: not supported with a capacity, or with padding of the router for fp8"
    if context.layout.recompute == "selective":
        again = set(context.recomputed_modules)
        if has_routing and "moe" in again:
            return "moe_router: not supported with recompute of moe"
        if "attn" in parts and "core_attn" in again:
            return "attn: not supported with recompute of core_attn with dropout"
        if "mlp" in parts & again:
            return "mlp: not supported with its recompute with dropout"
    return None


def _kept(rules: KnobRules) -> str | None:
    job = rules.job
    if "cuda_graphs" not in job.features:
        return "the command captures no graphs"
    if job.setting("cuda_graph_modules") is None:
        return "the command captures whole layers, or the iteration"
    if job.setting("delay_wgrad_compute") is True:
        return "delayed weight gradients in graphs need a newer Transformer Engine"
    bound = ("hybrid", "cpu_offload", "activation_offload")
    return next((name for name in bound if name in job.features), None)


CUDA_GRAPH_MODULES = _PartsKnob(
    name="cuda_graph_modules",
    label="cuda_graph_modules",
    meaning="parts of a layer that are replayed from CUDA graphs, joined by +",
    kind="word",
    words=SETS,
    axis=Axis.OPTIONS,
    change_class="A",
    rule="a command that captures parts of layers; mlp with dense layers and not with "
    "overlap_moe_expert_parallel_comm, the router without capacity, each not around what is recomputed "
    "(megatron/core/transformer/transformer_config.py); needs a GPU",
    flag="--cuda-graph-modules",
    destination="cuda_graph_modules",
    needs_gpu=True,
    default="stock",
    offers=_offers,
    fault=_fault,
    kept=_kept,
    read_back=lambda live: _text(getattr(live.model, "cuda_graph_modules", None) or ()),
    framework=MEGATRON.framework,
)
