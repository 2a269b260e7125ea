"""One rank of a job far larger than the machine, run alone: its compute and memory, no communication."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quartet_plugin.errors import UsageError
from quartet_plugin.protocol.environment import PROFILE

MAX_WORLD_SIZE = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRank:
    """A rank of a world that is not there: built and run alone, communication left out."""

    rank: int
    world_size: int

    @classmethod
    def of(cls, text: str) -> "SimulatedRank | None":
        """What `quartet profile` set: RANK/WORLD_SIZE, or anything else (None) where processes are real.

        Raises UsageError.
        """
        if "/" not in text:
            return None
        match = re.fullmatch(r"([0-9]{1,5})/([0-9]{1,5})", text, re.ASCII)
        rank, world = (int(match[1]), int(match[2])) if match else (0, 0)
        if not rank < world <= MAX_WORLD_SIZE:
            raise UsageError(f"{PROFILE}: {text[:40]!r}; must be RANK/WORLD_SIZE, RANK below WORLD_SIZE")
        return cls(rank=rank, world_size=world)

    def play(self) -> None:
        """Tell Megatron, which reads the environment later on, that this is that rank."""
        import torch
        from torch.testing._internal.distributed import fake_pg

        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(self.rank), str(self.world_size)
        os.environ["LOCAL_RANK"] = "0"
        # Megatron's choice cannot be written to or read; this one can, inside the process.
        fake_pg.FakeStore = torch.distributed.HashStore
        # What nobody sent is whatever lay in memory; denormal numbers would be slow beyond reason.
        torch.set_flush_denormal(True)

    @staticmethod
    def wrap_arguments(add_megatron_arguments: Callable[..., Any]) -> Callable[..., Any]:
        """RANK 0 tells ranks without data that there is something to train; here nobody does."""

        def add_arguments_and_train(parser: Any) -> Any:
            parser = add_megatron_arguments(parser)
            parser.set_defaults(do_train=True)
            return parser

        return add_arguments_and_train
