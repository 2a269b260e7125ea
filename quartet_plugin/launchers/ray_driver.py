"""The driver of an attempt on Ray: one actor a node, each of which holds the command's process there.

    python -m quartet_plugin.launchers.ray_driver          # the request of a start is on its standard input
    python -m quartet_plugin.launchers.ray_driver --end    # ends an attempt; prints where it could not
    python -m quartet_plugin.launchers.ray_driver --count  # prints how many nodes a trial could have

Ray ends the actors when the driver ends. The first node that fails ends the others, within seconds. Where
SIGTERM asks for the end instead, the command takes its time: who asks is there to kill it.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from quartet_plugin.launchers.connected_node import (
    MODULE,
    TERMINATE,
    close,
    end_attempt,
    send,
    start_command,
)
from quartet_plugin.model.files import write_json_atomic

# Beside the attempt's output: the nodes of the placement group, and why Ray and no plan is to blame.
PLACED_FILE, FAULT_FILE = "placed-nodes.json", "ray-fault.json"
# No exit code of a command, as ssh's for a connection that is lost.
_FAULT_EXIT = 255
_STOPPED_EXIT = 130
_GRACE_S = 5.0
_POLL_S = 0.1
_END_S = 60.0
_CONNECT_S = 10.0


class RayLostError(Exception):
    """Ray, and no plan, is the reason that the command did not run to its end."""


class NodeActor:
    """What holds the command's process on a node: the end of its pipe ends the command."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def place(self) -> dict[str, str]:
        """Ray's id of the node, and its address."""
        import ray

        return {
            "id": ray.get_runtime_context().get_node_id(),
            "address": ray.util.get_node_ip_address(),
        }

    def run(self, request: dict[str, Any]) -> int:
        """Run the command to its end; its exit code."""
        import ray

        if gpus := ray.get_gpu_ids():
            request["env"]["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        with Path(request["stdout"]).open("ab") as output:
            self._process = subprocess.Popen(
                [request["python"] or sys.executable, "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        start_command(self._process, request, index=request["index"])
        return self._process.wait()

    def terminate(self) -> None:
        """Ask the command to end."""
        if self._process is not None:
            send(self._process, TERMINATE)

    def close(self) -> None:
        """End the command, whatever it ignores."""
        if self._process is not None:
            close(self._process)


class RayAttempt:
    """The command on all nodes of a placement group, until it has ended on each."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._request = request
        self._folder = Path(request["stdout"]).parent
        self._is_asked = False

    def run(self) -> int:
        """The highest exit code of the nodes. Raises RayLostError where Ray fails."""
        signal.signal(signal.SIGTERM, self._end)
        connect(self._request["address"])
        # Ray has set a handler of its own.
        signal.signal(signal.SIGTERM, self._end)
        group = self._place()
        if group is None:
            return _STOPPED_EXIT
        actors = self._actors(group)
        places = self._places(actors)
        write_json_atomic(self._folder / PLACED_FILE, {"nodes": places})
        return self._watch(actors, [place["address"] for place in places])

    def _end(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._is_asked = True

    def _place(self) -> Any:
        """The placement group once it has nodes; None when asked to end before."""
        import ray
        from ray.util.placement_group import placement_group

        number, bundle = self._request["num_nodes"], resources_of(self._request)
        able = count_nodes(bundle)
        if able < number and not self._request["grows"]:
            asked = " and ".join(f"{count:g} {name}" for name, count in bundle.items())
            raise RayLostError(
                f"Ray has {able} nodes of {asked} or more, and the trial needs {number}; request fewer, or "
                "write ray: {grows: true} if Ray adds nodes on demand"
            )
        group = placement_group([bundle] * number, strategy="STRICT_SPREAD")
        ready = group.ready()
        while not ray.wait([ready], timeout=_POLL_S)[0]:
            if self._is_asked:
                return None
        return group

    def _actors(self, group: Any) -> list[Any]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote, bundle = ray.remote(NodeActor), resources_of(self._request)
        return [
            remote.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0.0),
                # A call that waits for the command, and one that ends it.
                max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(self._request["num_nodes"])
        ]

    @staticmethod
    def _places(actors: Sequence[Any]) -> list[dict[str, str]]:
        import ray

        try:
            places: list[dict[str, str]] = ray.get([actor.place.remote() for actor in actors])
        except ray.exceptions.RayError as error:
            raise RayLostError(f"Ray lost a node: {type(error).__name__}") from error
        return places

    def _watch(self, actors: Sequence[Any], addresses: Sequence[str]) -> int:
        """Follow the command to its end on every node, and end it where it fails on one."""
        import ray

        running = {
            actor.run.remote({**self._request, "nodes": list(addresses), "index": index}): index
            for index, actor in enumerate(actors)
        }
        codes: list[int] = []
        lost: list[str] = []
        faults: list[str] = []
        begun_s: float | None = None
        is_closed = False
        while running:
            for call in ray.wait(list(running), timeout=_POLL_S)[0]:
                index = running.pop(call)
                try:
                    codes.append(ray.get(call))
                except ray.exceptions.RayTaskError as error:
                    faults.append(f"{addresses[index]}: {_cause(error)}")
                except ray.exceptions.RayError:
                    lost.append(addresses[index])
            if (self._is_asked or lost or faults or any(codes)) and begun_s is None:
                begun_s = time.monotonic()
                for index in running.values():
                    actors[index].terminate.remote()
            is_late = begun_s is not None and time.monotonic() > begun_s + _GRACE_S
            if is_late and not self._is_asked and not is_closed:
                is_closed = True
                for index in running.values():
                    actors[index].close.remote()
        if lost:
            raise RayLostError(f"Ray has lost {', '.join(lost)}")
        if faults:
            raise RayLostError(f"the command cannot start on {'; '.join(faults)}")
        return max(code if code >= 0 else 128 - code for code in codes)


def _cause(error: Any) -> str:
    """The exception of a call on a node, without Ray's own lines around it."""
    cause = error.cause
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"


def connect(address: str | None) -> None:
    """Join the Ray at `address`, else of RAY_ADDRESS or of this host. Raises RayLostError without one."""
    import ray

    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        if where != "auto":
            # Ray itself tries for minutes.
            host, _, port = where.rpartition(":")
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        ray.init(address=where, namespace="quartet_plugin", log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        named = "on this host" if where == "auto" else f"at {where}"
        raise RayLostError(
            f"no Ray answers {named}: start one, or name it as HOST:PORT under ray.address"
        ) from error


def resources_of(request: Mapping[str, Any]) -> dict[str, float]:
    """The resources per node of a request."""
    asked = {"CPU": request["cpus_per_node"], "GPU": request["gpus_per_node"]}
    return {name: float(number) for name, number in asked.items() if number}


def count_nodes(resources: Mapping[str, float]) -> int:
    """The number of Ray's nodes that have these resources, free or not."""
    import ray

    return sum(
        node["Alive"] and all(node["Resources"].get(name, 0.0) >= resources[name] for name in resources)
        for node in ray.nodes()
    )


def end_on_nodes(request: Mapping[str, Any]) -> list[str]:
    """End the attempt on its nodes that are alive; the addresses of those where something is left."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    connect(request["address"])
    remote = ray.remote(end_attempt)
    left = []
    calls = [
        remote.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["id"], soft=False)
        ).remote(request["attempt_id"])
        for node in request["nodes"]
    ]
    for node, call in zip(request["nodes"], calls, strict=True):
        try:
            is_left = bool(ray.get(call, timeout=_END_S))
        except ray.exceptions.RayError:
            is_left = node["id"] in _alive()
        if is_left:
            left.append(node["address"])
    return left


def _alive() -> set[str]:
    """The ids of the nodes that Ray has."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _counted(request: Mapping[str, Any]) -> int | dict[str, str]:
    try:
        connect(request["address"])
    except RayLostError as error:
        return {"reason": str(error)}
    return count_nodes(resources_of(request))


def main(words: Sequence[str]) -> int:
    """Run the request on the standard input, or answer for its nodes by `--end`, `--count`; the exit code."""
    request = json.loads(sys.stdin.buffer.read())
    if list(words) == ["--count"]:
        print(json.dumps(_counted(request)))
        return 0
    if list(words) == ["--end"]:
        print(json.dumps(end_on_nodes(request)))
        return 0
    try:
        return RayAttempt(request).run()
    except RayLostError as error:
        write_json_atomic(Path(request["stdout"]).parent / FAULT_FILE, {"reason": str(error)})
        return _FAULT_EXIT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
