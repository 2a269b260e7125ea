"""Ranks that tell each other something through a store, here threads over one in memory."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.errors import InfrastructureError, PlanError
from quartet_plugin.model.plan import write_plan
from quartet_plugin.protocol.environment import STARTED
from quartet_plugin.rank import rendezvous as ranks
from quartet_plugin.rank.rendezvous import (
    AgreedRefusalError,
    RankEnv,
    Rendezvous,
    agree_on_plan,
    gather_through,
    listed_ranks,
)
from quartet_plugin.runtime.clock_offset import clock_offset_s
from tests.megatron.entry_launch import make_plan


def on_ranks(count: int, act: Callable[[Rendezvous, int], Any]) -> list[Any]:
    """What `act` returns or raises on each of `count` ranks that meet."""
    import torch.distributed as dist

    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=30))

    def run(rank: int) -> Any:
        place = RankEnv.of({"RANK": str(rank), "WORLD_SIZE": str(count)})
        try:
            return act(Rendezvous(place, store), rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_exchange_is_in_launch_order() -> None:
    found = on_ranks(4, lambda rendezvous, rank: rendezvous.all_gather("word", f"from {rank}"))
    assert found == [[f"from {rank}" for rank in range(4)]] * 4


class CountingStore:
    """A store that counts the keys that ranks ask for."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.asked: list[str] = []

    def wait(self, keys: list[str], limit: timedelta) -> None:
        """Wait for the keys, and count them."""
        self.asked += keys
        self._store.wait(keys, limit)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read the keys, and count them."""
        self.asked += keys
        return list(self._store.multi_get(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def gather_words(store: Any, rank: int, world_size: int) -> Any:
    """The words of all ranks, from one of them."""
    return gather_through(store, "word", f"from {rank}", rank=rank, world_size=world_size, limit_s=30.0)


def compare_clocks(store: Any, rank: int, world_size: int) -> float:
    """The offset of a rank's clock, where all are on one host."""
    return clock_offset_s(store, rank=rank, world_size=world_size, host="here")


@pytest.mark.parametrize(
    ("act", "expected"), [(gather_words, [f"from {rank}" for rank in range(120)]), (compare_clocks, 0.0)]
)
def test_what_a_store_does_for_a_rank_does_not_grow_with_the_ranks(
    act: Callable[[Any, int, int], Any], expected: Any
) -> None:
    """One thread serves all ranks; if each of 10,000 asked for every value, it would take half an hour."""
    import torch.distributed as dist

    count = 120  # more than rank 0 reads at a time
    store = CountingStore(dist.HashStore())
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(lambda rank: act(store, rank, count), range(count)))
    assert found == [expected] * count
    assert len(store.asked) <= 4 * count


def test_one_refusal_stops_all_alike() -> None:
    refusal = PlanError("does not fit here")
    found = on_ranks(
        3, lambda rendezvous, rank: rendezvous.agree_or_raise("fit", refusal if rank == 2 else None)
    )
    assert [type(error) for error in found] == [AgreedRefusalError] * 3
    assert {str(error) for error in found} == {"only on rank 2: does not fit here"}


def test_common_refusal_is_told_as_it_is() -> None:
    found = on_ranks(
        2, lambda rendezvous, rank: rendezvous.agree_or_raise("fit", PlanError("wrong everywhere"))
    )
    assert {str(error) for error in found} == {"wrong everywhere"}


def test_agreement_lets_all_go_on() -> None:
    assert on_ranks(2, lambda rendezvous, rank: rendezvous.agree_or_raise("fit", None)) == [None, None]


@pytest.mark.parametrize(
    ("odd", "named_as"), [({1}, "rank 1 has"), ({0}, "rank 0 has"), ({2, 3}, "ranks 2, 3 have")]
)
def test_odd_plans_are_named(odd: set[int], named_as: str, tmp_path: Path) -> None:
    paths = []
    for rank in range(5):
        paths.append(tmp_path / f"{rank}.json")
        write_plan(make_plan(split=(5, 1) if rank in odd else (3, 3), pipeline=2), path=paths[-1])
    found = on_ranks(5, lambda rendezvous, rank: agree_on_plan(paths[rank], rendezvous=rendezvous))
    assert {type(error) for error in found} == {AgreedRefusalError}
    assert len({str(error).partition(": ")[2] for error in found}) == 1
    assert named_as in str(found[0])


def test_plan_that_one_rank_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(make_plan(split=(6,)), path=path)
    paths = [path, tmp_path / "absent.json", path]
    found = on_ranks(3, lambda rendezvous, rank: agree_on_plan(paths[rank], rendezvous=rendezvous))
    assert "rank 1 has" in str(found[0])
    assert "cannot be read" in str(found[0])


def test_same_plan_is_returned_on_all(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = make_plan(split=(6,))
    write_plan(plan, path=path)
    assert on_ranks(2, lambda rendezvous, rank: agree_on_plan(path, rendezvous=rendezvous)) == [plan, plan]


@pytest.mark.parametrize("absent", [0, 1])
def test_absent_ranks_are_named(absent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "EXCHANGE_TIMEOUT_S", 0.2)

    def all_but_one(rendezvous: Rendezvous, rank: int) -> Any:
        return None if rank == absent else rendezvous.all_gather("word", "here")

    found = on_ranks(3, all_but_one)
    assert found.pop(absent) is None
    assert [type(error) for error in found] == [InfrastructureError] * 2
    assert all(f"from rank {absent} within 0.2 s" in str(error) for error in found)


def test_lists_of_ranks_stay_short() -> None:
    assert listed_ranks([3]) == "rank 3"
    assert listed_ranks(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


@pytest.fixture
def ranks_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Runs a function on three ranks as srun starts them, one task a device, in one folder."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv(STARTED, str(tmp_path))

    def run(of_rank: Callable[[Rendezvous, int], Any], *, step: int) -> list[Any]:
        job = {"SLURM_NTASKS": "3", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": str(step)}

        def on_rank(rank: int) -> Any:
            place = RankEnv.of({"SLURM_PROCID": str(rank), **job})
            return of_rank(Rendezvous.open(place), rank)

        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(on_rank, range(3)))

    return run


def test_without_a_launchers_store_ranks_meet_in_the_folder_of_the_start_file(
    ranks_of_slurm: Callable[..., list[Any]],
) -> None:
    def run(rendezvous: Rendezvous, rank: int) -> Any:
        gathered = rendezvous.all_gather("word", f"from {rank}")
        try:
            rendezvous.agree_or_raise("fit", PlanError("does not fit here") if rank == 1 else None)
        except AgreedRefusalError as error:
            return gathered, str(error)
        return None

    expected = ["from 0", "from 1", "from 2"], "only on rank 1: does not fit here"
    assert ranks_of_slurm(run, step=0) == [expected] * 3


def test_a_second_launch_in_the_folder_does_not_read_the_answers_of_the_first(
    ranks_of_slurm: Callable[..., list[Any]],
) -> None:
    kept = []

    def first(rendezvous: Rendezvous, rank: int) -> Any:
        kept.append(rendezvous)  # as a rank that is killed: its store's file stays
        return rendezvous.all_gather("word", "first")

    def second(rendezvous: Rendezvous, rank: int) -> Any:
        if rank == 0:
            time.sleep(0.2)  # the others must wait, although the first launch has an answer
        return rendezvous.all_gather("word", "second")

    assert ranks_of_slurm(first, step=0) == [["first"] * 3] * 3
    assert ranks_of_slurm(second, step=1) == [["second"] * 3] * 3
