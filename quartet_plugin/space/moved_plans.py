"""The parameters of a plan whose layers or slots are moved, everything else as it was."""

from quartet_plugin.model.custom_schedule import CustomSchedule
from quartet_plugin.model.plan import Mapping, Plan
from quartet_plugin.space.choices import doubling
from quartet_plugin.space.config import SEARCHED
from quartet_plugin.space.order_exchanges import EXCHANGES, NO_RUN, RUN, encoded_order
from quartet_plugin.space.param_sources import (
    SPLIT_EMBEDDING,
    SPLIT_HEAD,
    SPLIT_MTP,
    FixedParams,
    Params,
    degree_label,
)
from quartet_plugin.space.plan_space import Space, schedule_param
from quartet_plugin.space.searched_orders import ORDER, order_text
from quartet_plugin.space.split_shifts import (
    SPLIT_OF_TWO,
    decoded_end_loads,
    lone_head_load_of,
    origin_split,
    shift_params,
    stages_of_layers,
)
from quartet_plugin.split.layers import end_loads_for_split
from quartet_plugin.split.shifts import shifts_between


def moved(
    space: Space, params: Params, plan: Plan, *, split: tuple[int, ...], mapping: Mapping
) -> tuple[Params, Plan] | None:
    """The parameters and the plan with this split and mapping; None where the space does not hold it.

    `params` lead to `plan`. The order of a custom schedule is made for the new split.
    """
    new: dict[str, str | int | float] = dict(params)
    if split != plan.split.transformer_layers_per_stage:
        new.pop(ORDER, None)
        if not _move_layers(space, new, plan, split):
            return None
    if mapping != plan.mapping and not _move_slots(space, new, plan, mapping):
        return None
    try:
        made = space.decode(FixedParams(new), trial=0)
    except KeyError:
        return None
    if made.split.transformer_layers_per_stage != split or made.mapping != mapping:
        return None
    return new, made


def with_order(
    space: Space, params: Params, plan: Plan, *, custom: CustomSchedule | None
) -> tuple[Params, Plan] | None:
    """The parameters and the plan with this order under its split; None where the space does not hold it.

    `params` lead to `plan`, but for its split. Without an order the one for costs by FLOPs is searched.
    """
    names = space.schedules_of(plan.layout, shape=plan.shape)
    if SEARCHED not in names or (len(names) > 1 and schedule_param(names) not in params):
        return None
    new: dict[str, str | int | float] = dict(params)
    new.pop(ORDER, None)
    if custom is not None:
        new[ORDER] = order_text(custom)
    if len(names) > 1:
        new[schedule_param(names)] = SEARCHED
    split = plan.split.transformer_layers_per_stage
    is_free = space.fixed_splits(plan.shape, plan.layout) is None
    if is_free and not _move_layers(space, new, plan, split, schedule=SEARCHED):
        return None
    try:
        made = space.decode(FixedParams(new), trial=0)
    except KeyError:
        return None
    return (new, made) if made.split == plan.split else None


def _move_layers(
    space: Space,
    params: dict[str, str | int | float],
    plan: Plan,
    split: tuple[int, ...],
    *,
    schedule: str | None = None,
) -> bool:
    """Set the parameters of a split; `schedule` is a custom one's name where it is not the plan's."""
    fixed = space.fixed_splits(plan.shape, plan.layout, is_mtp_before_last=bool(plan.split.mtp_before_last))
    if fixed is not None:
        labels = ["+".join(map(str, counts)) for counts in fixed]
        if split not in fixed or len(labels) == 1:
            return False
        params[f"split[{','.join(labels)}]"] = labels[fixed.index(split)]
        return True
    if SPLIT_EMBEDDING not in params:
        return False  # a file says the split, or there is one alone
    num_layers, num_stages = plan.shape.num_layers, len(stages_of_layers(plan.split))
    lone_head_load, split = lone_head_load_of(plan), split[:num_stages]
    if sum(split) != num_layers:
        return False  # a layer beside a head that has its stage alone
    last = SPLIT_HEAD if lone_head_load is None else SPLIT_MTP
    if num_stages == 2:
        is_custom = schedule is not None or plan.schedule.custom is not None
        end_loads = end_loads_for_split(split, num_devices=2)
        if end_loads is not None:
            params[SPLIT_EMBEDDING], params[last] = (
                end_loads.embedding / num_layers,
                end_loads.head / num_layers,
            )
        if is_custom:
            # Without it the split would be chosen together with the order.
            params[SPLIT_OF_TWO] = "+".join(map(str, split))
        return is_custom or end_loads is not None
    shares = float(params[SPLIT_EMBEDDING]), float(params[last])
    end_loads = decoded_end_loads(shares, num_layers, lone_head_load=lone_head_load)
    if schedule is not None:
        end_loads = end_loads.rounded()
    elif plan.schedule.custom is not None:
        schedule = space.schedule_name(params, plan)
        end_loads = end_loads.rounded()
    origin = origin_split(plan, schedule=schedule, end_loads=end_loads)[:num_stages]
    shifts = shifts_between(origin, split)
    _drop(params, "split.", kept=(SPLIT_EMBEDDING, last))
    # Without shifts a custom schedule's split would be chosen together with its order.
    params |= shift_params(shifts if any(shifts) or schedule is not None else None, origin)
    return True


def _move_slots(space: Space, params: dict[str, str | int | float], plan: Plan, mapping: Mapping) -> bool:
    layout = plan.layout
    orders, lengths = space.orders_of(layout), space.run_lengths_of(layout)
    encoded = encoded_order(mapping, orders=orders, lengths=lengths)
    if encoded is None:
        return False
    _drop(params, "mapping.", kept=())
    if len(orders) > 1:
        params[f"mapping[{degree_label(layout)}]"] = encoded.name
    if not lengths:
        return True
    texts = (NO_RUN, *map(str, lengths))
    params[f"{RUN}[{','.join(texts)}]"] = NO_RUN if encoded.length is None else str(encoded.length)
    if encoded.length is None:
        return True
    num_runs = layout.world_size // encoded.length
    numbers = doubling(num_runs - 1)
    number = next(text for text in numbers if int(text) >= len(encoded.pairs))
    if len(numbers) > 1:
        params[f"{EXCHANGES}[{','.join(numbers)}]"] = number
    for index in range(int(number)):
        first, second = encoded.pairs[index] if index < len(encoded.pairs) else (0, 0)
        params[f"mapping.{index}.first[{num_runs}]"] = first
        params[f"mapping.{index}.second[{num_runs}]"] = second
    return True


def _drop(params: dict[str, str | int | float], prefix: str, *, kept: tuple[str, ...]) -> None:
    for name in [name for name in params if name.startswith(prefix) and name not in kept]:
        del params[name]
