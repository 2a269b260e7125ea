"""Rank 0's report of the job, from what `model.megatron_arguments` reads."""

import contextlib
import re
from argparse import Namespace
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from quartet_plugin.errors import ConfigError
from quartet_plugin.megatron.side_effects import REMOVED
from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.megatron_arguments import (
    experts_of,
    features_of,
    latent_attention_of,
    layout_of,
    logged_expert_layers_of,
    mtp_kinds_of,
    num_mtp_layers_of,
    precision_of,
    schedule_of,
    shape_of,
    split_of,
)
from quartet_plugin.space.features import FEWER_STAGES
from quartet_plugin.space.knobs.registry import settings_of
from quartet_plugin.space.needed_flags import missing_flag_features
from quartet_plugin.space.runtime_refusals import REFUSED, refusal

FRAMEWORK = MEGATRON.framework
# What Megatron takes from the training where the command does not say it.
_COMPLETED = ("eval_micro_batch_size", "eval_global_batch_size")


def as_user_wrote(args: Namespace, as_written: Namespace) -> Namespace:
    """Megatron's arguments; what a trial leaves out or Megatron derives, as the user's own words have it."""
    derived = (refused.dest for refused in REFUSED if refused.is_flag_only)
    # What Megatron derives of another size would not follow that size in a plan.
    changed = {
        dest for dest in (*REMOVED, *derived, "expert_tensor_parallel_size") if hasattr(as_written, dest)
    }
    stated = {dest: getattr(as_written, dest) for dest in changed}
    stated |= {dest: getattr(as_written, dest, None) for dest in _COMPLETED}
    return Namespace(**{**vars(args), **stated})


def describe_job(
    args: Namespace,
    *,
    as_written: Namespace,
    neutralised: list[str],
    no_custom_schedules: str | None = None,
    known_flags: Container[str] | None = None,
    stage_divisor: int = 1,
    forward_step: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """The `job` of rank-K.json, from the arguments as Megatron resolved them.

    What limits plans is read of the command `as_written`: training has what trials leave out.
    `no_custom_schedules` is why there are none, whatever Megatron's functions are. `known_flags` are the
    arguments that a plan can set here, where those are not all of `args`. The trial has `stage_divisor` times
    fewer stages than the training. `forward_step` is the script's, None where it is not known.
    """
    import torch
    from megatron.core.package_info import __version__

    from quartet_plugin.megatron import cpu_device
    from quartet_plugin.megatron.runtime.refusals import layers_need_full_backwards
    from quartet_plugin.megatron.support import (
        accepted_functions,
        changed_for_schedules,
        changed_source_reason,
        tensor_partition_reason,
    )
    from quartet_plugin.model.schema import dump

    written = as_user_wrote(args, as_written)
    known = vars(args) if known_flags is None else known_flags
    features = [*features_of(written), *missing_flag_features(known)]
    if stage_divisor > 1:
        features.append(FEWER_STAGES)
    if "mtp" in features and args.pipeline_model_parallel_size == 1 and forward_step is not None:
        features += [] if knows_further_tokens(forward_step) else ["mtp_without_tokens"]
    changed = {} if no_custom_schedules else changed_for_schedules(args)
    split = None if "encoder_decoder" in features else dump(split_of(args))
    return {
        "framework": FRAMEWORK,
        "framework_version": str(__version__).partition("+")[0],
        "torch_version": str(torch.__version__).partition("+")[0],
        "shape": dump(shape_of(args)),
        "layout": dump(layout_of(args, world_size=args.world_size)),
        "split": split,
        "schedule": dump(schedule_of(args)),
        "global_batch_size": args.global_batch_size,
        "train_iters": args.train_iters,
        "precision": precision_of(args),
        "features": features,
        "neutralised": neutralised,
        "settings": [dump(setting) for setting in settings_of(written)],
        "no_custom_schedules": no_custom_schedules or refusal(written) or changed_source_reason(changed),
        "no_tensor_partition": tensor_partition_reason(written),
        "full_backward": layers_need_full_backwards(args),
        "layer_impl": getattr(args, "transformer_impl", None),
        "normalization": getattr(args, "normalization", None),
        **({"shares_sequences": True} if cpu_device.is_installed() else {}),
        **({"mtp_layers": num_mtp_layers_of(args)} if num_mtp_layers_of(args) else {}),
        **({"mtp_kinds": dump(kinds)} if (kinds := mtp_kinds_of(args)) else {}),
        **({"logged_expert_layers": list(logged)} if (logged := logged_expert_layers_of(args)) else {}),
        **({"changed_functions": list(changed)} if changed else {}),
        **({"accepted_sources": list(accepted)} if (accepted := accepted_functions(args)) else {}),
        **({"stage_divisor": stage_divisor} if stage_divisor > 1 else {}),
        **_routed(args),
    }


def knows_further_tokens(forward_step: Callable[..., Any]) -> bool:
    """Whether the file of a script's forward step speaks of multi-token prediction.

    Without stages every rank has all of a batch. Of several, the last one gets tokens only from a script that
    asks for them, as Megatron's do by `mtp_on_this_rank`.
    """
    code = getattr(getattr(forward_step, "func", forward_step), "__code__", None)
    with contextlib.suppress(OSError):
        text = "" if code is None else Path(code.co_filename).read_text(errors="replace")
        return "mtp" in re.sub(r"mtp_on_this_rank\s*=\s*False", "", text)
    return False


def _routed(args: Namespace) -> dict[str, Any]:
    """The model's experts and latent attention, where it has some that the cost model knows."""
    from quartet_plugin.model.schema import dump

    parts: dict[str, Any] = {}
    for name, part_of in (("experts", experts_of), ("latent", latent_attention_of)):
        with contextlib.suppress(ConfigError):
            part = part_of(args)
            if part is not None:
                parts[name] = dump(part)
    return parts
