"""The stage of multi-token prediction: the last one, or the one before it where that has the head alone."""

from collections.abc import Collection

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.expert_overlap import EXPERT_OVERLAP
from quartet_plugin.space.knobs.knob import KnobRules, PlanKnob

LAST, BEFORE_LAST = "last", "before_last"
# The feature of a command that has these layers on the stage before the last one.
BEFORE_LAST_FEATURE = "mtp_before_last"


def _stage_of(plan: Plan) -> str | None:
    if plan.made_for.mtp_layers is None or plan.layout.num_stages == 1:
        return None
    return mtp_stage_of(plan.split)


def mtp_stage_of(split: Split) -> str:
    """The stage of multi-token prediction under a split, where the model has it."""
    return BEFORE_LAST if split.mtp_before_last else LAST


MTP_STAGE = PlanKnob(
    name="mtp_stage",
    label="MTP",
    meaning="the stage of multi-token prediction; before_last leaves the head alone on the last stage",
    kind="word",
    words=(LAST, BEFORE_LAST),
    axis=Axis.SPLIT,
    change_class="A",
    rule="auto tries before_last only for a command that has it; before_last needs a pipeline and a schedule "
    "of the framework; with virtual stages it needs more than two pipeline ranks "
    "(megatron/core/models/common/language_module/language_module.py); not in a hybrid model "
    "(megatron/training/arguments.py); the script passes get_embedding_ranks and gives the stage tokens, as "
    "Megatron's pretrain_gpt.py does",
    flag="--pipeline-model-parallel-layout",
    part=_stage_of,
    framework=MEGATRON.framework,
)


def asked_mtp_stages(
    requested: tuple[str, ...] | None, *, features: Collection[str], is_kept: bool
) -> tuple[str, ...]:
    """The stages that a search asks for; for None the command's own, and the last one.

    `is_kept`: the command's split is kept, so that its own is the only one.
    """
    command = BEFORE_LAST if BEFORE_LAST_FEATURE in features else LAST
    if is_kept:
        return (command,)
    return tuple(dict.fromkeys((command, LAST))) if requested is None else requested


def may_be_last(rules: KnobRules) -> bool:
    """Whether plans may have multi-token prediction on the last stage, as the plugin's schedules have it."""
    return not rules.job.mtp_layers or LAST in _asked(rules)


def may_be_before_last(rules: KnobRules) -> bool:
    """Whether plans may have multi-token prediction on the stage before the last one."""
    return bool(rules.job.mtp_layers) and BEFORE_LAST in _asked(rules)


def _asked(rules: KnobRules) -> tuple[str, ...]:
    return asked_mtp_stages(
        rules.search.requested(MTP_STAGE.name),
        features=rules.job.features,
        is_kept=MTP_STAGE.axis in rules.locked,
    )


def mtp_stages_of(layout: Layout, rules: KnobRules) -> tuple[str, ...]:
    """The stages to choose from for a layout with a schedule of the framework; `last` without such layers."""
    if not rules.job.mtp_layers:
        return (LAST,)
    return tuple(
        stage for stage in _asked(rules) if stage == LAST or fault_of_before_last(layout, rules) is None
    )


def kept_mtp_stage(rules: KnobRules) -> str | None:
    """Why plans have multi-token prediction only on the last stage unless the search asks for another.

    None where they do not.
    """
    if not rules.job.mtp_layers:
        return "the model has no multi-token prediction"
    if BEFORE_LAST_FEATURE in rules.job.features:
        return None
    return "the command has it on the last stage, and its script may give no other stage tokens"


def fault_of_before_last(layout: Layout, rules: KnobRules) -> str | None:
    """The rule that multi-token prediction on the stage before the last one breaks; None for no fault."""
    features = rules.job.features
    if not rules.job.mtp_layers:
        return "the model has no multi-token prediction"
    if rules.job.shape.layer_kinds is not None:
        return "a hybrid model has it on the last stage"
    if layout.pipeline_parallel == 1:
        return "needs a pipeline"
    if layout.pipeline_parallel == 2 and layout.virtual_stages > 1:
        # Megatron sums the gradients of one copy of the embedding a rank.
        return "needs more than two pipeline ranks with virtual stages"
    if _may_overlap(rules) and not {BEFORE_LAST_FEATURE, "overlap_moe"} <= set(features):
        return "was not tried with overlap of expert communication"
    return None


def _may_overlap(rules: KnobRules) -> bool:
    """Whether some plan has overlap of expert communication; `auto` searches it."""
    if "overlap_moe" in rules.job.features:
        return True
    requested = rules.search.requested(EXPERT_OVERLAP.name)
    return EXPERT_OVERLAP.kept(rules) is None and (requested is None or True in requested)
