"""A real Ray of several nodes on this machine, each with one CPU: a process that lives until its input ends.

python -m tests.launchers.ray_cluster NUM_NODES    # prints the address
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
_MEMORY_BYTES = 80_000_000


def main(num_nodes: int) -> None:
    """Start the nodes, say where they are, and end them when nobody listens any more."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    options = {"num_cpus": 1, "object_store_memory": _MEMORY_BYTES, "include_dashboard": False}
    for index in range(num_nodes):
        # The nodes have names of their own: ranks of one host would be told by their local ranks.
        os.unshare(os.CLONE_NEWUTS)
        socket.sethostname(f"ray-{index}")
        cluster.add_node(**options)
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line == "kill a node\n":
            cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
            print("killed", flush=True)
    cluster.shutdown()


class RayNodes:
    """The nodes of the tests."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.address = self._answer()

    def kill_a_node(self) -> None:
        """End the newest node at once."""
        assert self._process.stdin is not None
        self._process.stdin.write("kill a node\n")
        self._process.stdin.flush()
        assert self._answer() == "killed"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith(("127.", "killed")) or line[:1].isdecimal():
                return line.strip()
        raise AssertionError("Ray has not started")


@contextmanager
def ray_nodes(number: int) -> Iterator[RayNodes]:
    """Nodes that end with the block."""
    # A short path: sockets lie below it.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.launchers.ray_cluster", str(number)],
            cwd=ROOT,
            env={**os.environ, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield RayNodes(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))
