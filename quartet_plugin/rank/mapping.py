"""Slots to RANKs at launch: which process plays which rank.

A plan names slots, not RANKs, because launchers number processes anew at every start. All ranks gather
where every process is, make the same assignment of it, and set RANK before the process group exists;
LOCAL_RANK and the device stay. RANK 0 stays on the launcher's first host, where MASTER_ADDR is.
"""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quartet_plugin.errors import PlanError
from quartet_plugin.mapping.order_rules import OrderRules
from quartet_plugin.model.plan import Plan, Slot
from quartet_plugin.rank.rendezvous import RankEnv, Rendezvous

_MAX_SHOWN = 16

# Flags of features that take consecutive ranks for one node, or the rank for the device.
_NEEDS_WHOLE_NODES = (
    "gpu_sniff_test_interval",
    "tp_comm_overlap",
    "hierarchical_context_parallel_sizes",
    "use_sharp",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The place of one process; `group_rank` counts the launcher's nodes in their order."""

    host: str
    group_rank: int
    local_rank: int | None
    local_world_size: int | None

    @property
    def node(self) -> tuple[int, str]:
        """Its node: launchers without torchrun's variables count none, so that the host tells nodes apart."""
        return self.group_rank, self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssignment:
    """`rank_of[i]` is the RANK of the process that the launcher numbered i; `note` is for the user."""

    rank_of: tuple[int, ...]
    note: str | None

    @property
    def is_stock(self) -> bool:
        """Whether every process keeps its number."""
        return list(self.rank_of) == list(range(len(self.rank_of)))


def gather_processes(rendezvous: Rendezvous, rank_env: RankEnv) -> list[Process]:
    """The host and the local rank of every process, in launch order."""
    process = {
        "host": rank_env.host,
        "group_rank": rank_env.group_rank,
        "local_rank": rank_env.local_rank,
        "local_world_size": rank_env.local_world_size,
    }
    return [Process(**json.loads(word)) for word in rendezvous.all_gather("place", json.dumps(process))]


def assign(
    plan: Plan, processes: Sequence[Process], *, args: Namespace, is_trial: bool = False
) -> RankAssignment:
    """The RANK of every process. `args` are the arguments as they will be with the plan.

    The nodes of a plan for equal devices by name are no hosts: they stand for the launcher's nodes in order.
    On other hosts than another plan was made for the launcher's order stays, and the note says so. In a trial
    the nodes stand for the launcher's there, too: a queue may choose other hosts for every launch. Raises
    PlanError where the start or a feature cannot take the plan's order.
    """
    stock = tuple(range(len(processes)))
    if plan.mapping.is_stock:
        return RankAssignment(rank_of=stock, note=None)
    _check_start(processes)
    at_slot, note = _match(plan, processes, has_named_hosts=not _is_for_equal_devices(plan))
    if note is not None and is_trial:
        at_slot, note = _match(plan, processes, has_named_hosts=False)
    if note is not None:
        return RankAssignment(rank_of=stock, note=note)
    rank_of = [0] * len(processes)
    for rank, slot in enumerate(plan.mapping.slots):
        rank_of[at_slot[slot]] = rank
    assignment = RankAssignment(rank_of=tuple(rank_of), note=None)
    _check_features(plan, processes, assignment, args)
    return assignment


def _check_start(processes: Sequence[Process]) -> None:
    if any(process.local_rank is None or process.local_world_size is None for process in processes):
        raise PlanError(
            "mapping: LOCAL_RANK or LOCAL_WORLD_SIZE is not set; start the script with torchrun, "
            "or use a plan with the stock order"
        )
    sizes = sorted({process.local_world_size or 0 for process in processes})
    if len(sizes) > 1:
        raise PlanError(
            f"mapping: nodes with {sizes[0]} and with {sizes[-1]} processes; the plan's order needs the same "
            "number on every node"
        )


def _match(
    plan: Plan, processes: Sequence[Process], *, has_named_hosts: bool
) -> tuple[dict[Slot, int], str | None]:
    """The launch number of the process at each slot, or a note why the plan's order cannot be replayed.

    Unless the plan `has_named_hosts`, its nodes are the launcher's in order.
    """
    present: dict[tuple[int, str], dict[int, int]] = {}
    for number, process in enumerate(processes):
        present.setdefault(process.node, {})[process.local_rank or 0] = number
    at_slot: dict[Slot, int] = {}
    left = list(present)
    for index, node in enumerate(plan.made_for.nodes):
        key = next(
            (
                k
                for k in left
                if (k[1] == node.host or not has_named_hosts) and len(present[k]) == node.num_slots
            ),
            None,
        )
        if key is None:
            hosts = _listed([node.host for node in plan.made_for.nodes])
            return {}, (
                f"mapping: made on {hosts}, now on {_listed([host for _, host in present])}: "
                "the ranks keep the launcher's order; tune on this cluster for an order of its nodes"
            )
        left.remove(key)
        for local, number in present[key].items():
            at_slot[Slot(node=index, local=local)] = number
    if set(at_slot) != set(plan.mapping.slots):
        return {}, "mapping: the local ranks here are not the plan's: the ranks keep the launcher's order"
    if processes[at_slot[plan.mapping.slots[0]]].node != processes[0].node:
        return {}, (
            f"mapping: the launcher's first host is {processes[0].host}, where RANK 0 must be, not "
            f"{plan.made_for.nodes[0].host}: the ranks keep the launcher's order"
        )
    return at_slot, None


def _is_for_equal_devices(plan: Plan) -> bool:
    """Whether the plan is for equal devices by name, with placeholders for hosts."""
    job = plan.made_for.job
    return job is not None and job.devices is not None


def _check_features(
    plan: Plan, processes: Sequence[Process], assignment: RankAssignment, args: Namespace
) -> None:
    node_of_rank = [process.node for process in processes]
    for number, rank in enumerate(assignment.rank_of):
        node_of_rank[rank] = processes[number].node
    tensor = plan.layout.tensor_parallel
    for first in range(0, len(node_of_rank), tensor):
        if len(set(node_of_rank[first : first + tensor])) > 1:
            raise PlanError(
                f"mapping: ranks {first} to {first + tensor - 1} are one tensor-parallel group on two nodes; "
                "a group must lie inside one"
            )
    size = processes[0].local_world_size or 1
    values: Mapping[str, Any] = vars(args)
    if values.get("non_persistent_ckpt_type") == "local" and values.get("replication"):
        raise PlanError(
            "mapping: --replication of local checkpoints needs the launcher's order of ranks; omit it"
        )
    if values.get("inprocess_restart"):
        raise PlanError(
            "mapping: --inprocess-restart (Megatron-Bridge: inprocess_restart.enabled) needs the launcher's "
            "order of ranks; omit it, or use a plan with the stock order"
        )
    if values.get("async_save") and values.get("use_persistent_ckpt_worker"):
        moved = [r for n, r in enumerate(assignment.rank_of) if r % size != processes[n].local_rank]
        if moved:
            raise PlanError(
                "mapping: --use-persistent-ckpt-worker uses the rank as the device; "
                f"rank {moved[0]} would write from another one: omit the flag"
            )
    whole = all(
        len(set(node_of_rank[first : first + size])) == 1 for first in range(0, len(node_of_rank), size)
    )
    used = [name for name in _NEEDS_WHOLE_NODES if values.get(name)]
    flex = values.get("moe_token_dispatcher_type") == "flex"
    fault = OrderRules(keeps_experts=flex).fault(plan.mapping.slots, layout=plan.layout)
    if fault is not None:
        raise PlanError(f"mapping: with --moe-token-dispatcher-type flex an order must {fault}")
    if (values.get("num_distributed_optimizer_instances") or 1) > 1:
        used.append("num_distributed_optimizer_instances")
    if used and not whole:
        raise PlanError(
            f"mapping: --{used[0].replace('_', '-')} treats consecutive ranks as one node, and the plan's "
            "order mixes nodes; omit the flag"
        )


def table_of(processes: Sequence[Process], assignment: RankAssignment) -> str:
    """`rank 0 on node-a:2, ...`: one short line, only the ranks that moved where there are many."""
    launch = {rank: number for number, rank in enumerate(assignment.rank_of)}
    ranks = sorted(launch)
    if len(ranks) > _MAX_SHOWN:
        ranks = [rank for rank in ranks if launch[rank] != rank]
    places = [
        f"{rank} on {processes[launch[rank]].host}:{processes[launch[rank]].local_rank}" for rank in ranks
    ]
    more = f" and {len(places) - _MAX_SHOWN} more" if len(places) > _MAX_SHOWN else ""
    return f"mapping: rank {', '.join(places[:_MAX_SHOWN])}{more}"


def _listed(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:4]) + (f" and {len(distinct) - 4} more" if len(distinct) > 4 else "")
