"""The order of jobs, and which job begins with whose measurements."""

from pathlib import Path
from typing import Any

from quartet_plugin.batch.config import Job
from quartet_plugin.batch.queue import in_order, next_job
from quartet_plugin.batch.related import MachineKey, keys_of, started_from
from quartet_plugin.tuner.config import TuneConfig, parse_config

TWO = ("torchrun", "--nproc-per-node", "2")


def job(name: str, position: int = 0, words: tuple[str, ...] = (*TWO, "x.py"), **options: Any) -> Job:
    return Job(name=name, position=position, words=words, folder=Path("/"), **options)


def keys(*jobs: Job, **configs: TuneConfig) -> dict[str, MachineKey | None]:
    named = {known.name: configs.get(known.name, TuneConfig()) for known in jobs}
    return keys_of(jobs, named, cwd=Path("/"))


def names(jobs: list[Job]) -> list[str]:
    return [known.name for known in jobs]


def test_priorities_go_before_the_file() -> None:
    jobs = [job("a", 0), job("b", 1, priority=5), job("c", 2, priority=-1), job("d", 3, priority=5)]
    assert names(in_order(jobs)) == ["b", "d", "a", "c"]


def pick(waiting: list[Job], *, running: tuple[Job, ...] = (), over: tuple[str, ...] = ()) -> str | None:
    known = keys(*waiting, *running)
    due = next_job(waiting, running=running, over=over, keys=known, shares=True)
    return None if due is None else due.name


def test_a_job_waits_for_the_one_it_is_like() -> None:
    first, second = job("a", 1, like="b", priority=9), job("b", 2)
    assert pick([first, second]) == "b"
    assert pick([first], running=(second,)) is None
    assert pick([first], over=("b",)) == "a"
    assert pick([]) is None


def test_of_equal_priority_goes_first_what_no_relative_that_runs_will_help() -> None:
    running = job("r")
    relative, other = job("a", 1), job("b", 2, words=("torchrun", "--nproc-per-node", "4", "x.py"))
    assert pick([relative, other], running=(running,)) == "b"
    assert pick([relative], running=(running,)) == "a"
    assert pick([job("p", 3, priority=1), other], running=(running,)) == "p"


def test_related_jobs_have_one_machine_and_one_framework() -> None:
    base = job("base")
    same = job("same", words=(*TWO, "y.py", "--num-layers", "4"))
    more = job("more", words=("torchrun", "--nproc-per-node", "4", "x.py"))
    deep = job("deep", words=(*TWO, "x.py", "--deepspeed_config", "ds.json"))
    cpu = job("cpu")
    script = job("script", words=("bash", "train.sh"))
    known = keys(base, same, more, deep, cpu, script, cpu=parse_config({"device": "cpu"}, where="q"))
    assert known["script"] is None
    assert {name for name, key in known.items() if key == known["base"]} == {"base", "same"}
    for other in (same, more, deep, cpu, script):
        earlier = started_from(other, [base], keys=known, shares=True)
        assert (earlier is base) == (other is same)
    assert started_from(same, [base], keys=known, shares=False) is None
    assert started_from(same, [], keys=known, shares=True) is None


def test_the_nearest_of_related_jobs_is_taken_and_the_latest_of_equal_ones() -> None:
    words = (*TWO, "x.py", "--num-layers", "8", "--hidden", "64")
    new = job("new", words=words)
    near = job("near", words=(*words[:-1], "128"))
    far = job("far", words=(*TWO, "x.py"))
    again = job("again", words=near.words)
    known = keys(new, near, far, again)
    assert started_from(new, [near, far], keys=known, shares=True) is near
    assert started_from(new, [near, again, far], keys=known, shares=True) is again


def test_like_goes_before_what_is_nearest() -> None:
    script = job("s", words=("bash", "train.sh"), like="b")
    other = job("b", words=("bash", "other.sh"))
    known = keys(script, other)
    assert started_from(script, [other], keys=known, shares=False) is other
    assert started_from(script, [], keys=known, shares=False) is None
