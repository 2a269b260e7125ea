"""The order of a batch's jobs: by priority, a job behind the one it is like, few relatives at a time."""

from collections.abc import Collection, Iterable, Mapping

from quartet_plugin.batch.config import Job
from quartet_plugin.batch.related import MachineKey


def in_order(jobs: Iterable[Job]) -> list[Job]:
    """The jobs by priority, the highest first; of equal ones as the file has them."""
    return sorted(jobs, key=lambda job: (-job.priority, job.position))


def next_job(
    waiting: Collection[Job],
    *,
    running: Collection[Job],
    over: Collection[str],
    keys: Mapping[str, MachineKey | None],
    shares: bool,
) -> Job | None:
    """The job to start now, None where each waits for another one.

    A job waits for the one that it is `like` until that is `over`. Of the highest priority goes first what
    has no relative that runs, since that will have measured something for it once it has ended.
    """
    ready = [job for job in in_order(waiting) if job.like is None or job.like in over]
    if not ready:
        return None
    highest = [job for job in ready if job.priority == ready[0].priority]
    busy = {keys.get(job.name) for job in running} - {None}
    alone = (job for job in highest if not shares or keys.get(job.name) not in busy)
    return next(alone, highest[0])
