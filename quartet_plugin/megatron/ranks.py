"""Who this process is, and how all ranks tell each other something before the process group exists."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from quartet_plugin.errors import InfrastructureError, PlanError

EXCHANGE_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A process as its launcher started it; `group_rank` tells apart two launchers on one host."""

    launch_rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    group_rank: int
    host: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Place":
        """What torchrun's variables say; one process alone where there are none."""

        def number(name: str) -> int | None:
            text = environment.get(name, "")
            return int(text) if text.isdecimal() else None

        return cls(
            launch_rank=number("RANK") or 0,
            world_size=number("WORLD_SIZE") or 1,
            local_rank=number("LOCAL_RANK"),
            local_world_size=number("LOCAL_WORLD_SIZE"),
            group_rank=number("GROUP_RANK") or 0,
            host=socket.gethostname(),
        )


class Meeting:
    """All ranks of a start, before and beside Megatron's own process group."""

    def __init__(self, place: Place, store: Any) -> None:
        self._place = place
        self._store = store

    @classmethod
    def open(cls, place: Place) -> "Meeting":
        """Meet over the store that torchrun's agent keeps.

        Raises PlanError for several processes that were started without one, InfrastructureError when it
        cannot be reached.
        """
        if place.world_size == 1:
            return cls(place, None)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            raise PlanError(
                f"a plan for {place.world_size} processes must be agreed on through torchrun's store; "
                "start the script with torchrun"
            )
        import torch.distributed as dist

        try:
            store = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                world_size=place.world_size,
                is_master=False,
                timeout=timedelta(seconds=EXCHANGE_TIMEOUT_S),
            )
        except (RuntimeError, KeyError, ValueError) as error:
            raise InfrastructureError(f"torchrun's store cannot be reached: {_line(error)}") from error
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(place, dist.PrefixStore(f"quartet/{attempt}", store))

    def exchange(self, name: str, value: str) -> list[str]:
        """Every rank's value, in launch order; returns when all have given theirs.

        Raises InfrastructureError, naming the ranks that did not come in time.
        """
        if self._store is None:
            return [value]
        keys = [f"{name}/{rank}" for rank in range(self._place.world_size)]
        self._store.set(keys[self._place.launch_rank], value)
        try:
            self._store.wait(keys, timedelta(seconds=EXCHANGE_TIMEOUT_S))
            return [item.decode("utf-8") for item in self._store.multi_get(keys)]
        except RuntimeError as error:
            absent = [rank for rank, key in enumerate(keys) if not self._is_there(key)]
            raise InfrastructureError(
                f"no word about {name} from {named(absent)} within {EXCHANGE_TIMEOUT_S:g} s: {_line(error)}"
            ) from error

    def _is_there(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            return False


def named(ranks: Sequence[int], *, limit: int = 8) -> str:
    """`rank 3` or `ranks 0, 2, 5`, shortened where they are many."""
    if not ranks:
        return "no rank"
    shown = ", ".join(str(rank) for rank in ranks[:limit])
    more = f" and {len(ranks) - limit} more" if len(ranks) > limit else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
