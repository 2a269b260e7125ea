"""Every schedule that has a name: what it needs, and how its order is made.

Orders depend on the numbers of devices, microbatches and chunks alone, never on costs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.costs import IntArray
from quartet_plugin.schedule import placement as places
from quartet_plugin.schedule.action import MAX_ACTIONS, MAX_MICROBATCHES
from quartet_plugin.schedule.named import keyed, rules
from quartet_plugin.schedule.named.phases import Phase, order_of_slots, slots_of
from quartet_plugin.schedule.placement import PlacementKind
from quartet_plugin.schedule.schedule import Schedule

Orders = Sequence[IntArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSchedule:
    """What one named schedule needs.

    `chunks` are the legal numbers of stages a device, empty for any number from 2. `has_group`: takes a
    group size. `split_backward`: uses I and W. `copies` of the model it carries; two-copy schedules can
    only be simulated (`executable` is False), their parameters count twice.
    """

    name: str
    placement: PlacementKind
    make: Callable[[int, int, int, int], Orders]
    chunks: tuple[int, ...] = (1,)
    default_chunks: int = 1
    has_group: bool = False
    split_backward: bool = False
    copies: int = 1
    even_chunks: bool = False
    requirement: Callable[[int, int], str | None] = lambda p, m: None  # noqa: ARG005

    @property
    def executable(self) -> bool:
        """Whether a runtime for one copy of the model can run it."""
        return self.copies == 1


def _phased(
    rule: Callable[[int, int, int], list[Phase]], num_chunks: int
) -> Callable[[int, int, int, int], Orders]:
    def make(p: int, m: int, v: int, group: int) -> Orders:  # noqa: ARG001
        stages = places.stages_of_device(places.snake(p, num_chunks), p)
        return [
            order_of_slots(slots_of(rule(p, m, d)), stages=stages[d], num_microbatches=m) for d in range(p)
        ]

    return make


def _looped(rule: Callable[..., IntArray], *, grouped: bool) -> Callable[[int, int, int, int], Orders]:
    def make(p: int, m: int, v: int, group: int) -> Orders:
        stages = places.stages_of_device(places.loop(p, v), p)
        extra = (group,) if grouped else ()
        return [
            order_of_slots(rule(p, m, d, v, *extra), stages=stages[d], num_microbatches=m) for d in range(p)
        ]

    return make


def _dual_pipe(p: int, m: int, v: int, group: int) -> Orders:  # noqa: ARG001
    orders = []
    for device in range(p):
        half = min(device, p - 1 - device)
        near = (device, (0, m // 2))
        far = (p - 1 - device, (m // 2, m // 2))
        lanes = (near, far) if device < p // 2 else (far, near)
        orders.append(
            order_of_slots(
                slots_of(rules.dual_phases(p // 2, m // 2, half)),
                stages=[stage for stage, _ in lanes],
                num_microbatches=m,
                ranges=[span for _, span in lanes],
            )
        )
    return orders


def _at_least_2p(p: int, m: int) -> str | None:
    return None if m >= 2 * p else f"at least {2 * p} microbatches on {p} devices"


def _even_both(p: int, m: int) -> str | None:
    return None if p % 2 == 0 and m % 2 == 0 else "an even number of devices and of microbatches"


def _dual(p: int, m: int) -> str | None:
    return _even_both(p, m) or _at_least_2p(p, m)


_ALL = (
    NamedSchedule(name="gpipe", placement=PlacementKind.LINEAR, make=_phased(rules.gpipe, 1)),
    NamedSchedule(name="1f1b", placement=PlacementKind.LINEAR, make=_phased(rules.one_f_one_b, 1)),
    NamedSchedule(
        name="interleaved",
        placement=PlacementKind.LOOP,
        make=_looped(rules.interleaved, grouped=True),
        chunks=(),
        default_chunks=2,
        has_group=True,
    ),
    NamedSchedule(
        name="breadth-first",
        placement=PlacementKind.LOOP,
        make=_looped(rules.breadth_first, grouped=False),
        chunks=(),
        default_chunks=2,
    ),
    NamedSchedule(
        name="zb-h1", placement=PlacementKind.LINEAR, make=_phased(rules.zb_h1, 1), split_backward=True
    ),
    NamedSchedule(
        name="zb-h2", placement=PlacementKind.LINEAR, make=_phased(rules.zb_h2, 1), split_backward=True
    ),
    NamedSchedule(
        name="zb-interleaved",
        placement=PlacementKind.LOOP,
        make=_looped(rules.zb_interleaved, grouped=True),
        chunks=(),
        default_chunks=2,
        has_group=True,
        split_backward=True,
    ),
    NamedSchedule(
        name="zb-v",
        placement=PlacementKind.V,
        make=_phased(rules.zb_v, 2),
        chunks=(2,),
        default_chunks=2,
        split_backward=True,
    ),
    NamedSchedule(
        name="v-half",
        placement=PlacementKind.V,
        make=lambda p, m, v, group: keyed.v_half(p, m),  # noqa: ARG005
        chunks=(2,),
        default_chunks=2,
        split_backward=True,
    ),
    NamedSchedule(
        name="v-min",
        placement=PlacementKind.V,
        make=lambda p, m, v, group: keyed.v_min(p, m),  # noqa: ARG005
        chunks=(2,),
        default_chunks=2,
        split_backward=True,
    ),
    NamedSchedule(
        name="dualpipev",
        placement=PlacementKind.V,
        make=_phased(rules.dual_pipe_v, 2),
        chunks=(2,),
        default_chunks=2,
        split_backward=True,
        requirement=_at_least_2p,
    ),
    NamedSchedule(
        name="hanayo",
        placement=PlacementKind.SNAKE,
        make=lambda p, m, v, group: keyed.hanayo(p, m, v),  # noqa: ARG005
        chunks=(),
        default_chunks=2,
        even_chunks=True,
    ),
    NamedSchedule(
        name="chimera",
        placement=PlacementKind.LINEAR,
        make=lambda p, m, v, group: keyed.chimera(p, m),  # noqa: ARG005
        copies=2,
        requirement=_even_both,
    ),
    NamedSchedule(
        name="dualpipe",
        placement=PlacementKind.LINEAR,
        make=_dual_pipe,
        copies=2,
        split_backward=True,
        requirement=_dual,
    ),
    NamedSchedule(
        name="mixpipe",
        placement=PlacementKind.LINEAR,
        make=lambda p, m, v, group: keyed.mix_pipe(p, m),  # noqa: ARG005
        copies=2,
        requirement=_even_both,
    ),
)
NAMED = MappingProxyType({schedule.name: schedule for schedule in _ALL})


def lookup(name: str) -> NamedSchedule:
    """The named schedule; raises ConfigError with all names for an unknown one."""
    if name not in NAMED:
        raise ConfigError(f"schedule {name[:40]!r}; expected one of {', '.join(NAMED)}")
    return NAMED[name]


def refusal_of(
    name: str, *, num_devices: int, num_microbatches: int, chunks: int | None = None, group: int | None = None
) -> str | None:
    """Why `name` cannot be made for these sizes, or None."""
    spec = lookup(name)
    if num_devices < 1 or not 1 <= num_microbatches <= MAX_MICROBATCHES:
        return f"{num_devices} devices and {num_microbatches} microbatches; need 1 or more of each"
    count = spec.default_chunks if chunks is None else chunks
    if spec.chunks and count not in spec.chunks:
        return f"chunks: {count} with {name}; it has exactly {spec.chunks[0]} a device"
    if not spec.chunks and (count < 2 or (spec.even_chunks and count % 2)):
        return (
            f"chunks: {count} with {name}; it needs {'an even number' if spec.even_chunks else '2 or more'}"
        )
    if group is not None and (not spec.has_group or group < 1):
        return f"group: {group} with {name}; " + (
            "it must be 1 or more" if spec.has_group else "only interleaved and zb-interleaved take one"
        )
    if num_devices * count * num_microbatches * 3 > MAX_ACTIONS:
        return f"{num_devices} devices x {count} chunks x {num_microbatches} microbatches; too many actions"
    need = spec.requirement(num_devices, num_microbatches)
    return None if need is None else f"{name} with {num_microbatches} microbatches; it needs {need}"


def named(
    name: str,
    *,
    num_devices: int,
    num_microbatches: int,
    chunks: int | None = None,
    group: int | None = None,
) -> Schedule:
    """The named schedule's order, without a split.

    `chunks`: stages a device (the schedule's own default when None). `group`: microbatches a chunk before
    the next chunk, for the interleaved ones; num_devices when None. Raises ConfigError for an unknown name
    and for sizes the schedule does not exist for. Whether an interleaved order can run with a group below
    num_devices is found by simulating it, as for any other order.
    """
    spec = lookup(name)
    reason = refusal_of(
        name, num_devices=num_devices, num_microbatches=num_microbatches, chunks=chunks, group=group
    )
    if reason is not None:
        raise ConfigError(reason)
    count = spec.default_chunks if chunks is None else chunks
    size = num_devices if group is None else group
    orders = spec.make(num_devices, num_microbatches, count, size)
    placement = places.build(spec.placement, num_devices=num_devices, num_chunks=count)
    origin = {"name": name} | ({"group": size} if spec.has_group else {})
    if spec.copies == 1:
        return Schedule(
            num_devices=num_devices,
            num_microbatches=num_microbatches,
            placement=placement,
            orders=tuple(orders),
            origin=origin,
        )
    half = num_microbatches // 2
    return Schedule(
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        placement=placement,
        orders=tuple(orders),
        origin=origin,
        routes=keyed.two_routes(num_devices),
        route_of_microbatch=(0,) * half + (1,) * half,
    )
