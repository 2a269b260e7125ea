"""A real Slurm on this machine: munged, slurmctld and a slurmd a node, without systemd, all of one folder.

Every node is a process, mount and UTS namespace of its own: it has a host name and sees its own processes
alone. It needs root, and Debian's slurm-wlm and munge.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.launchers import namespaces
from tests.ports import free_ports

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "unshare")
_UP_S = 60.0
_CONF = """\
ClusterName=test
SlurmctldHost=controller(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool.%n
SlurmctldLogFile={folder}/log/controller.log
SlurmdLogFile={folder}/log/%n.log
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=3
MinJobAge=300
NodeName={nodes} NodeHostname=controller NodeAddr=127.0.0.1 Port={ports} CPUs=2 RealMemory=2000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing_programs() -> list[str]:
    """The programs that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@dataclass
class SlurmCluster:
    """A running cluster; `environment` reaches it."""

    folder: Path
    nodes: tuple[str, ...]
    _daemons: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, outside of any job, with the cluster's configuration."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return {**kept, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *words: str, limit_s: float = 60.0, more: Mapping[str, str] | None = None) -> str:
        """What one of Slurm's programs prints."""
        result = subprocess.run(
            words,
            env={**self.environment, **(more or {})},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert result.returncode == 0, f"{words}: {result.stderr}"
        return result.stdout.strip()

    def start_controller(self) -> None:
        """Start slurmctld, or start it again."""
        self._start("controller", ["slurmctld", "-D"])

    def start_node(self, node: str) -> None:
        """Start a node's slurmd."""
        (self.folder / f"spool.{node}").mkdir(exist_ok=True)
        self._start(node, ["slurmd", "-D", "-N", node])

    def stop_controller(self) -> None:
        """End slurmctld as an administrator does: it writes its state."""
        daemon = self._daemons.pop("controller")
        for child in psutil.Process(daemon.pid).children():
            child.terminate()
        daemon.wait()

    def kill(self, name: str) -> None:
        """Kill a daemon and, with a node's, everything that runs on the node."""
        daemon = self._daemons.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()

    def await_up(self) -> None:
        """Wait until every node is idle."""
        for node in self.nodes:
            with contextlib.suppress(AssertionError):  # one that is in service needs nothing
                self.run("scontrol", "update", f"nodename={node}", "state=resume")
        self._await(lambda: self.run("sinfo", "-h", "-o", "%T %D", "-p", "main") == f"idle {len(self.nodes)}")

    def stop(self) -> None:
        """Kill every daemon, and with the nodes every job."""
        for name in list(self._daemons):
            self.kill(name)

    def _await(self, is_done: Callable[[], bool]) -> None:
        end = time.monotonic() + _UP_S
        while True:
            with contextlib.suppress(AssertionError):
                if is_done():
                    return
            assert time.monotonic() < end, self.run("sinfo")
            time.sleep(0.1)

    def _start(self, name: str, words: Sequence[str]) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                namespaces.words_on(name, str(self.folder / "hosts"), words),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


@contextlib.contextmanager
def slurm_cluster(folder: Path, *, num_nodes: int) -> Iterator[SlurmCluster]:
    """A cluster of `num_nodes` nodes n1, n2, ... in an empty folder, whole and idle; ended with the block."""
    folder.chmod(0o755)
    for name in ("state", "log"):
        (folder / name).mkdir()
    nodes = tuple(f"n{number}" for number in range(1, num_nodes + 1))
    ports = free_ports(num_nodes + 1)
    conf = _CONF.format(
        folder=folder,
        controller_port=ports[0],
        nodes=f"n[1-{num_nodes}]",
        ports=f"[{ports[1]}-{ports[-1]}]",
    )
    (folder / "slurm.conf").write_text(conf)
    (folder / "hosts").write_text(
        "".join(f"127.0.0.1 {name}\n" for name in ("localhost", "controller", *nodes))
    )
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o600)
    places = {"key-file": "munge.key", "socket": "munge.sock", "log-file": "log/munged.log"}
    places |= {"pid-file": "munged.pid", "seed-file": "munge.seed"}
    words = [f"--{option}={folder / name}" for option, name in places.items()]
    with (folder / "log" / "munged.out").open("wb") as log:
        munged = subprocess.Popen(
            ["munged", "--foreground", "--force", *words], stdout=log, stderr=log, start_new_session=True
        )
    cluster = SlurmCluster(folder=folder, nodes=nodes)
    try:
        while not (folder / "munge.sock").exists():
            assert munged.poll() is None
            time.sleep(0.02)
        cluster.start_controller()
        for node in nodes:
            cluster.start_node(node)
        cluster.await_up()
        yield cluster
    finally:
        cluster.stop()
        munged.kill()
        munged.wait()
