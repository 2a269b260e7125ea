"""Slow nodes: the seconds of equal matrix products on its ranks show a node, and a second launch confirms it.

Plans are then predicted as they run on that node.

One launch in which a node is slow makes it suspect; the next launch on it is the second check, which a
sequential search makes at once by measuring the user's command again. Two launches in which a slow node
is as fast as the others end that.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from quartet_plugin.trial.node_speed import NodeSlowdown, NodeSpeed, node_slowdowns
from quartet_plugin.trial.request import TrialResult
from quartet_plugin.tuner.context import TuningContext

# A node is slow from this factor on, and beyond this many deviations of what nodes scatter by.
SLOW_FACTOR, DEVIATIONS = 1.15, 3.0
# Second checks that confirmed nothing, after which no launch is made for another one.
MAX_UNCONFIRMED_CHECKS = 2
# A slow node's factor that changes by less is the same.
_CHANGED = 1.3
_NORMAL_MAD = 1.4826
# Of two nodes the ratio scatters twice as far as either node about the mean of both.
_RATIO_SCATTER = 2.0
# Launches of a node that say how far it scatters.
_MAX_KEPT = 50


@dataclass(slots=True, kw_only=True)
class NodeMonitor:
    """Follows the speeds of a run's nodes; `slowdowns` are those of slow ones by host, by two checks each.

    `suspects` were slow, or fast again, in their latest launch alone. `ever_slow` are all hosts that were
    slow at some time of the run. `num_unconfirmed_checks` counts the second checks of a host that confirmed
    nothing.
    """

    context: TuningContext
    slowdowns: dict[str, float] = field(default_factory=dict)
    suspects: dict[str, float] = field(default_factory=dict)
    ever_slow: set[str] = field(default_factory=set)
    num_unconfirmed_checks: Counter[str] = field(default_factory=Counter)
    _speeds: dict[str, tuple[NodeSpeed, ...]] = field(default_factory=dict)
    _latest: dict[str, NodeSpeed] = field(default_factory=dict)
    _ordinary_logs: dict[str, deque[float]] = field(default_factory=dict)

    def observe(self, result: TrialResult, *, label: str) -> None:
        """Take in the nodes' speeds of a launch, and say what two launches agree on."""
        speeds = self.speeds(result)
        self._latest.update({speed.host: speed for speed in speeds})
        compared = self._compared(speeds)
        factors = {host: self._significant_factor(slowdown) for host, slowdown in compared.items()}
        for speed in speeds:
            if speed.host in factors:
                self._compare_with_known(speed.host, factors[speed.host], label=label)
        if set(factors.values()) == {1.0}:
            self._learn_scatter({speed.host for speed in speeds}, compared)

    def speeds(self, result: TrialResult) -> tuple[NodeSpeed, ...]:
        """The speeds of the nodes in a launch, read once; none of a launch that was not measured."""
        if not result.is_measured:
            return ()
        if result.attempt_id not in self._speeds:
            self._speeds[result.attempt_id] = self.context.backend.node_speeds(result)
        return self._speeds[result.attempt_id]

    def slowdowns_in(self, result: TrialResult) -> dict[str, float] | None:
        """The nodes that were slow in one launch, whether or not another has confirmed it; None for none."""
        speeds = self.speeds(result)
        compared = self._compared(speeds)
        factors = {
            speed.host: self._significant_factor(compared[speed.host])
            for speed in speeds
            if speed.host in compared
        }
        return {host: factor for host, factor in factors.items() if factor > 1.0} or None

    def _compared(self, speeds: Sequence[NodeSpeed]) -> Mapping[str, NodeSlowdown]:
        """The slowdowns of a launch's nodes; of a lone one and of the others in their latest launches."""
        launched = {speed.host: speed for speed in speeds}
        others = self._latest if len(launched) == 1 else {}
        return node_slowdowns((others | launched).values())

    def _learn_scatter(self, hosts: Iterable[str], compared: Mapping[str, NodeSlowdown]) -> None:
        """Keep how the times of `hosts` lie about the mean of the nodes, none of which is slow."""
        logs = {host: math.log(slowdown.factor) for host, slowdown in compared.items()}
        mean = statistics.fmean(logs.values())
        for host in logs.keys() & hosts:
            self._ordinary_logs.setdefault(host, deque(maxlen=_MAX_KEPT)).append(logs[host] - mean)

    def _scatter(self) -> float:
        """The deviation of the logarithm of two nodes' ratio between launches.

        A node that is always a little slower than another does not scatter.
        """
        deviations: list[float] = []
        for logs in self._ordinary_logs.values():
            if len(logs) > 1:
                usual = statistics.median(logs)
                deviations += [abs(log - usual) for log in logs]
        return _RATIO_SCATTER * _NORMAL_MAD * statistics.median(deviations) if deviations else 0.0

    def _significant_factor(self, slowdown: NodeSlowdown) -> float:
        """The factor of a node that is slow beyond chance, else 1."""
        scatter = self._scatter()
        least = max(math.log(SLOW_FACTOR), DEVIATIONS * math.hypot(slowdown.spread, scatter))
        return slowdown.factor if math.log(slowdown.factor) > least else 1.0

    def _compare_with_known(self, host: str, factor: float, *, label: str) -> None:
        """Compare a node's factor in a launch with its earlier factors."""
        known, before = self.slowdowns.get(host, 1.0), self.suspects.pop(host, None)
        if _is_same(factor, known):
            self.num_unconfirmed_checks[host] += before is not None
            return
        add = self.context.events.add
        if before is None or (before > 1.0) != (factor > 1.0):
            self.suspects[host] = factor
            add("node-suspect", node=host, factor=round(factor, 4), launch=label)
            return
        factor = math.sqrt(factor * before)
        add("node-speed", node=host, factor=round(factor, 4), launch=label)
        if factor > 1.0:
            self.slowdowns[host] = factor
            self.ever_slow.add(host)
        else:
            self.slowdowns.pop(host, None)
        self.context.observer.message(_words(host, factor))


def _is_same(factor: float, known: float) -> bool:
    """Whether a node's speed agrees with its known state: slow by about the same factor, or not slow."""
    return (factor > 1.0) == (known > 1.0) and abs(math.log(factor / known)) <= math.log(_CHANGED)


def _words(host: str, factor: float) -> str:
    if factor == 1.0:
        return f"node {host} computes as fast as the others again"
    return (
        f"node {host} is slow: its computations take {factor:.2f}x the time of the other nodes', in two "
        "launches; run `quartet doctor --nodes`"
    )
