"""Expert tensor parallelism: whether tensor-parallel devices share each expert, or hold whole ones."""

from collections.abc import Iterable, Mapping, Sequence

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import STOCK
from quartet_plugin.space.features import PARTS_KEPT, Axis
from quartet_plugin.space.knobs.knob import (
    KnobContext,
    KnobRules,
    SettingKnob,
    Value,
    kept_fault,
    reason_among,
)
from quartet_plugin.space.knobs.token_dispatcher import may_keep_flex

AS_LAYERS, WHOLE = 0, 1
NAME = "expert_tensor_parallel"
BIASED = "moe_linear_bias"
# The command's ranks are ordered with pipelines inside of the copies.
_ORDER = "tp_pp_dp_order"
# What Megatron asserts of experts with biases (megatron/core/transformer/transformer_config.py).
BIASES_FAULT = "experts with linear biases are not shared by tensor-parallel devices"


def shares_biased_experts(rules: KnobRules) -> bool:
    """Whether tensor-parallel devices would share experts with biases: no plan of the job has whole ones."""
    return BIASED in rules.job.features and not _may_have_whole_experts(rules)


def expert_devices(layout: Layout, rules: KnobRules) -> tuple[int, str]:
    """The number of a stage's devices over which some plan spreads its experts, and its formula in words.

    They are the copies of a tensor-parallel rank, and the ranks themselves where each may hold whole experts.
    """
    copies = layout.data_parallel * layout.context_parallel
    if layout.tensor_parallel > 1 and _may_have_whole_experts(rules):
        devices = layout.tensor_parallel * copies
        return devices, f"TP x DP x CP ({devices})"
    return copies, f"DP x CP ({copies})"


def expert_pipelines_fault(layout: Layout, rules: KnobRules) -> str | None:
    """The rule on pipelines under --use-tp-pp-dp-mapping that each ETP of a plan breaks; None for no fault.

    In that order the next rank of a pipeline is TP x CP ranks away, that of the experts' EP x ETP; Megatron
    asserts that both are the same pipelines (megatron/core/parallel_state.py, initialize_model_parallel).
    """
    # Not tried before the order asks for them: every layout comes by here.
    shares = (
        share
        for share in _shares_of_plans(rules)
        if layout.tensor_parallel == 1 or _fault_of_share(share, layout, rules) is None
    )
    return _fault_of_order(layout, rules, shares=shares)


def _fault_of_order(layout: Layout, rules: KnobRules, *, shares: Iterable[Value]) -> str | None:
    if _ORDER not in rules.job.features or layout.pipeline_parallel == 1:
        return None
    devices = layout.tensor_parallel * layout.context_parallel
    holders = {1 if share == WHOLE else layout.tensor_parallel for share in shares}
    if devices in {layout.expert_parallel * size for size in holders}:
        return None
    return f"EP x ETP must be TP x CP ({devices}) with --use-tp-pp-dp-mapping and PP above 1"


def _may_have_whole_experts(rules: KnobRules) -> bool:
    """Whether some plan of the job has whole experts on tensor-parallel devices."""
    return WHOLE in _shares_of_plans(rules)


def _shares_of_plans(rules: KnobRules) -> set[Value]:
    """The values that plans of the job may have; a command's that is not known is that of the layers."""
    is_kept = Axis.OPTIONS in rules.locked or _kept(rules) is not None
    command = rules.job.setting(NAME)
    if command is None:
        return {AS_LAYERS}
    return _shares(command, (STOCK,) if is_kept else rules.search.requested(NAME))


def may_be_whole(command: Value | None, asked: Sequence[Value] | None) -> bool:
    """Whether plans may have whole experts, by the values that a search asks for; None is all of them.

    `command` is the command's own value, None where it is not known.
    """
    return command is not None and WHOLE in _shares(command, asked)


def _shares(command: Value, asked: Sequence[Value] | None) -> set[Value]:
    """The values that a search asks for; None is all of them."""
    values = (AS_LAYERS, WHOLE) if asked is None else asked
    return {command if value == STOCK else value for value in values}


def _offers(context: KnobContext) -> tuple[int, ...]:
    return (AS_LAYERS, WHOLE)


def _fault(value: Value, context: KnobContext) -> str | None:
    layout, command = context.layout, context.rules.job.setting(NAME)
    if kept := kept_fault(value, command or AS_LAYERS, _kept(context.rules)):
        return kept
    fault = _fault_of_share(value, layout, context.rules)
    return fault or _fault_of_order(layout, context.rules, shares=(value,))


def _fault_of_share(value: Value, layout: Layout, rules: KnobRules) -> str | None:
    """The rule that a value breaks in a tensor-parallel layout in any order of ranks; None for none."""
    if value == WHOLE and layout.expert_parallel == 1 and may_keep_flex(rules):
        return "must be 0: the flex dispatcher needs devices to exchange tokens with, and EP is 1"
    if value == AS_LAYERS and BIASED in rules.job.features:
        return f"must be 1: {BIASES_FAULT}"
    if value == AS_LAYERS and layout.needs_whole_experts:
        copies = layout.data_parallel * layout.context_parallel
        return f"must be 1: EP {layout.expert_parallel} does not divide DP x CP ({copies})"
    return None


def _kept(rules: KnobRules) -> str | None:
    if "moe" not in rules.job.features:
        return "the model has no experts"
    kept = reason_among(PARTS_KEPT, rules)
    if kept is not None:
        return kept
    known = (None, AS_LAYERS, WHOLE)
    other = rules.job.setting(NAME) not in known
    return "the command has a size of its own" if other else None


def _has_tensor_parallel(layout: Layout) -> bool:
    return layout.tensor_parallel > 1


def _in_groups(degrees: Mapping[str, int]) -> int | None:
    """The value by the sizes of groups as they were built."""
    size = degrees.get("expert_tensor_parallel")
    return AS_LAYERS if size is not None and size == degrees["tensor_parallel"] > 1 else size


EXPERT_TENSOR_PARALLEL = SettingKnob(
    name=NAME,
    label="ETP",
    meaning="devices that share each expert: 1, or 0 for as many as share each layer",
    kind="word",
    words=(AS_LAYERS, WHOLE),
    axis=Axis.OPTIONS,
    change_class="B",
    rule="TP above 1; 0 only where EP divides DP x CP (megatron/core/parallel_state.py); 1 not with flex "
    "where EP is 1 (megatron/core/transformer/moe/token_dispatcher.py); EP x ETP is TP x CP with "
    "--use-tp-pp-dp-mapping and PP above 1 (megatron/core/parallel_state.py); 1 with linear biases "
    "(megatron/core/transformer/transformer_config.py); kept with blockwise Muon or SOAP "
    "(megatron/core/optimizer/emerging_optimizers.py)",
    flag="--expert-tensor-parallel-size",
    destination="expert_tensor_parallel_size",
    unset=AS_LAYERS,
    default="stock",
    offers=_offers,
    fault=_fault,
    kept=_kept,
    read_back=lambda live: _in_groups(live.degrees),
    framework=MEGATRON.framework,
    applies=_has_tensor_parallel,
)
