"""Where the trials of a run start: this machine, or an engine's nodes, divided between trials at once."""

from dataclasses import dataclass, field, replace
from typing import Literal

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import Command
from quartet_plugin.launchers.device_slices import MAX_SLICES, DeviceSlice
from quartet_plugin.launchers.engines import LOCAL, engine_named
from quartet_plugin.launchers.local import check_one_node
from quartet_plugin.launchers.nodes_command import on_nodes
from quartet_plugin.launchers.protocol import NodesLauncher
from quartet_plugin.launchers.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The launcher's name, the nodes of a trial, and what its site asks of every job.

    `num_full_nodes` are those of the training where trials have fewer. Raises ConfigError where they are no
    multiple of a trial's.
    """

    launcher: str = LOCAL
    num_nodes: int = 1
    site: Site = field(default_factory=Site)
    num_full_nodes: int | None = None

    def __post_init__(self) -> None:
        if self.num_full_nodes is not None and self.num_full_nodes % self.num_nodes:
            raise ConfigError(
                f"nodes: {self.num_full_nodes}; must be a multiple of trial.nodes ({self.num_nodes}): "
                "a trial has a part of the training's replicas"
            )

    @property
    def batch_divisor(self) -> int:
        """The training's replicas over a trial's."""
        return 1 if self.num_full_nodes is None else self.num_full_nodes // self.num_nodes

    @property
    def share_words(self) -> str:
        """The part of the training that a trial runs, for the user."""
        return (
            f"a trial has {self.num_nodes} of {self.num_full_nodes} nodes, and as much of the replicas and "
            "of the global batch; where one replica needs more nodes, a trial runs a part of its stages"
        )

    @property
    def at_full_size(self) -> "Placement":
        """The placement of launches on as many nodes as the training has."""
        return replace(self, num_nodes=self.num_full_nodes or self.num_nodes)

    @property
    def is_local(self) -> bool:
        """Whether trials start on this machine."""
        return self.launcher == LOCAL

    def command(self, command: Command) -> Command:
        """The user's command as it runs there. Raises ConfigError for one that cannot."""
        if not self.is_local:
            return replace(on_nodes(command, num_nodes=self.num_nodes), batch_divisor=self.batch_divisor)
        if self.num_nodes != 1:
            raise ConfigError(
                f"trial.nodes: {self.num_nodes}; this machine is one node: choose a launcher that has nodes "
                "(launcher: slurm)"
            )
        if self.num_full_nodes is not None:
            raise ConfigError(
                f"nodes: {self.num_full_nodes}; this machine is one node: choose a launcher that has nodes "
                "(launcher: slurm), or omit nodes"
            )
        check_one_node(command)
        return command

    def slices(self, *, at_once: int, device: Literal["auto", "cpu", "cuda"]) -> tuple[DeviceSlice, ...]:
        """The nodes of each of `at_once` trials. Raises ConfigError where there are not enough."""
        if not 1 <= at_once <= MAX_SLICES:
            raise ConfigError(f"--workers {at_once}: must be from 1 to {MAX_SLICES}")
        engine = engine_named(self.launcher, site=self.site)
        if device == "auto":
            raise ConfigError(
                f"device: auto; with launcher: {self.launcher} trials run on other nodes than this process: "
                "write `device: cuda`, or cpu, into a q.yaml and give it with --config q.yaml"
            )
        parts = engine.divide(num_nodes=self.num_nodes, at_once=at_once)
        return tuple(
            DeviceSlice(device=device, index=index, count=at_once, nodes=nodes, num_nodes=self.num_nodes)
            for index, nodes in enumerate(parts)
        )

    def launcher_on(self, device_slice: DeviceSlice | None) -> NodesLauncher | None:
        """The launcher of trials on these nodes; None on this machine."""
        if self.is_local or device_slice is None:
            return None
        engine = engine_named(self.launcher, site=self.site)
        return engine.launcher(device_slice.nodes, num_nodes=device_slice.num_nodes)
