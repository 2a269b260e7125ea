"""Slow nodes: found by the products that ranks time, looked at twice, told by name, and known to the planner.

One launch in which a node is slow makes it suspect; the next launch on it is the second look, which a
sequential search makes at once by measuring the user's own command again. A node that is as fast as the
others in two launches again is told so, too.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quartet_plugin.trial.node_speed import NodeSlowdown, NodeSpeed, node_slowdowns
from quartet_plugin.trial.request import TrialResult
from quartet_plugin.tuner.context import TuningContext

# A node is slow from this factor on, and beyond this many deviations of what nodes scatter by.
SLOW_FACTOR, DEVIATIONS = 1.15, 3.0
# A slow node's factor that changes by less is the same.
_CHANGED = 1.3
_NORMAL_MAD = 1.4826
# Comparisons of ordinary nodes that tell how far they scatter.
_MAX_KEPT = 200


@dataclass(slots=True, kw_only=True)
class NodeMonitor:
    """Follows the speeds of a run's nodes; `slowdowns` are those of slow ones by host, by two looks each.

    `suspects` were slow, or fast again, in their latest launch alone. `ever_slow` are all hosts that were
    slow at some time of the run.
    """

    context: TuningContext
    slowdowns: dict[str, float] = field(default_factory=dict)
    suspects: dict[str, float] = field(default_factory=dict)
    ever_slow: set[str] = field(default_factory=set)
    _latest: dict[str, NodeSpeed] = field(default_factory=dict)
    _ordinary_logs: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_KEPT))

    def observe(self, result: TrialResult, *, label: str) -> None:
        """Take in the nodes' speeds of a launch, and tell what two launches agree on."""
        if not result.is_measured:
            return
        speeds = self.context.backend.node_speeds(result)
        self._latest.update({speed.host: speed for speed in speeds})
        for host, slowdown in self._compared(speeds).items():
            factor = self._noticed(slowdown)
            # The ordinary node itself, at exactly 1, says nothing of how far nodes scatter.
            if factor == 1.0 != slowdown.factor:
                self._ordinary_logs.append(math.log(slowdown.factor))
            self._look(host, factor, label=label)

    def slowdowns_in(self, result: TrialResult) -> dict[str, float] | None:
        """The nodes that were slow in one launch, whether or not another has confirmed it; None for none."""
        if not result.is_measured:
            return None
        compared = self._compared(self.context.backend.node_speeds(result))
        noticed = {host: self._noticed(slowdown) for host, slowdown in compared.items()}
        return {host: factor for host, factor in noticed.items() if factor > 1.0} or None

    def _compared(self, speeds: Sequence[NodeSpeed]) -> Mapping[str, NodeSlowdown]:
        """The slowdowns of a launch's nodes, of a lone one against the latest launches of the others."""
        launched = {speed.host: speed for speed in speeds}
        others = self._latest if len(launched) == 1 else {}
        compared = node_slowdowns((others | launched).values())
        return {host: compared[host] for host in launched if host in compared}

    def _noticed(self, slowdown: NodeSlowdown) -> float:
        """The factor of a node that is slow beyond chance, else 1."""
        scatter = 0.0
        if self._ordinary_logs:
            scatter = _NORMAL_MAD * statistics.median(map(abs, self._ordinary_logs))
        least = max(math.log(SLOW_FACTOR), DEVIATIONS * math.hypot(slowdown.spread, scatter))
        return slowdown.factor if math.log(slowdown.factor) > least else 1.0

    def _look(self, host: str, factor: float, *, label: str) -> None:
        """Compare a node's factor in a launch with what is known of it."""
        known, before = self.slowdowns.get(host, 1.0), self.suspects.pop(host, None)
        if _is_same(factor, known):
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
    """Whether a node is as fast as it is known to be: slow or not, and about as much."""
    return (factor > 1.0) == (known > 1.0) and abs(math.log(factor / known)) <= math.log(_CHANGED)


def _words(host: str, factor: float) -> str:
    if factor == 1.0:
        return f"node {host} computes as fast as the others again"
    return (
        f"node {host} is slow: it computes {factor:.2f} times slower than the others, in two launches; "
        "`quartet doctor --nodes` may say why"
    )
