"""The parameters of a free split: shifts of the stage boundaries of the split that two end loads balance.

`split.shift` is the most layers by which a boundary is shifted, a power of two; 0 keeps the balanced split
and opens no other parameter. A pipeline of two stages has no shifts: its end loads alone make every split of
a stock schedule. Under a custom one, whose split is made together with its order, a text may say the split.
"""

from collections.abc import Sequence

from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.space.choices import ParamSource, choose, doubling
from quartet_plugin.space.schedules import placement_of
from quartet_plugin.split.layers import (
    EndLoads,
    end_loads_for_split,
    flops_end_loads,
    is_legal_split,
    split_for_end_loads,
)
from quartet_plugin.split.shifts import greatest_shift, shifted_split, shifts_between

SHIFT = "split.shift"
NO_SHIFT = "0"
# The name of a trial's attribute that has the split of two stages: no sampler chooses it.
SPLIT_OF_TWO = "split.layers"

type Shifts = tuple[int, ...]


def choose_split(
    source: ParamSource, origin: Sequence[int], *, is_mtp_before_last: bool = False
) -> tuple[int, ...] | None:
    """`origin` with the shifts of the source; None where it shifts nothing.

    With multi-token prediction on the stage before the last one, the last stage keeps no layer.
    """
    if is_mtp_before_last:
        moved = choose_split(source, origin[:-1])
        return None if moved is None else (*moved, 0)
    if len(origin) < 3:
        return None
    choices = _choices(origin)
    limit = int(choose(source, f"{SHIFT}[{','.join(choices)}]", choices))
    if not limit:
        return None
    names = (f"split.{k}[{limit}]" for k in range(1, len(origin)))
    return shifted_split(origin, [source.integer(name, -limit, limit) for name in names])


def stated_split(source: ParamSource, num_layers: int) -> tuple[int, ...] | None:
    """The split of two stages that the source's text says; None without one.

    Raises KeyError for a text that is no split of this number of layers.
    """
    text = source.attribute(SPLIT_OF_TWO)
    if text is None:
        return None
    counts = text.split("+")
    if not all(count.isascii() and count.isdigit() for count in counts):
        raise KeyError(SPLIT_OF_TWO)
    split = tuple(map(int, counts))
    if not is_legal_split(split, num_layers=num_layers, num_stages=2):
        raise KeyError(SPLIT_OF_TWO)
    return split


def shift_limit(shifts: Shifts | None, choices: Sequence[str]) -> str:
    """The least of the choices of `split.shift` that holds the shifts; None stands for no shifts."""
    if shifts is None:
        return NO_SHIFT
    greatest = max(1, *map(abs, shifts))
    return next(choice for choice in choices if int(choice) >= greatest)


def shift_params(shifts: Shifts | None, origin: Sequence[int]) -> dict[str, str | int]:
    """The parameters under which `choose_split` shifts `origin` so; None stands for no shifts."""
    if len(origin) < 3:
        return {}
    choices = _choices(origin)
    limit = shift_limit(shifts, choices)
    params: dict[str, str | int] = {f"{SHIFT}[{','.join(choices)}]": limit}
    if shifts is not None:
        params |= {f"split.{k}[{limit}]": shift for k, shift in enumerate(shifts, start=1)}
    return params


def origin_split(plan: Plan, *, schedule: str | None, end_loads: EndLoads) -> tuple[int, ...]:
    """The split that shifts begin from; `schedule` names a custom schedule, None the stock one."""
    layout = plan.layout
    placement = None
    if schedule is not None:
        placement = placement_of(
            schedule, num_devices=layout.pipeline_parallel, num_chunks=layout.virtual_stages
        )
    return split_for_end_loads(
        plan.shape.num_layers,
        num_devices=layout.pipeline_parallel,
        num_chunks=layout.virtual_stages,
        end_loads=end_loads,
        placement=placement,
    )


def encoded_split(plan: Plan) -> tuple[EndLoads, Shifts | None]:
    """End loads and shifts that make a stock schedule's split: no shifts where the end loads alone do."""
    split, num_layers = stages_of_layers(plan.split), plan.shape.num_layers
    lone_head_load = lone_head_load_of(plan)
    if len(split) < 3:
        end_loads = end_loads_for_split(split, num_devices=len(split)) or EndLoads()
        if lone_head_load is not None:
            end_loads = EndLoads(embedding=end_loads.embedding, head=lone_head_load, mtp=end_loads.head)
        return end_loads, None
    best: tuple[EndLoads, Shifts] | None = None
    usual = sum(split[1:-1]) / (len(split) - 2)
    ends = usual - split[0], usual - split[-1]
    by_flops = flops_end_loads(
        plan.shape, mtp_layers=plan.made_for.mtp_layers, is_mtp_before_last=lone_head_load is not None
    )
    by_counts = EndLoads(embedding=ends[0], head=ends[1])
    if lone_head_load is not None:
        by_counts = EndLoads(embedding=ends[0], head=lone_head_load, mtp=ends[1])
    for guess in (by_flops, EndLoads(), by_counts):
        shares = encoded_end_loads(guess, num_layers)
        end_loads = decoded_end_loads(shares, num_layers, lone_head_load=lone_head_load)
        origin = origin_split(plan, schedule=None, end_loads=end_loads)
        shifts = shifts_between(origin[: len(split)], split)
        if not any(shifts):
            return end_loads, None
        if best is None or sum(map(abs, shifts)) < sum(map(abs, best[1])):
            best = end_loads, shifts
    assert best is not None
    return best


def encoded_custom_split(plan: Plan, *, schedule: str) -> tuple[EndLoads, Shifts | None]:
    """End loads and shifts that make the split of a plan under the order of a custom schedule.

    The end loads are those by FLOPs; of two stages those that alone make the split, where some do.
    """
    split, layout, num_layers = plan.split.transformer_layers_per_stage, plan.layout, plan.shape.num_layers
    alone = end_loads_for_split(split, num_devices=layout.pipeline_parallel) if len(split) < 3 else None
    if alone is not None:
        return alone, None
    by_flops = flops_end_loads(plan.shape, mtp_layers=plan.made_for.mtp_layers)
    end_loads = decoded_end_loads(encoded_end_loads(by_flops, num_layers), num_layers)
    shifts = (
        encoded_shifts(plan, schedule=schedule, end_loads=end_loads.rounded()) if len(split) > 2 else None
    )
    return end_loads, shifts


def encoded_shifts(plan: Plan, *, schedule: str, end_loads: EndLoads) -> Shifts:
    """The shifts that make the plan's split under a custom schedule and these end loads."""
    origin = origin_split(plan, schedule=schedule, end_loads=end_loads)
    return shifts_between(origin, plan.split.transformer_layers_per_stage)


def stages_of_layers(split: Split) -> tuple[int, ...]:
    """The layers of the stages that may have some: not of a last stage that has the head alone."""
    counts = split.transformer_layers_per_stage
    return counts[:-1] if split.mtp_before_last else counts


def lone_head_load_of(plan: Plan) -> float | None:
    """The load in layers of the plan's head where it is alone on the last stage; else None."""
    return lone_head_load_in(plan.shape, plan.made_for.mtp_layers) if plan.split.mtp_before_last else None


def lone_head_load_in(shape: ModelShape, mtp_layers: int | None) -> float:
    """The load in layers, by FLOPs, of a head that is alone on the last stage; no parameter sets it."""
    return flops_end_loads(shape, mtp_layers=mtp_layers, is_mtp_before_last=True).head


def encoded_end_loads(end_loads: EndLoads, num_layers: int) -> tuple[float, float]:
    """Embedding's and head's loads as parameters: shares of all layers, from -1 to 1.

    Where the head is alone on the last stage, the load of multi-token prediction takes the place of its own.
    """
    loads = end_loads.rounded()
    last_load = loads.head if loads.mtp is None else loads.mtp
    first, last = (min(1.0, max(-1.0, load / num_layers)) for load in (loads.embedding, last_load))
    return first, last


def decoded_end_loads(
    shares: tuple[float, float], num_layers: int, *, lone_head_load: float | None = None
) -> EndLoads:
    """The end loads of two parameters; `lone_head_load` is that of a head that is alone on the last stage."""
    first, last = shares[0] * num_layers, shares[1] * num_layers
    if lone_head_load is None:
        return EndLoads(embedding=first, head=last)
    return EndLoads(embedding=first, head=lone_head_load, mtp=last)


def _choices(origin: Sequence[int]) -> tuple[str, ...]:
    return (NO_SHIFT, *doubling(greatest_shift(sum(origin), num_stages=len(origin))))
