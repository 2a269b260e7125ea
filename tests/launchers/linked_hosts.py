"""Hosts that ssh reaches, a network namespace each, of which some are joined by slow links.

A study runs over all of them, and a training with its winner. Needs root, `ip`, `tc` and an sshd.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scenarios.network import address, interface, joined_namespaces, namespace
from tests.cli.tuning import environment, living
from tests.launchers import namespaces
from tests.launchers.ssh_hosts import ssh_hosts
from tests.megatron.entry_launch import SCRIPT

_ENTRY = "from quartet_plugin.cli.main import entry; entry()"
_PREFIX, RATE = "node", "200mbit"
# At the end of a training each process says on which host it was which rank, stage and share of the experts.
_PLACE = """
    import os, pathlib, socket
    stage, experts = mpu.get_pipeline_model_parallel_rank(), mpu.get_expert_model_parallel_rank()
    name = f"rank-{os.environ['RANK']}-stage-{stage}-experts-{experts}"
    pathlib.Path(os.environ["PLACES"], name).write_text(socket.gethostname())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process of a training was: its rank's stage and share of the experts, and its host."""

    stage: int
    experts: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedHosts:
    """Hosts that ssh reaches by `site`, and the folder of their runs."""

    folder: Path
    site: Path
    names: tuple[str, ...]

    def quartet(self, *words: str) -> str:
        """What a command of the plugin prints, which must succeed."""
        done = subprocess.run(
            [sys.executable, "-c", _ENTRY, *words],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env={**environment(), "OMP_NUM_THREADS": "1", "PLACES": str(self.folder)},
            check=False,
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        return done.stdout

    def tune(self, config: str, command: Sequence[str]) -> Path:
        """The folder of a study called `linked` over all hosts."""
        path = self.folder / "q.yaml"
        path.write_text(config)
        words = ["tune", "--config", str(path), "--run-dir", str(self.folder / "runs")]
        print(self.quartet(*words, "--", *command))
        return self.folder / "runs" / "linked"

    def train(self, plan: Path, command: Sequence[str]) -> list[Place]:
        """The place of each rank of a training with a plan on all hosts."""
        words = ["train", "--launcher", "ssh", "--site", str(self.site), "--plan", str(plan)]
        output = self.quartet(*words, "--device", "cpu", "--", *command)
        assert "iteration        3/       3" in output
        places: dict[int, Place] = {}
        for path in self.folder.glob("rank-*"):
            _, rank, _, stage, _, experts = path.name.split("-")
            places[int(rank)] = Place(stage=int(stage), experts=int(experts), host=path.read_text())
        return [places[rank] for rank in range(len(places))]


@contextmanager
def linked_hosts(
    folder: Path, *, number: int, slow: Sequence[tuple[int, int]], rate: str = RATE
) -> Iterator[LinkedHosts]:
    """Hosts in network namespaces, of which those at each two indices of `slow` are joined by `rate`."""
    namespaces.require()
    (folder / "hosts").mkdir()
    networks = [(namespace(index, prefix=_PREFIX), address(index)) for index in range(number)]
    with joined_namespaces(["4gbit"] * number, prefix=_PREFIX, burst="2mb"):
        for host in range(number):
            others = [there for pair in slow for there in pair if host in pair and there != host]
            _slow_down(host, others, rate)
        with ssh_hosts(folder / "hosts", number=number, networks=networks) as hosts:
            site = folder / "site.yaml"
            site.write_text(hosts.site.model_dump_json(exclude_defaults=True))
            yield LinkedHosts(folder=folder, site=site, names=hosts.names)
            # The hosts live, and would show what still runs on them.
            assert not living(folder / "pretrain.py")
            assert not living(folder / "runs")


def _slow_down(host: int, others: Sequence[int], rate: str) -> None:
    """Let only `rate` through from a host to each of the others; its other links stay as they are."""
    if not others:
        return
    device = interface(host, prefix=_PREFIX)
    rows = [
        f"qdisc replace dev {device} root handle 1: htb default 10",
        f"class add dev {device} parent 1: classid 1:10 htb rate 4gbit",
    ]
    for there in others:
        flow, target = f"1:{20 + there}", f"{address(there)}/32"
        rows += [
            f"class add dev {device} parent 1: classid {flow} htb rate {rate} burst 128kb",
            f"filter add dev {device} parent 1: protocol ip u32 match ip dst {target} flowid {flow}",
        ]
    tc = ["ip", "netns", "exec", namespace(host, prefix=_PREFIX), "tc"]
    for row in rows:
        subprocess.run([*tc, *row.split()], check=True)


def command_of(folder: Path, *flags: str, processes: int = 1) -> list[str]:
    """The example script, whose processes say at the end where they were; `processes` on each host."""
    script = folder / "pretrain.py"
    script.write_text(SCRIPT.read_text(encoding="utf-8") + _PLACE)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    return [torchrun, "--nproc-per-node", str(processes), str(script), *flags]
