"""The optimizer's state and step on the host, which leaves its bytes on the device to activations."""

from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.plan import STOCK
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.knob import KnobContext, KnobRules, SettingKnob, Value, kept_fault, off_and_on

FRACTION = "optimizer_offload_fraction"
# A fraction of which nothing is on the host: that of configurations which do not say it.
_NOTHING = "0"
# Features that hold the optimizer's state in a way of their own, or of which a rule here cannot tell.
# Reports of older releases have the last one, and no fraction.
_BOUND = ("fsdp", "torch_fsdp", "fp8", "fp4", "optimizer_offload_part")


def offload_kept_reason(rules: KnobRules) -> str | None:
    """Why a job's optimizer stays where the command has it; None where the host may have it."""
    job = rules.job
    if job.layer_impl == "local":
        return "it copies between a GPU and its host; needs --transformer-impl transformer_engine"
    if "precision_aware_optimizer" not in job.features:
        return "needs --use-precision-aware-optimizer in the command"
    return next((name for name in _BOUND if name in job.features), None)


def _fault(value: Value, context: KnobContext) -> str | None:
    rules = context.rules
    command = rules.job.setting("optimizer_cpu_offload") is True
    if kept := kept_fault(value, command, offload_kept_reason(rules)):
        return kept
    if not value:
        return None
    if rules.job.setting(FRACTION) == _NOTHING and rules.search.requested(FRACTION) == (STOCK,):
        return f"needs another {FRACTION} than the command's 0"
    return None if context.layout.distributed_optimizer else "needs distributed_optimizer"


OPTIMIZER_CPU_OFFLOAD = SettingKnob(
    name="optimizer_cpu_offload",
    label="optimizer_cpu_offload",
    meaning="the optimizer's state and step on the host",
    kind="switch",
    axis=Axis.OPTIONS,
    change_class="B",
    rule="a command with --use-precision-aware-optimizer (megatron/training/arguments.py), and "
    "distributed_optimizer (megatron/core/optimizer/optimizer_config.py); kept with FSDP or fp8; needs a GPU "
    "(megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py)",
    flag="--optimizer-cpu-offload",
    destination="optimizer_cpu_offload",
    needs_gpu=True,
    default="stock",
    offers=off_and_on,
    fault=_fault,
    kept=offload_kept_reason,
    read_back=lambda live: live.offloads_optimizer,
    framework=MEGATRON.framework,
)
