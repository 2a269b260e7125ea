"""The request to plan that stands for a study's space: `quartet plan` of what the study leaves free.

So a study begins with the planner's plans, and the planner's bounds say which of its layouts may be fast.
"""

from dataclasses import replace

from quartet_plugin.calibration.machine_prior import KnownMachine, devices_of
from quartet_plugin.cost.software import precision_of_products
from quartet_plugin.model.plan import STOCK
from quartet_plugin.planner.job import PlanRequest, PlanSearch
from quartet_plugin.space.config import TABLE_SCHEDULES
from quartet_plugin.space.features import Axis
from quartet_plugin.space.forbidden import table_rules
from quartet_plugin.space.plan_space import Space
from quartet_plugin.space.rules import LayoutRules

# Where no one says a device's memory, none is a limit.
_UNLIMITED_BYTES = 2**50


def request_of_space(space: Space, *, machine: KnownMachine) -> PlanRequest:
    """The request; `machine` has what is known of it beyond its nodes.

    Rules of `search.forbid` that a table of layouts cannot judge are left to the space. Raises ConfigError
    where `machine` has other nodes.
    """
    job = space.job
    devices = devices_of(space.nodes, precision=job.precision, machine=machine)
    machines = devices.machines
    if not (devices.is_known or devices.cluster):
        machines = replace(machines, memory_bytes=_UNLIMITED_BYTES)
    return PlanRequest(
        shape=job.shape,
        machines=machines,
        global_batch_size=job.global_batch_size,
        precision=precision_of_products(job.features, machines.device, precision=job.precision),
        search=_search(space),
        experts=job.experts,
        latent=job.latent,
        normalization=job.normalization,
        mtp_layers=job.mtp_layers or 0,
        mtp_kinds=job.mtp_kinds,
        features=job.features,
        settings=job.settings or (),
        cluster=devices.cluster,
        rules=_rules(space),
        packed=job.packed,
    )


def _rules(space: Space) -> LayoutRules:
    """The space's rules for the schedules of a table; without one of them, layouts have all schedules."""
    requested = space.search.schedule
    is_in_table = requested is None or set(requested) & {STOCK, *TABLE_SCHEDULES}
    schedule = requested if is_in_table else None
    search = space.search.model_copy(update={"schedule": schedule, "forbid": ()})
    return replace(space.rules(), search=search, written={})


def _search(space: Space) -> PlanSearch:
    search, plan = space.search, PlanSearch()
    scaling = search.scaling if len(space.shapes) > 1 else None
    may_move = Axis.MAPPING not in space.locked and len({node.num_slots for node in space.nodes}) == 1
    moved: PlanSearch = plan.model_copy(
        update={
            "schedule": search.schedule,
            "group": search.group,
            "mtp_stage": search.mtp_stage,
            "split": _splits(space),
            "mapping": None if may_move and search.mapping is None else (STOCK,),
            "scaling": scaling,
            "forbid": table_rules(search.forbid),
        }
    )
    return moved


def _splits(space: Space) -> tuple[str, ...] | None:
    """The splits to choose from in the words of a table: those of equal counts, and written ones."""
    words = (STOCK,) if Axis.SPLIT in space.locked else space.search.split
    if words is None:
        return None
    stock = [space.baseline.split.label] if STOCK in words else []
    written = [*stock, *(word for word in words if word[0].isdigit())]
    if space.shapes != (space.job.shape,):
        written = []  # of one number of layers
    even = ["even"] if {STOCK, "even"} & set(words) else []
    return tuple(dict.fromkeys([*written, *even])) or None
