"""`quartet probe`: writes a cluster file for the machines it runs on."""

import importlib.util
import os
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quartet_plugin.cli.command import DeviceName, check_folder, check_range, check_seconds, invocation
from quartet_plugin.cli.output import show
from quartet_plugin.errors import ConfigError, InfrastructureError, UsageError

if TYPE_CHECKING:
    from quartet_plugin.launchers.protocol import Handle
    from quartet_plugin.model.cluster import Cluster

_MODULE = "quartet_plugin.probe"
_MAX_PROCESSES = 1024
# Processor cores that are probed when nobody says how many: more of them measure nothing new.
_CORES = 8
_POLL_S = 0.05
_GRACE_S = 3.0


def probe_command(
    ctx: typer.Context,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="CLUSTER.json", help="The file to write.")
    ] = Path("cluster.json"),
    device: DeviceName = "auto",
    processes: Annotated[
        int | None,
        typer.Option(help="Ranks on this machine. Default: its GPUs, or its cores up to 8."),
    ] = None,
    deadline: Annotated[float, typer.Option(help="Time limit of the measurement, in seconds.")] = 180.0,
) -> None:
    """Measure devices, memory and links, and write the cluster file that `quartet plan` reads.

    Without a command it starts torchrun on this machine alone.
    """
    from quartet_plugin.launchers.local import resolve_device

    check_seconds("--deadline", deadline, most=1e5)
    if processes is not None:
        check_range("--processes", processes, most=_MAX_PROCESSES)
    chosen = resolve_device(device, environment=os.environ)
    words = invocation(ctx).user_command
    if words is not None and processes is not None:
        raise UsageError("--processes: the command after -- also sets the number; give only one")
    # Of several nodes only one writes.
    if words is None:
        check_folder(output)
    cluster = probe(words, device=chosen, num_processes=processes, deadline_s=deadline)
    if cluster is None:
        show("the cluster file is written on the node of rank 0")
        return
    from quartet_plugin.model.cluster import write_cluster

    write_cluster(cluster, path=output)
    show(f"{output}: {len(cluster.nodes)} nodes, {cluster.num_slots} devices", *lines(cluster))


def probe(
    words: Sequence[str] | None,
    *,
    device: Literal["cpu", "cuda"],
    num_processes: int | None,
    deadline_s: float,
) -> "Cluster | None":
    """Run the measurement and return the cluster; None where rank 0 is on another node.

    Raises ConfigError for a launcher that is none, or where torch is missing; InfrastructureError where the
    processes fail or take too long. None of them is left.
    """
    from quartet_plugin.cost.probed import Findings, cluster_of
    from quartet_plugin.model.schema import read_record

    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "torch is not installed, and the probe needs it; pip install 'quartet-plugin[megatron]'"
        )
    with tempfile.TemporaryDirectory(prefix="quartet-") as folder:
        target = Path(folder, "findings.json")
        script = ["-m", _MODULE, str(target), device, repr(deadline_s)]
        start = _torchrun(num_processes, device=device) if words is None else _launcher(words)
        _run([*start, *script], folder=Path(folder), device=device, deadline_s=deadline_s)
        if target.exists():
            return cluster_of(read_record(Findings, target))
    if words is None:
        raise InfrastructureError("the probe ended without a result; run it again with --debug")
    return None


def lines(cluster: "Cluster") -> list[str]:
    """The measured rates, a line for each device type and link."""
    rows = []
    for name, values in cluster.devices.items():
        rates = ", ".join(f"{flops / 1e12:.3g} TFLOP/s {kind}" for kind, flops in values.peak_flops.items())
        memory = (values.memory_bandwidth_bytes_per_s or 0.0) / 1e9
        rows.append(f"{name}: {rates}, memory {memory:.3g} GB/s")
    links = cluster.links
    levels = (
        ("inside a node", links.scale_up),
        ("inside a segment", links.segment),
        ("between nodes" if links.segment is None else "between segments", links.network),
    )
    for name, link in levels:
        if link is not None:
            speed = link.bandwidth_bytes_per_s / 1e9
            rows.append(f"{name}: {speed:.3g} GB/s, {link.latency_s * 1e6:.3g} us")
    return [*rows, *_places(cluster)]


def _places(cluster: "Cluster") -> list[str]:
    """The fabrics of the nodes and their places among Slurm's switches, where they are known."""
    rows = []
    fabrics = Counter(node.fabric for node in cluster.nodes if node.fabric is not None)
    if fabrics:
        domain = cluster.links.scale_up_devices
        together = "the devices of a fabric" if max(fabrics.values()) > 1 else "a node's devices"
        joined = together if domain is None else f"{domain} devices"
        cliques = ", ".join(f"{name} ({count} nodes)" for name, count in sorted(fabrics.items())[:4])
        rows.append(f"fabric: {cliques}; {joined} in a scale-up domain")
    places = [f"{node.name} {node.topology}" for node in cluster.nodes if node.topology is not None]
    if places:
        pattern = next((node.topology_pattern for node in cluster.nodes if node.topology_pattern), "")
        words = f" ({pattern})" if pattern else ""
        shown = f"{', '.join(places[:4])}{', ...' if len(places) > 4 else ''}"
        segments = {node.segment for node in cluster.nodes} - {None}
        rows.append(f"topology{words}: {shown}; segments: {len(segments)}")
    return rows


def _torchrun(num_processes: int | None, *, device: str) -> list[str]:
    from quartet_plugin.launchers.local import free_port

    count = num_processes or (num_gpus() if device == "cuda" else min(_CORES, len(os.sched_getaffinity(0))))
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    return [*start, "--master-port", str(free_port())]


def num_gpus() -> int:
    """GPUs that the environment shows; counted by device files, since torch may not be imported here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return max(1, len([name for name in visible.split(",") if name.strip()]))
    return max(1, len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()]))


def _launcher(words: Sequence[str]) -> list[str]:
    """The words after --: torchrun and its options, without a script.

    Raises ConfigError for anything else.
    """
    from quartet_plugin.launchers.command import is_starter
    from quartet_plugin.launchers.starter_options import read_options

    name = words[0].rpartition("/")[2] if words else ""
    first_option = 1
    if name != "torchrun":
        if not is_starter(name) or tuple(words[1:3]) != ("-m", "torch.distributed.run"):
            raise ConfigError(f"command {name!r}: must be torchrun and its options, without a script")
        first_option = 3
    options = read_options(tuple(words), first_option, program="torchrun")
    if options.end != len(words):
        raise ConfigError(
            f"command {words[options.end]!r}: the probe replaces the script; write torchrun's options only"
        )
    for flag in ("help", "module", "no_python", "run_path"):
        if flag in options.values:
            raise ConfigError(f"torchrun --{flag.replace('_', '-')}: the probe replaces the script; omit it")
    return list(words)


def _run(argv: Sequence[str], *, folder: Path, device: Literal["cpu", "cuda"], deadline_s: float) -> None:
    """Start `argv`, wait for its end, and leave none of its processes behind. Raises InfrastructureError."""
    from quartet_plugin.launchers.local import LocalLauncher, child_environment
    from quartet_plugin.protocol.environment import ATTEMPT_ID
    from quartet_plugin.trial.processes import descendants, marked_processes, reap

    mark = secrets.token_hex(16)
    environment = {**child_environment(device, environment=os.environ), ATTEMPT_ID: mark}
    log = folder / "log"
    handle = LocalLauncher().start(argv, env=environment, cwd=Path.cwd(), stdout=log)
    try:
        code = _wait(handle, deadline_s=deadline_s)
    finally:
        reap(descendants({handle.pid}) | marked_processes(mark), grace_s=_GRACE_S)
        handle.kill()
        _wait(handle, deadline_s=_GRACE_S)
    if code != 0:
        raise InfrastructureError(_failure(code, log=log, deadline_s=deadline_s))


def _wait(handle: "Handle", *, deadline_s: float) -> int | None:
    end = time.monotonic() + deadline_s
    while (code := handle.poll()) is None and time.monotonic() < end:
        time.sleep(_POLL_S)
    return code


def _failure(code: int | None, *, log: Path, deadline_s: float) -> str:
    """One line with the error and the last lines that the processes printed."""
    from quartet_plugin.trial.log import last_lines, read_tail

    if code is None:
        return f"the probe took longer than {deadline_s:g} s; check the links, or raise --deadline"
    words = [line.strip() for line in last_lines(read_tail(log)) if "Error" in line]
    return f"the probe failed: {words[0][:300] if words else f'torchrun ended with code {code}'}"
