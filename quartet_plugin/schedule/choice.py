"""Schedules as a plan carries them, and back."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quartet_plugin.errors import PlanError, QuartetError
from quartet_plugin.model.costs import FloatArray, StageCosts
from quartet_plugin.model.custom_schedule import PER_STAGE, CustomSchedule, StageProfile
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import ScheduleChoice
from quartet_plugin.schedule.family import PER_CHUNK, SCALARS, Family, generate, plain_family
from quartet_plugin.schedule.files import entry_texts, parse_entries
from quartet_plugin.schedule.named import named
from quartet_plugin.schedule.placement import kind_of
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.validate import validate


def choice_of(
    schedule: Schedule,
    costs: StageCosts,
    *,
    memory_limit_bytes: FloatArray | None = None,
    with_orders: bool | None = None,
) -> CustomSchedule:
    """`schedule` for a plan; its `origin` says how it is made again for other numbers of microbatches.

    `costs` are those of its stages. The order itself is written out where its origin does not make exactly
    it; `with_orders` decides otherwise. Raises PlanError for two copies of the model, which nothing executes.
    """
    if schedule.routes is not None:
        raise PlanError("routes: a schedule with two copies of the model can only be simulated")
    origin = schedule.origin
    family, is_inserted = origin.get("family"), bool(origin.get("inserted"))
    if isinstance(family, Mapping) and "inserted" in family:
        # As a file has it.
        is_inserted = is_inserted or bool(family["inserted"])
        family = {name: value for name, value in family.items() if name != "inserted"}
    # A search that started from a named schedule and improved it says {"start": ...}: no parameters.
    known = isinstance(family, Mapping) and set(family) == set(Family.json_keys())
    exact = not schedule.pairs and not is_inserted and (known or origin.get("name") is not None)
    orders = None
    if with_orders or (with_orders is None and not exact):
        orders = tuple(map(tuple, entry_texts(schedule)))
    return CustomSchedule(
        placement=schedule.placement,
        profile=profile_of(costs, memory_limit_bytes=memory_limit_bytes),
        named=None if known else origin.get("name"),
        group=None if known else origin.get("group"),
        family=dict(family) if known and isinstance(family, Mapping) else None,
        orders=orders,
    )


def profile_of(costs: StageCosts, *, memory_limit_bytes: FloatArray | None = None) -> StageProfile:
    """Stage costs as plain data."""
    values: dict[str, Any] = {name: tuple(getattr(costs, name).tolist()) for name in PER_STAGE}
    finite = memory_limit_bytes is not None and bool(np.isfinite(memory_limit_bytes).all())
    limits = tuple(memory_limit_bytes.tolist()) if finite and memory_limit_bytes is not None else None
    return StageProfile(**values, held_fraction=float(costs.held_fraction), memory_limit_bytes=limits)


@dataclass(frozen=True, slots=True)
class RelativeCosts:
    """Stage costs whose times and bytes have no unit: each is in proportion to the others of its kind.

    `ratios` serve to compare and to generate orders; `scaled` makes seconds and bytes of them.
    """

    ratios: StageCosts

    def scaled(self, *, unit_s: float, unit_bytes: float = 1.0) -> StageCosts:
        """The costs in seconds and bytes, where a time of 1 is `unit_s` and a size of 1 is `unit_bytes`."""
        times = {name: getattr(self.ratios, name) * unit_s for name in PER_STAGE if name.endswith("_s")}
        return replace(self.ratios, **times, activation_bytes=self.ratios.activation_bytes * unit_bytes)


def relative_costs(choice: CustomSchedule) -> RelativeCosts:
    """The stage costs that a plan carries: a search weighs layers by their FLOPs."""
    arrays = {name: np.array(getattr(choice.profile, name), dtype=np.float64) for name in PER_STAGE}
    return RelativeCosts(
        StageCosts(
            device_of_stage=np.array(choice.placement, dtype=np.int64),
            held_fraction=choice.profile.held_fraction,
            **arrays,
        )
    )


def family_of(choice: CustomSchedule) -> Family | None:
    """The parameters of the family, or None. Raises PlanError for parameters that are none."""
    if choice.family is None:
        return None
    try:
        family = Family.from_json(choice.family)
        chunks = len(choice.placement) // choice.num_devices
        lengths = {len(getattr(family, name)) for name in PER_CHUNK}
        known = all(isinstance(getattr(family, name), int | float) for name in SCALARS)
        if lengths != {chunks} or not known or len(family.full_backward) not in (0, len(choice.placement)):
            raise PlanError(f"schedule.custom.family: needs numbers, and lists of {chunks} for the chunks")
    except (TypeError, ValueError) as error:
        raise PlanError(f"schedule.custom.family: {error}") from error
    return family


def origin_words(choice: CustomSchedule) -> str | None:
    """The parameters of the family that made an order, in words; None for a named schedule as it is.

    Where moves of single actions came after them, they are where these moves began.
    """
    if choice.family is None and (choice.named is not None and choice.orders is None):
        return None
    words = [f"placement {kind_of(choice.placement, num_devices=choice.num_devices)}"]
    family = None
    with suppress(PlanError):  # a written order needs no parameters, whatever a file says beside it
        family = family_of(choice)
    if family is not None:
        waiting = "any number of" if math.isinf(family.w_limit) else f"at most {family.w_limit:.4g}"
        words += [
            "slack unlimited" if math.isinf(family.slack) else f"slack {family.slack:.4g}",
            f"{waiting} weight gradients wait",
        ]
        if not math.isinf(family.memory_cap):
            words.append(f"memory cap {family.memory_cap:.4g} microbatches")
    elif choice.named is not None:
        words.append(f"begun from {choice.named}")
    if choice.orders is not None:
        words.append("single actions moved" if family or choice.named else "written out")
    return ", ".join(words)


def written_of(choice: CustomSchedule, *, num_microbatches: int) -> Schedule | None:
    """The order that is written out, for the plan's own number of microbatches, or None."""
    if choice.orders is None:
        return None
    rows = [
        parse_entries(row, num_stages=len(choice.placement), num_microbatches=num_microbatches)
        for row in choice.orders
    ]
    return Schedule(
        num_devices=choice.num_devices,
        num_microbatches=num_microbatches,
        placement=choice.placement,
        orders=tuple(order for order, _ in rows),
        pairs=tuple(pairs for _, pairs in rows) if choice.has_pairs else (),
    )


def generated(choice: ScheduleChoice, *, layout: Layout, num_microbatches: int) -> Schedule:
    """The schedule that a plan names, or that its parameters of the family make, for any microbatches.

    Raises PlanError for parameters that are not the family's.
    """
    custom = choice.custom
    if custom is None:
        return named(
            choice.name,
            num_devices=layout.pipeline_parallel,
            num_microbatches=num_microbatches,
            num_chunks=layout.virtual_stages if layout.virtual_stages > 1 else None,
            group=choice.group,
        )
    limits = custom.profile.memory_limit_bytes
    return made(
        relative_costs(custom).ratios,
        num_microbatches,
        name=custom.named,
        group=custom.group,
        family=family_of(custom),
        memory_limit_bytes=None if limits is None else np.array(limits, dtype=np.float64),
    )


def made(
    costs: StageCosts,
    num_microbatches: int,
    *,
    name: str | None,
    group: int | None,
    family: Family | None,
    memory_limit_bytes: FloatArray | None,
) -> Schedule:
    """The named schedule on the stages of `costs`, or the one that the parameters make of them.

    Some sizes are refused, and some groups deadlock: the parameters, or `plain_family` without any, take the
    place of the name then.
    """
    placement = tuple(costs.device_of_stage.tolist())
    num_devices = max(placement) + 1
    if name is not None:
        with suppress(QuartetError):
            schedule = named(
                name,
                num_devices=num_devices,
                num_microbatches=num_microbatches,
                num_chunks=len(placement) // num_devices,
                group=group,
            )
            validate(schedule)
            return schedule
    return generate(
        family or plain_family(placement, num_devices=num_devices),
        costs,
        num_microbatches,
        memory_limit_bytes=memory_limit_bytes,
    )
