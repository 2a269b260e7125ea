"""One unit of pipeline work, two that run beside each other, and their text forms.

The texts are those of PyTorch's pipelining: `{stage}{kind}{microbatch}`, so `2F0` is the forward of
microbatch 0 on stage 2, `2I0` its input gradient, `2W0` its weight gradient, `2B0` a full backward;
`(0F4;3B2)OVERLAP_F_B` is an overlapped pair, the forward `0F4` beside the backward `3B2`.
"""

import re
from enum import IntEnum
from typing import NamedTuple, Self

from quartet_plugin.errors import PlanError

MAX_STAGES = 4_096
MAX_MICROBATCHES = 65_536
MAX_ACTIONS = 5_000_000

_TEXT = re.compile(r"(0|[1-9][0-9]{0,4})([FIWB])(0|[1-9][0-9]{0,5})", re.ASCII)
OVERLAPPED = "OVERLAP_F_B"
_PAIR_TEXT = re.compile(rf"\(([^;()]{{1,40}});([^;()]{{1,40}})\){OVERLAPPED}", re.ASCII)
PAIR_FORM = "must be (sFm;tBn)OVERLAP_F_B like (0F4;3B2)OVERLAP_F_B; two actions, and no pair in a pair"


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


class OverlappedPair(NamedTuple):
    """A forward and a backward on one device that run beside each other, as one action.

    Both start when the inputs of both are there, and the results of both are there when the pair ends. What
    it can save is the all-to-all of one part behind the compute of the other.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward}){OVERLAPPED}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The exact inverse of `str`; raises PlanError for anything else, and for a pair that is none."""
        match = _PAIR_TEXT.fullmatch(text)
        if match is None:
            raise PlanError(f"pair {text[:60]!r}: {PAIR_FORM}")
        pair = cls(*(Action.parse(part) for part in match.groups()))
        fault = pair.fault
        if fault is not None:
            raise PlanError(f"pair {text!r}: {fault}")
        return pair

    @property
    def fault(self) -> str | None:
        """The rule that the two parts break, with what to write instead, or None."""
        forward, backward = self
        if forward.kind is not ActionKind.F or backward.kind not in (ActionKind.I, ActionKind.B):
            return (
                f"{forward} and {backward}: a pair is one forward, then one full backward or input gradient; "
                "write other actions separately"
            )
        if forward.microbatch == backward.microbatch:
            return (
                f"{forward} and {backward}: of one microbatch the backward needs every forward; take another "
                "microbatch's, or write them one after the other"
            )
        return None


def parse_entry(text: str) -> Action | OverlappedPair:
    """The action or the pair that a text means; raises PlanError where it means none."""
    return OverlappedPair.parse(text) if text.startswith("(") else Action.parse(text)
