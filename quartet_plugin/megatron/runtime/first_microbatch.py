"""A rule of Transformer Engine's layers: the microbatch of a stage's first F is that of its first B or I.

With fused weight gradients a layer overwrites the sum of gradients for the microbatch whose forward came
first in a step, and adds to it for all others: a gradient that came earlier would be lost without a word.
"""

from quartet_plugin.errors import PlanError
from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.schedule.instruction import Compute, Program


def check_first_microbatch(program: Program) -> None:
    """Raise PlanError, naming the stage, where another microbatch's gradients come first."""
    for instructions in program.instructions:
        first: dict[tuple[int, bool], int] = {}
        for instruction in instructions:
            if isinstance(instruction, Compute) and instruction.action.kind is not ActionKind.W:
                stage, kind, microbatch = instruction.action
                first.setdefault((stage, kind is ActionKind.F), microbatch)
        for (stage, is_forward), microbatch in first.items():
            forward = first[stage, True]
            if not is_forward and microbatch != forward:
                raise PlanError(
                    f"schedule.custom: stage {stage} runs the forward of microbatch {forward} first and the "
                    f"backward of {microbatch}: Transformer Engine's layers would lose gradients; let both "
                    "be of one microbatch"
                )
