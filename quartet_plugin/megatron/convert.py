"""A command's words for saving a checkpoint again: loaded onto this run's stages, saved, and nothing trained.

Megatron converts between formats by itself (`--ckpt-convert-format`): model and optimizer are built as for
training, loaded, and saved. What is loaded onto which stages is the guard's to judge (see `checkpoints`), as
in every start.
"""

from collections.abc import Sequence
from typing import Any

from quartet_plugin.megatron.arguments import Flags
from quartet_plugin.megatron.side_effects import strip_side_effects
from quartet_plugin.model.conversion import FORMAT, Conversion

# What a start from weights alone has; here it would drop the iteration, or what is to be kept.
_STATE = ("finetune", "no_load_optim", "no_load_rng", "no_save_optim", "no_save_rng")


def conversion_words(conversion: Conversion, *, flags: Flags, words: Sequence[str]) -> list[str]:
    """The user's words with everything out that writes or serves, and with Megatron's own conversion in.

    Optimizer state is saved in the form that loads onto any stages. Raises ConfigError for a command whose
    model comes from a checkpoint.
    """
    edited, _ = strip_side_effects(flags, words)
    values: dict[str, Any] = {
        "load": conversion.load,
        "exit_on_missing_checkpoint": True,
        "ckpt_convert_format": FORMAT,
        "ckpt_convert_save": conversion.save,
    }
    if conversion.step is not None:
        values["ckpt_step"] = conversion.step
    if conversion.is_weights_only:
        values |= dict.fromkeys(("no_load_optim", "no_load_rng", "no_save_optim", "no_save_rng"), True)
    elif flags.values(edited).use_distributed_optimizer:
        values["dist_ckpt_optim_fully_reshardable"] = True
    edited, _ = flags.edit(edited, remove={*values, *_STATE}, append=flags.words_for(values))
    return edited
