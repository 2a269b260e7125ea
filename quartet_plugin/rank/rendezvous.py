"""The environment of a rank, and an all-gather of words among ranks before the process group exists."""

import json
import os
import socket
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from quartet_plugin.errors import InfrastructureError, PlanError, QuartetError, first_line
from quartet_plugin.model.plan import Plan, read_plan
from quartet_plugin.protocol.environment import ATTEMPT_ID, STARTED
from quartet_plugin.rank.process_start import launch_of, ranks_of

EXCHANGE_TIMEOUT_S = 300.0
# Rank 0 asks a store for so many values at a time: the store serves all ranks by one thread.
_VALUES_AT_A_TIME = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnv:
    """A process's ranks as its launcher numbered them; `group_rank` tells apart two launchers on one host.

    `launch` tells apart two launches of a command; it may be empty (`process_start.launch_of`). `is_trial`:
    the launch is an attempt of a trial.
    """

    launch_rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    group_rank: int
    host: str
    launch: str = ""
    is_trial: bool = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "RankEnv":
        """The process that its starter's variables describe (`process_start.ranks_of`); else a lone one."""

        def number(*names: str) -> int | None:
            text = next((environment[name] for name in names if name in environment), "")
            return int(text) if text.isdecimal() else None

        return cls(
            launch_rank=ranks_of(environment)[1],
            world_size=ranks_of(environment)[2],
            local_rank=number("LOCAL_RANK"),
            local_world_size=number("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
            group_rank=number("GROUP_RANK", "CROSS_RANK") or 0,
            host=socket.gethostname(),
            launch=launch_of(environment),
            is_trial=ATTEMPT_ID in environment,
        )


class AgreedRefusalError(PlanError):
    """A refusal that all ranks share; only launch rank 0 prints it."""


class Rendezvous:
    """All-gathers words among the ranks of a launch, independently of the framework's process group."""

    def __init__(self, rank_env: RankEnv, store: Any = None) -> None:
        self._rank_env = rank_env
        self._store = store

    @classmethod
    def open(cls, rank_env: RankEnv) -> "Rendezvous":
        """A rendezvous over the store that torchrun's agent keeps.

        Raises PlanError for several processes that were started without one, InfrastructureError when it
        cannot be reached.
        """
        if rank_env.world_size == 1:
            return cls(rank_env)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and STARTED in os.environ:
            return cls(rank_env, _store_of_files(rank_env))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            raise AgreedRefusalError(
                f"a plan for {rank_env.world_size} processes must be shared through torchrun's store; "
                "start the script with torchrun"
            )
        import torch.distributed as dist

        try:
            store = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                world_size=rank_env.world_size,
                is_master=False,
                timeout=timedelta(seconds=EXCHANGE_TIMEOUT_S),
            )
        except (RuntimeError, KeyError, ValueError) as error:
            raise InfrastructureError(f"torchrun's store cannot be reached: {first_line(error)}") from error
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(rank_env, dist.PrefixStore(f"quartet/{attempt}", store))

    def all_gather(self, name: str, value: str) -> list[str]:
        """Every rank's value, in launch order; returns when all ranks have written theirs.

        Raises InfrastructureError, naming the ranks that did not come in time.
        """
        if self._store is None:
            return [value]
        return gather_through(
            self._store,
            name,
            value,
            rank=self._rank_env.launch_rank,
            world_size=self._rank_env.world_size,
            limit_s=EXCHANGE_TIMEOUT_S,
        )

    def agree_or_raise(self, name: str, refusal: QuartetError | None) -> None:
        """Go on only if no rank refuses; all stop alike when one does.

        Raises AgreedRefusalError on every rank, in the words of those that refuse.
        """
        verdicts = self.all_gather(name, "" if refusal is None else str(refusal))
        if not any(verdicts):
            return
        if len(set(verdicts)) == 1:
            raise AgreedRefusalError(verdicts[0]) from refusal
        by_verdict = _ranks_by_word(verdicts)
        refusals = "; ".join(f"{listed_ranks(ranks)}: {text}" for text, ranks in by_verdict.items() if text)
        raise AgreedRefusalError(f"only on {refusals}") from refusal


def gather_through(
    store: Any, name: str, value: str, *, rank: int, world_size: int, limit_s: float
) -> list[str]:
    """Every rank's value, in their order; returns on every rank when all ranks have written theirs.

    Rank 0 alone reads the values, and writes all as one answer: the store does as many operations a rank
    however many ranks there are. Raises InfrastructureError, naming the ranks that did not come in time.
    """
    store.set(f"{name}/{rank}", value)
    if rank == 0:
        answer = _collected(store, [f"{name}/{other}" for other in range(world_size)], limit_s=limit_s)
        with suppress(RuntimeError):
            store.set(f"{name}/all", zlib.compress(json.dumps(answer).encode()))
    else:
        answer = _answer_of_rank_0(store, name, limit_s=limit_s)
    if "values" in answer:
        return list(answer["values"])
    absent = listed_ranks(answer["absent"])
    raise InfrastructureError(
        f"no answer about {name} from {absent} within {limit_s:g} s: {answer['reason']}"
    )


def _collected(store: Any, keys: Sequence[str], *, limit_s: float) -> dict[str, Any]:
    """The values of all ranks, or who is absent."""
    deadline = time.monotonic() + limit_s
    values: list[str] = []
    try:
        for first in range(0, len(keys), _VALUES_AT_A_TIME):
            some = list(keys[first : first + _VALUES_AT_A_TIME])
            # For a store 0 ms are no limit.
            store.wait(some, timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            values += [item.decode("utf-8") for item in store.multi_get(some)]
    except RuntimeError as error:
        absent = [rank for rank, key in enumerate(keys) if not _is_there(store, key)]
        return {"absent": absent, "reason": first_line(error)}
    return {"values": values}


def _answer_of_rank_0(store: Any, name: str, *, limit_s: float) -> dict[str, Any]:
    """What rank 0 has collected; it may come as late as the limit, and then wait as long for others."""
    try:
        store.wait([f"{name}/0"], timedelta(seconds=limit_s))
        store.wait([f"{name}/all"], timedelta(seconds=2 * limit_s))
        answer: dict[str, Any] = json.loads(zlib.decompress(store.get(f"{name}/all")))
    except RuntimeError as error:
        return {"absent": [0], "reason": first_line(error)}
    return answer


def _is_there(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:
        return False


def _store_of_files(rank_env: RankEnv) -> Any:
    """The ranks' store in the folder of the start file, where no launcher keeps one.

    A launch that broke off leaves its answers there; the next one of the same command has its own.
    """
    import torch.distributed as dist

    file = Path(os.environ[STARTED]) / "store"
    store = dist.FileStore(str(file), rank_env.world_size)
    store.set_timeout(timedelta(seconds=EXCHANGE_TIMEOUT_S))
    return dist.PrefixStore(f"quartet/{rank_env.launch}", store)


def _ranks_by_word(words: Sequence[str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, word in enumerate(words):
        ranks.setdefault(word, []).append(rank)
    return ranks


def agree_on_plan(path: Path, *, rendezvous: Rendezvous) -> Plan:
    """Read the plan on every rank and go on only with one and the same.

    Raises AgreedRefusalError: for a bad plan its fault, for different plans the ranks in the minority.
    """
    plan, fault = None, ""
    try:
        plan = read_plan(path)
    except QuartetError as error:
        fault = str(error)
    words = rendezvous.all_gather("plan", fault or f"digest {plan.digest if plan else ''}")
    by_word = _ranks_by_word(words)
    if len(by_word) == 1:
        if plan is None:
            raise AgreedRefusalError(fault)
        return plan
    usual = max(by_word, key=lambda word: (len(by_word[word]), -by_word[word][0]))
    odd = "; ".join(
        f"{listed_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {_short(word)}"
        for word, ranks in by_word.items()
        if word != usual
    )
    raise AgreedRefusalError(
        f"{path}: the ranks have different plans: {listed_ranks(by_word[usual])} {_short(usual)}, but {odd}; "
        "give every node the same file"
    )


def _short(word: str) -> str:
    """A digest's first digits; an error message unchanged."""
    return word[:19] if word.startswith("digest ") else word


def listed_ranks(ranks: Sequence[int], *, limit: int = 8) -> str:
    """`rank 3` or `ranks 0, 2, 5`, shortened where they are many."""
    if not ranks:
        return "no rank"
    shown = ", ".join(str(rank) for rank in ranks[:limit])
    more = f" and {len(ranks) - limit} more" if len(ranks) > limit else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
