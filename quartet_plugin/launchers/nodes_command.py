"""The user's command on several nodes: an engine starts it once on each, and it is one training."""

from dataclasses import replace

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import Command


def on_nodes(command: Command, *, num_nodes: int) -> Command:
    """The command as it runs on `num_nodes` nodes.

    `torchrun` for one node is started on each with the variables that join them; a program that is not read
    finds NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT there. Raises ConfigError for a command that fixes
    another number of nodes, or that reaches other nodes by itself.
    """
    if command.starter == "deepspeed":
        raise ConfigError(
            "deepspeed: connects to its nodes itself; with a launcher write the command with torchrun, which "
            "the launcher starts once on each node"
        )
    if command.starter == "python" and num_nodes > 1:
        raise ConfigError(
            f"trial.nodes: {num_nodes}; the command starts one process: write it with torchrun, which the "
            "launcher starts once on each node"
        )
    if command.num_nodes not in (1, num_nodes):
        fixed = "a range of nodes" if command.num_nodes is None else f"--nnodes {command.num_nodes}"
        raise ConfigError(
            f"torchrun: {fixed}, and trial.nodes is {num_nodes}; omit --nnodes: the launcher sets it"
        )
    if num_nodes > 1 and command.pinned is not None:
        raise ConfigError(
            f"torchrun {command.pinned}: stays on one node, and trial.nodes is {num_nodes}; omit it: the "
            "launcher joins the nodes"
        )
    if command.num_nodes == num_nodes and num_nodes > 1:
        return command
    total = None if command.num_processes is None else command.num_processes * num_nodes
    return replace(command, num_nodes=num_nodes, num_processes=total)
