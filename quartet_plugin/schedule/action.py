"""One unit of pipeline work, and its text form.

The text is the one of PyTorch's pipelining: `{stage}{kind}{microbatch}`, so `2F0` is the forward of
microbatch 0 on stage 2, `2I0` its input gradient, `2W0` its weight gradient, `2B0` a whole backward.
"""

import re
from enum import IntEnum
from typing import NamedTuple, Self

from quartet_plugin.errors import PlanError

MAX_STAGES = 4_096
MAX_MICROBATCHES = 65_536
MAX_ACTIONS = 5_000_000

_TEXT = re.compile(r"(0|[1-9][0-9]{0,4})([FIWB])(0|[1-9][0-9]{0,5})", re.ASCII)


class ActionKind(IntEnum):
    """What an action computes; the numbers are the last two bits of an action's code."""

    F = 0
    I = 1  # noqa: E741 - the field's letter for the input gradient
    W = 2
    B = 3


_KINDS = tuple(ActionKind)


class Action(NamedTuple):
    """The work of one kind for one microbatch on one stage."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The exact inverse of `str`; raises PlanError for anything else."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise PlanError(f"action {text[:40]!r}: expected {{stage}}{{F|I|W|B}}{{microbatch}} like 2F0")
        return cls(int(match[1]), ActionKind[match[2]], int(match[3]))

    def encode(self, num_microbatches: int) -> int:
        """A dense integer, `(stage * num_microbatches + microbatch) * 4 + kind`, as kernels take it."""
        return (self.stage * num_microbatches + self.microbatch) * 4 + self.kind

    @classmethod
    def decode(cls, code: int, num_microbatches: int) -> Self:
        """The exact inverse of `encode`."""
        stage, microbatch = divmod(code >> 2, num_microbatches)
        return cls(stage, _KINDS[code & 3], microbatch)
