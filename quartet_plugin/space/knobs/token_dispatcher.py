"""The dispatcher that brings tokens to the devices of their experts, with the back end of `flex`."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.megatron_arguments import FLEX_BACKENDS, flex_backend_of
from quartet_plugin.model.plan import STOCK
from quartet_plugin.model.releases import release_of
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, LiveJob, SettingKnob, Value, kept_fault

NAME = "moe_token_dispatcher"
ALLGATHER, ALLTOALL = "allgather", "alltoall"
# Alone it is the flex dispatcher with a back end that no plan has.
FLEX = "flex"
WITH_BACKENDS = tuple(f"{FLEX}-{backend}" for backend in FLEX_BACKENDS)
_BACKEND, _OLDER_SWITCH = "moe_flex_dispatcher_backend", "moe_enable_deepep"
# Features that Megatron does not have with `allgather`, or of which a switch to it would undo a choice.
_WITHOUT_ALLGATHER = ("overlap_moe", "moe_shared_expert_overlap", "moe_router_padding")
# The release from which on flex has the shared expert's overlap.
_SHARED_BESIDE_FLEX = Version("0.18")
# Features with which tokens are dropped, or graphs captured, otherwise by another dispatcher.
_BOUND = ("moe_capacity", "cuda_graphs")


@dataclass(frozen=True, slots=True, kw_only=True)
class _DispatcherKnob(SettingKnob):
    """Megatron's dispatcher with the back end of flex: two arguments, and the older switch of DeepEP."""

    def choices(self, context: KnobContext) -> tuple[Value | None, ...]:
        """The legal values; where a device has all experts, one that is asked replaces the command's flex."""
        rules = context.rules
        if is_flex(self.command_value(context), rules) and not _exchanges(context.layout):
            others = [value for value in _asked(rules) if not is_flex(value, rules)]
            return tuple(others[:1]) or (None,)
        return SettingKnob.choices(self, context)

    def read(self, args: Namespace) -> Value | None:
        """The dispatcher in Megatron's arguments, with its back end."""
        return _with_backend(SettingKnob.read(self, args), args)

    def arguments(self, value: Value) -> dict[str, Any]:
        """Megatron's arguments for a value, by name; plain `flex` leaves the back end as the command has it.

        For the others the older switch of DeepEP is left out, and so is a back end without flex: Megatron
        refuses some of these pairs.
        """
        kind, _, backend = str(value).partition("-")
        if value == FLEX:
            return {self.destination: kind}
        return {self.destination: kind, _BACKEND: backend or None, _OLDER_SWITCH: None}

    def is_for_gpus(self, value: Value) -> bool:
        """Whether no processor runs a value: the kernels of flex are those of GPUs."""
        return str(value).startswith(FLEX)


def _with_backend(kind: Value | None, args: Any) -> Value | None:
    backend = flex_backend_of(args)
    return f"{FLEX}-{backend}" if kind == FLEX and backend in FLEX_BACKENDS else kind


def _read_back(live: LiveJob) -> Value | None:
    return _with_backend(getattr(live.model, "moe_token_dispatcher_type", None), live.model)


def is_flex(value: Value | None, rules: KnobRules) -> bool:
    """Whether a dispatcher is flex; None is the command's where it was not read, which a feature tells."""
    return "moe_flex_dispatcher" in rules.job.features if value is None else str(value).startswith(FLEX)


def may_have_flex(rules: KnobRules) -> bool:
    """Whether a plan of the job may have the flex dispatcher."""
    return any(is_flex(value, rules) for value in _asked(rules))


def has_only_flex(rules: KnobRules) -> bool:
    """Whether every plan of the job has the flex dispatcher."""
    return all(is_flex(value, rules) for value in _asked(rules))


def may_keep_flex(rules: KnobRules) -> bool:
    """Whether the command has the flex dispatcher and a plan of the job may have it, with either back end."""
    return may_have_flex(rules) and is_flex(rules.job.setting(NAME), rules)


def refuses_shared_overlap(value: Value | None, rules: KnobRules) -> bool:
    """Whether a dispatcher runs without the shared expert's overlap: flex before a release of Megatron."""
    return is_flex(value, rules) and release_of(rules.job.framework_version) < _SHARED_BESIDE_FLEX


def lacks_peers(context: KnobContext) -> bool:
    """Whether a command's flex dispatcher, with EP 1, would have no device to exchange tokens with.

    DeepEP asserts a peer (megatron/core/transformer/moe/token_dispatcher.py). A tensor-parallel device is one
    only if the command has EP 1, too: a command with EP above 1 does not show whether these share experts.
    """
    return context.layout.tensor_parallel == 1 or context.rules.job.layout.expert_parallel > 1


def _asked(rules: KnobRules) -> tuple[Value | None, ...]:
    """The dispatchers that a job may have where the search names some, else the command's.

    What is searched without a name is flex only if the command's is.
    """
    command, asked = rules.job.setting(NAME), rules.search.requested(NAME)
    if command is None or asked is None or Axis.OPTIONS in rules.locked:
        return (command,)
    values = dict.fromkeys(command if value == STOCK else value for value in asked)
    legal = [value for value in values if value == command or _fault_in_job(value, rules) is None]
    return tuple(legal) or (command,)


def _offers(context: KnobContext) -> tuple[str, ...]:
    return (ALLGATHER, ALLTOALL)


def _fault(value: Value, context: KnobContext) -> str | None:
    rules, layout = context.rules, context.layout
    if value == rules.job.setting(NAME):
        is_alone = is_flex(value, rules) and layout.expert_parallel == 1 and lacks_peers(context)
        return "needs EP above 1" if is_alone else None
    if fault := _fault_in_job(value, rules):
        return fault
    return "needs EP above 1" if is_flex(value, rules) and layout.expert_parallel == 1 else None


def _fault_in_job(value: Value, rules: KnobRules) -> str | None:
    """The rule that another value than the command's breaks in every layout of a job."""
    bound = (*_WITHOUT_ALLGATHER, *_BOUND) if value == ALLGATHER else _BOUND
    if refuses_shared_overlap(value, rules):
        bound = ("moe_shared_expert_overlap", *bound)
    if kept := kept_fault(value, rules.job.setting(NAME) or ALLGATHER, _reason(bound, rules)):
        return kept
    return _fault_of_flex(value, rules) if is_flex(value, rules) else None


def _fault_of_flex(value: Value, rules: KnobRules) -> str | None:
    """The rule of the kernels of flex that a job breaks."""
    job = rules.job
    if value == FLEX:
        return f"must be the command's own; a plan names its back end: {' or '.join(WITH_BACKENDS)}"
    if job.layer_impl == "local":
        return "its kernels run on GPUs; needs --transformer-impl transformer_engine, which no CPU has"
    if job.precision != "bf16":
        return "needs --bf16: its kernels sum no other type"
    if "moe_router_fp64" in job.features:
        return "its kernels round the probabilities to fp32, and the command has --moe-router-dtype fp64"
    return None


def _kept(rules: KnobRules) -> str | None:
    return _reason((*_WITHOUT_ALLGATHER, "moe_flex_dispatcher", *_BOUND), rules)


def _reason(features: tuple[str, ...], rules: KnobRules) -> str | None:
    """Why a job keeps its dispatcher: without experts, or with one of the features."""
    if "moe" not in rules.job.features:
        return "the model has no experts"
    return next((name for name in features if name in rules.job.features), None)


def _exchanges(layout: Layout) -> bool:
    """Whether tokens leave their device: experts of one device are permuted in place."""
    return layout.expert_parallel * layout.tensor_parallel > 1


TOKEN_DISPATCHER = _DispatcherKnob(
    name=NAME,
    label="dispatcher",
    meaning="how tokens reach the devices of their experts; flex-deepep, flex-hybridep only if named",
    kind="word",
    words=(ALLGATHER, ALLTOALL, FLEX, *WITH_BACKENDS),
    axis=Axis.OPTIONS,
    change_class="B",
    rule="several devices with experts; no allgather with overlap of expert communication or of the shared "
    "expert, or with a padded router; kept with capacity or CUDA graphs "
    "(megatron/core/transformer/transformer_config.py); flex with EP above 1, bf16 and no fp64 router "
    "(megatron/core/transformer/moe/token_dispatcher.py), with --moe-flex-dispatcher-backend; needs a GPU "
    "and the package deep_ep (megatron/core/transformer/moe/fused_a2a.py)",
    flag="--moe-token-dispatcher-type",
    destination="moe_token_dispatcher_type",
    default="stock",
    offers=_offers,
    fault=_fault,
    kept=_kept,
    read_back=_read_back,
    framework=MEGATRON.framework,
    applies=_exchanges,
)
