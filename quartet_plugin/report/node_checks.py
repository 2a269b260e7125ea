"""The table of `quartet doctor --nodes`: what nodes have, where they differ, and what to do about it."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

# What `quartet_plugin.probe.node_checks` wrote, by the node's name.
type NodeFacts = Mapping[str, Mapping[str, Any]]

State = Literal["ok", "warn", "fail"]

LEAST_FREE_BYTES = 2 * 2**30 + 256 * 2**20
_LEAST = {"open files": 4096, "processes": 4096, "shared memory": 2**30}
_CLOCK_S, _STORAGE_S = 1.0, 1.0
# A node that takes so many times the median node's seconds is slow, as for the tuner.
SLOW_FACTOR = 1.15
# NCCL below the first version without a fault, the fault, and where it is described.
BROKEN_NCCL: tuple[tuple[tuple[int, int], str], ...] = (
    ((2, 12), "all-gathers corrupt data if an NVLink is down (NVIDIA/nccl#596)"),
)
# NCCL's name of a node, which no other node may have.
_OF_A_NODE = frozenset({"NCCL_HOSTID"})
_MOST_VARIABLES = 6
_NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """One check of a node: what the node has, and what to do where a rule refuses it."""

    check: str
    state: State
    finding: str
    fix: str = ""


# The state, the finding, and what to do about it.
type _Result = tuple[State, str, str]


def _ok(finding: str) -> _Result:
    return "ok", finding, ""


def _warn(finding: str, fix: str) -> _Result:
    return "warn", finding, fix


def _fail(finding: str, fix: str) -> _Result:
    return "fail", finding, fix


def check_rows(facts: NodeFacts, *, expected: Sequence[str]) -> list[CheckRow]:
    """The checks of the nodes that answered; `expected` are the names of all of them."""
    results = {"nodes": _nodes(facts, expected)}
    if facts:
        results |= {name: check(facts) for name, check in _CHECKS.items()}
    return [
        CheckRow(check=name, state=state, finding=finding, fix=fix)
        for name, (state, finding, fix) in results.items()
    ]


def table_lines(rows: Sequence[CheckRow]) -> list[str]:
    """The rows as text, what to do below each that needs it."""
    width = max(len(row.check) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{row.check:{width}}  {row.state:4}  {row.finding}")
        if row.fix:
            lines.append(f"{'':{width}}        {row.fix}")
    return lines


def _nodes(facts: NodeFacts, expected: Sequence[str]) -> _Result:
    missing = [name for name in expected if name not in facts]
    if missing:
        return _fail(
            f"{len(facts)} of {len(expected)} answered; nothing of {_listed(missing)}",
            "the node needs this folder and this python under the same paths (mount, module, container)",
        )
    return _ok(f"{len(facts)} answered")


def _packages(facts: NodeFacts) -> _Result:
    names = sorted({name for node in facts.values() for name in node["packages"]})
    versions = {name: _by_value(facts, partial(_version, package=name)) for name in names}
    differing = [name for name in names if len(versions[name]) > 1]
    if differing:
        return _fail(
            "; ".join(f"{name}: {_groups(versions[name])}" for name in differing),
            "install the same versions on all nodes: ranks of different releases cannot train together",
        )
    lacking = [name for name in ("quartet-plugin", "torch") if name not in names]
    finding = ", ".join(f"{name} {next(iter(versions[name]))}" for name in names)
    if lacking:
        return _fail(
            f"no {' and no '.join(lacking)}; {finding}",
            "install it for the python that starts the trials (python: of site.yaml)",
        )
    return _ok(finding)


def _version(node: Mapping[str, Any], *, package: str) -> str | None:
    version: str | None = node["packages"].get(package)
    return version


def _devices(facts: NodeFacts) -> _Result:
    groups = _by_value(facts, lambda node: _counted(node["devices"]) or f"{node['num_cores']} cores")
    if len(groups) > 1:
        return _fail(_groups(groups), "trials need nodes of equal size: exclude or release the others")
    finding = next(iter(groups))
    if not any(node["devices"] for node in facts.values()):
        return _warn(
            f"{finding}, no accelerator",
            "ask for accelerators (gpus_per_node of site.yaml), or tune with device: cpu",
        )
    return _ok(finding)


def _speed(facts: NodeFacts) -> _Result:
    """The nodes whose slowest device takes longer for a matrix product than that of the median node.

    Of an even number of nodes the faster of the two in the middle is the median. Nodes of unequal devices are
    named by another check.
    """
    seconds = {name: max(times) for name, node in facts.items() if (times := node.get("product_s"))}
    groups = _by_value(facts, lambda node: (_counted(node["devices"]), node["num_cores"]))
    if len(seconds) < 2 or len(groups) > 1:
        return _ok("nothing to compare")
    usual_s = statistics.median_low(seconds.values())
    slow = [
        f"{name}: computations take {taken_s / usual_s:.2f}x the usual time"
        for name, taken_s in seconds.items()
        if taken_s > SLOW_FACTOR * usual_s
    ]
    if slow:
        return _warn(
            _listed(slow),
            "check it for other programs, heat and power limits, or exclude the node (--exclude)",
        )
    worst = max(seconds.values()) / usual_s - 1.0
    return _ok(f"the slowest takes {100 * worst:.0f} % longer")


def _same(value: Callable[[Mapping[str, Any]], str], *, fix: str) -> Callable[[NodeFacts], _Result]:
    """A check that a value is the same on all nodes."""

    def compare(facts: NodeFacts) -> _Result:
        groups = _by_value(facts, value)
        if len(groups) > 1:
            return _warn(_groups(groups), fix)
        return _ok(str(next(iter(groups))) or "none")

    return compare


def _links(facts: NodeFacts) -> _Result:
    down = [
        f"{name} {port} ({state})"
        for name, node in facts.items()
        for port, state in node["ports"].items()
        if "ACTIVE" not in state
    ]
    groups = _by_value(facts, lambda node: f"{len(node['ports'])} InfiniBand or RoCE ports")
    if down or len(groups) > 1:
        return _warn(
            "; ".join(filter(None, (_listed(down), _groups(groups) if len(groups) > 1 else ""))),
            "a port that is down makes its node slow: ask the administrators, or exclude the node",
        )
    return _ok(next(iter(groups)))


def _port(facts: NodeFacts) -> _Result:
    lost = {name: node["unreached"] for name, node in facts.items() if "unreached" in node}
    if lost:
        return _fail(
            "; ".join(f"{name}: {why}" for name, why in lost.items())[:400],
            "open the ports from 20000 to 32000 between nodes, and let node names resolve on each",
        )
    ports = {node["port"] for node in facts.values() if node["num_nodes"] > 1}
    return _ok(f"all reach the first node on {_listed(ports)}" if ports else "one node")


def _clock(facts: NodeFacts) -> _Result:
    offsets = {name: node["clock_offset_s"] for name, node in facts.items() if "clock_offset_s" in node}
    worst = max(offsets, key=lambda name: abs(offsets[name]), default=None)
    if worst is None:
        return _ok("nothing to compare")
    finding = f"at most {abs(offsets[worst]):.3f} s apart"
    if abs(offsets[worst]) > _CLOCK_S:
        return _warn(
            f"{finding} ({worst})",
            "synchronize the nodes' clocks (chrony, ntp): timelines and leases compare their times",
        )
    return _ok(finding)


def _storage(facts: NodeFacts) -> _Result:
    seconds = {name: node["storage_s"] for name, node in facts.items()}
    worst = max(seconds, key=lambda name: seconds[name])
    finding = (
        f"a file is written in {statistics.median(seconds.values()):.3f} s, at most {seconds[worst]:.3f} s"
    )
    if seconds[worst] > _STORAGE_S:
        return _warn(f"{finding} ({worst})", "put the run folder on a faster file system: --run-dir")
    return _ok(finding)


def _disk(facts: NodeFacts) -> _Result:
    free = {
        f"{name} {place}": count
        for name, node in facts.items()
        for place, count in node["free_bytes"].items()
    }
    least = min(free, key=lambda place: free[place])
    finding = f"at least {free[least] / 2**30:.1f} GiB free ({least})"
    if free[least] < LEAST_FREE_BYTES:
        return _fail(finding, "free space there: a trial needs 2.25 GiB")
    return _ok(finding)


def _limits(facts: NodeFacts) -> _Result:
    low = [
        f"{host} {name} {node['limits'][name]}"
        for host, node in facts.items()
        for name, least in _LEAST.items()
        if 0 <= node["limits"].get(name, -1) < least
    ]
    locked = [
        f"{host} locked memory {node['limits']['locked memory']}"
        for host, node in facts.items()
        if node["ports"] and node["limits"]["locked memory"] >= 0
    ]
    if locked:
        return _fail(
            _listed([*locked, *low]),
            "ulimit -l unlimited for jobs: InfiniBand registers memory (Slurm: PropagateResourceLimits)",
        )
    if low:
        wanted = ", ".join(f"{name} {least}" for name, least in _LEAST.items())
        return _warn(_listed(low), f"raise them: at least {wanted}")
    return _ok("enough")


def _nccl(facts: NodeFacts) -> _Result:
    versions = {
        node["packages"][name] for node in facts.values() for name in _NCCL if name in node["packages"]
    }
    for version in sorted(versions):
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
        for first_well, fault in BROKEN_NCCL:
            if len(numbers) == 2 and numbers < first_well:
                return _fail(f"{version}: {fault}", f"install {first_well[0]}.{first_well[1]} or later")
    return _ok(_listed(sorted(versions)) or "not installed as a package")


def _variables(facts: NodeFacts) -> _Result:
    """The NCCL_* variables whose values differ between nodes, with each node's value."""
    names = sorted({name for node in facts.values() for name in node["nccl_variables"]} - _OF_A_NODE)
    values = {name: _by_value(facts, partial(_nccl_value, variable=name)) for name in names}
    differing = [name for name in names if len(values[name]) > 1]
    if not differing:
        return _ok(", ".join(names) or "none")
    words = [f"{name}: {_groups(values[name])}" for name in differing[:_MOST_VARIABLES]]
    left = len(differing) - len(words)
    return _warn(
        "; ".join(words) + (f"; and {left} more" if left else ""), "NCCL_* must be equal on all nodes"
    )


def _nccl_value(node: Mapping[str, Any], *, variable: str) -> str | None:
    """The value of a variable on a node, None where it is not set there."""
    # A node of an earlier release says the names alone.
    values = {**dict.fromkeys(node["nccl_variables"], "set"), **node.get("nccl_values", {})}
    return values[variable] or '""' if variable in values else None


_CHECKS: dict[str, Callable[[NodeFacts], _Result]] = {
    "packages": _packages,
    "python": _same(lambda node: str(node["python"]), fix="use the same python on all nodes"),
    "devices": _devices,
    "speed": _speed,
    "driver": _same(
        lambda node: str(node["driver"]),
        fix="nodes with another driver may be slower, and fail where a newer CUDA is needed",
    ),
    "links": _links,
    "network": _same(
        lambda node: _up(node["interfaces"]),
        fix="set NCCL_SOCKET_IFNAME to the interface that all nodes have",
    ),
    "port": _port,
    "clock": _clock,
    "storage": _storage,
    "disk": _disk,
    "limits": _limits,
    "nccl": _nccl,
    "programs": _same(lambda node: ", ".join(node["programs"]), fix="use one image on all nodes"),
    "variables": _variables,
}


def _up(interfaces: Mapping[str, str]) -> str:
    return ", ".join(name for name, state in interfaces.items() if state != "down")


def _counted(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _by_value(facts: NodeFacts, value: Callable[[Mapping[str, Any]], Any]) -> dict[Any, list[str]]:
    groups: dict[Any, list[str]] = {}
    for name, node in facts.items():
        groups.setdefault(value(node), []).append(name)
    return groups


def _groups(groups: Mapping[Any, Sequence[str]]) -> str:
    return "; ".join(f"{value or 'none'} on {_listed(names)}" for value, names in groups.items())[:400]


def _listed(names: Sequence[Any] | set[Any]) -> str:
    shown = [str(name) for name in names]
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")
