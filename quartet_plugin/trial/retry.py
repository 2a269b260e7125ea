"""Whether an attempt is made again: a policy over the verdicts so far, without side effects."""

import re
from collections.abc import Sequence
from dataclasses import replace

from quartet_plugin.trial.outcome import Cause, Verdict
from quartet_plugin.trial.request import Outcome

MAX_PORTS = 3

# Another attempt of the same plan meets the same end, so one repetition proves it.
_PROVEN_BY_REPETITION = {Cause.KILLED, Cause.HANG, Cause.ERROR, Cause.SIGNAL, Cause.EXIT}
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")


def settle(
    verdict: Verdict, *, earlier: Sequence[Verdict], max_attempts: int, is_baseline: bool, can_move_port: bool
) -> tuple[Verdict, bool]:
    """The verdict in the light of the earlier attempts, and whether to try again.

    A hang, a killed rank or the same error twice makes a plan infeasible; of the user's own configuration
    (`is_baseline`) it stays what it is, and an error of the script's own is not tried again at all.
    A port that was taken does not count as an attempt, and a faulty device proves nothing.
    """
    if verdict.outcome is Outcome.UNSTABLE:
        return verdict, not any(one.outcome is Outcome.UNSTABLE for one in earlier)
    if verdict.outcome is not Outcome.INFRA or verdict.cause is Cause.NOTHING:
        return verdict, False
    if verdict.cause is Cause.PORT:
        if not can_move_port:
            return replace(verdict, reason=f"{verdict.reason}; name another port in the command"), False
        return verdict, sum(one.cause is Cause.PORT for one in earlier) < MAX_PORTS
    if is_baseline and verdict.cause is Cause.ERROR:
        return verdict, False
    if verdict.cause in _PROVEN_BY_REPETITION and any(_is_same(verdict, one) for one in earlier):
        if is_baseline:
            return replace(verdict, reason=f"{verdict.reason} (twice)"), False
        excess = 1 if verdict.cause is Cause.KILLED else 0
        again = replace(
            verdict,
            outcome=Outcome.INFEASIBLE,
            reason=f"{verdict.reason} (twice)",
            memory_excess_bytes=max(excess, verdict.memory_excess_bytes),
        )
        return again, False
    counted = sum(one.cause is not Cause.PORT for one in earlier) + 1
    return verdict, counted < max_attempts


def _is_same(verdict: Verdict, other: Verdict) -> bool:
    if verdict.cause is not other.cause:
        return False
    if verdict.cause in (Cause.KILLED, Cause.HANG):
        return True
    return _NUMBERS.sub("#", verdict.reason) == _NUMBERS.sub("#", other.reason)
