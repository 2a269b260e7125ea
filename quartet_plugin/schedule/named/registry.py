"""Every schedule that has a name: its requirements, and the rule that makes its order.

Orders depend on the numbers of devices, microbatches and chunks alone, never on costs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.costs import IntArray
from quartet_plugin.model.schema import nearest_word
from quartet_plugin.schedule import placement as places
from quartet_plugin.schedule.action import MAX_ACTIONS, MAX_MICROBATCHES
from quartet_plugin.schedule.named import blocks, keyed, rules
from quartet_plugin.schedule.named.rules import Phase, order_of_slots, slots_of
from quartet_plugin.schedule.placement import PlacementKind
from quartet_plugin.schedule.schedule import Schedule

DeviceOrders = Sequence[IntArray]
# The orders, and the indices of the forwards of pairs.
PairedOrders = tuple[DeviceOrders, DeviceOrders]


class Sizes(NamedTuple):
    """What an order depends on: p devices, m microbatches, v chunks a device, microbatches a group."""

    p: int
    m: int
    v: int
    group: int


class Offer(StrEnum):
    """Whether a tuning run tries a schedule."""

    STOCK = "stock"  # what an unmodified framework runs
    DEFAULT = "default"  # without being requested
    REQUESTED = "requested"  # on request only: it holds every microbatch, or another is never worse
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSchedule:
    """What one named schedule needs.

    `make` writes one order a device, `make_paired` one with overlapped pairs, None where the schedule has
    none. `num_chunks` is the legal number of stages a device, None for any number from 2. `has_group`: takes
    a group size. `split_backward`: uses I and W. `copies` of the model it carries; two-copy schedules can
    only be simulated (`executable` is False), their parameters count twice. `requirement` says in words which
    sizes it needs where it does not exist for some. `offer` is whether a tuning run tries it.
    """

    name: str
    placement: PlacementKind
    make: Callable[[Sizes], DeviceOrders]
    make_paired: Callable[[Sizes], PairedOrders] | None = None
    num_chunks: int | None = 1
    has_group: bool = False
    split_backward: bool = False
    copies: int = 1
    even_chunks: bool = False
    requirement: Callable[[int, int], str | None] = lambda p, m: None  # noqa: ARG005
    offer: Offer = Offer.NEVER

    @property
    def default_num_chunks(self) -> int:
        """Stages a device where none are asked for."""
        return self.num_chunks or 2

    @property
    def executable(self) -> bool:
        """Whether a runtime for one copy of the model can run it."""
        return self.copies == 1


def _phased(rule: Callable[[int, int, int], list[Phase]]) -> Callable[[Sizes], DeviceOrders]:
    """Orders from phases of chunks that go to and fro."""

    def make(size: Sizes) -> DeviceOrders:
        stages = places.stages_of_device(places.snake(size.p, size.v), size.p)
        return [
            order_of_slots(slots_of(rule(size.p, size.m, d)), stages=stages[d], num_microbatches=size.m)
            for d in range(size.p)
        ]

    return make


def _looped(rule: Callable[[int, int, int, int, int], IntArray]) -> Callable[[Sizes], DeviceOrders]:
    """Orders from slots of chunks that all go the same way."""

    def make(size: Sizes) -> DeviceOrders:
        p, m, v, group = size
        stages = places.stages_of_device(places.loop(p, v), p)
        return [
            order_of_slots(rule(p, m, d, v, group), stages=stages[d], num_microbatches=m) for d in range(p)
        ]

    return make


def _dual_pipe_v_paired(size: Sizes) -> PairedOrders:
    pairs = [rules.pairs_of(rules.dual_phases(size.p, size.m, d)) for d in range(size.p)]
    return _phased(rules.dual_phases)(size), pairs


def _interleaved_paired(size: Sizes) -> PairedOrders:
    p, m, v, group = size
    stages = places.stages_of_device(places.loop(p, v), p)
    slots = [rules.interleaved_pairs(p, m, d, v, group) for d in range(p)]
    orders = [order_of_slots(row, stages=stages[d], num_microbatches=m) for d, (row, _) in enumerate(slots)]
    return orders, [pairs for _, pairs in slots]


def _dual_pipe_paired(size: Sizes) -> PairedOrders:
    p, half_m = size.p, size.m // 2
    phases = [rules.dual_phases(p // 2, half_m, min(device, p - 1 - device)) for device in range(p)]
    return _dual_pipe(size), [rules.pairs_of(each) for each in phases]


def _dual_pipe(size: Sizes) -> DeviceOrders:
    p, m = size.p, size.m
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


# One row a schedule that runs on every placement of its shape, in the order that users see them.
_LINEAR = partial(NamedSchedule, placement=PlacementKind.LINEAR)
_LOOP = partial(NamedSchedule, placement=PlacementKind.LOOP, num_chunks=None)
_V = partial(NamedSchedule, placement=PlacementKind.V, num_chunks=2, split_backward=True)
_TWO_COPIES = partial(_LINEAR, copies=2)
_ALL = (
    _LINEAR(name="gpipe", make=_phased(rules.gpipe), offer=Offer.REQUESTED),
    _LINEAR(name="1f1b", make=_phased(rules.one_f_one_b), offer=Offer.STOCK),
    _LOOP(
        name="interleaved",
        make=_looped(rules.interleaved),
        make_paired=_interleaved_paired,
        has_group=True,
        offer=Offer.STOCK,
    ),
    _LOOP(name="breadth-first", make=_looped(rules.breadth_first), offer=Offer.REQUESTED),
    _LINEAR(name="zb-h1", make=_phased(rules.zb_h1), split_backward=True, offer=Offer.DEFAULT),
    _LINEAR(name="zb-h2", make=_phased(rules.zb_h2), split_backward=True, offer=Offer.DEFAULT),
    _LOOP(name="zb-interleaved", make=_looped(rules.zb_interleaved), has_group=True, split_backward=True),
    _V(name="zb-v", make=_phased(rules.zb_v), offer=Offer.DEFAULT),
    _V(name="v-half", make=lambda size: blocks.v_half(size.p, size.m), offer=Offer.DEFAULT),
    _V(name="v-min", make=lambda size: blocks.v_min(size.p, size.m), offer=Offer.DEFAULT),
    _V(
        name="dualpipev",
        make=_phased(rules.dual_phases),
        make_paired=_dual_pipe_v_paired,
        requirement=_at_least_2p,
        offer=Offer.REQUESTED,
    ),
    NamedSchedule(
        name="hanayo",
        placement=PlacementKind.SNAKE,
        make=lambda size: keyed.hanayo(size.p, size.m, size.v),
        num_chunks=None,
        even_chunks=True,
    ),
    _TWO_COPIES(name="chimera", make=lambda size: keyed.chimera(size.p, size.m), requirement=_even_both),
    _TWO_COPIES(
        name="dualpipe",
        make=_dual_pipe,
        make_paired=_dual_pipe_paired,
        split_backward=True,
        requirement=_dual,
    ),
    _TWO_COPIES(name="mixpipe", make=lambda size: keyed.mix_pipe(size.p, size.m), requirement=_even_both),
)
NAMED = MappingProxyType({schedule.name: schedule for schedule in _ALL})


def lookup(name: str) -> NamedSchedule:
    """The named schedule; raises ConfigError with all names for an unknown one."""
    if name not in NAMED:
        near = nearest_word(name, known=NAMED)
        raise ConfigError(f"schedule {name[:40]!r}; expected one of {', '.join(NAMED)}{near}")
    return NAMED[name]


def refusal_of(
    name: str,
    *,
    num_devices: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    group: int | None = None,
) -> str | None:
    """Why `name` cannot be made for these sizes, or None."""
    spec = lookup(name)
    if num_devices < 1 or not 1 <= num_microbatches <= MAX_MICROBATCHES:
        return f"{num_devices} devices and {num_microbatches} microbatches; need 1 or more of each"
    count = spec.default_num_chunks if num_chunks is None else num_chunks
    if spec.num_chunks and count != spec.num_chunks:
        return f"chunks: {count} with {name}; it has exactly {spec.num_chunks} a device"
    if not spec.num_chunks and (count < 2 or (spec.even_chunks and count % 2)):
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
    num_chunks: int | None = None,
    group: int | None = None,
    with_pairs: bool = False,
) -> Schedule:
    """The named schedule's order, without a split.

    `num_chunks`: stages a device (the schedule's own default when None). `group`: microbatches a chunk before
    the next chunk, for the interleaved ones; num_devices when None. `with_pairs`: the order with the
    overlapped pairs that it is known with. Raises ConfigError for an unknown name, for sizes the schedule
    does not exist for, and where `with_pairs` asks for pairs of a schedule without them. An interleaved order
    with a group below num_devices may block; as for any order, a simulation shows it.
    """
    spec = lookup(name)
    if with_pairs and spec.make_paired is None:
        known = ", ".join(known.name for known in _ALL if known.make_paired is not None)
        raise ConfigError(f"schedule {name!r}: it has no overlapped pairs; schedules with pairs: {known}")
    reason = refusal_of(
        name, num_devices=num_devices, num_microbatches=num_microbatches, num_chunks=num_chunks, group=group
    )
    if reason is not None:
        raise ConfigError(reason)
    count = spec.default_num_chunks if num_chunks is None else num_chunks
    size = Sizes(num_devices, num_microbatches, count, num_devices if group is None else group)
    pairs: DeviceOrders = ()
    if with_pairs and spec.make_paired is not None:
        orders, pairs = spec.make_paired(size)
    else:
        orders = spec.make(size)
    half = size.m // 2
    return Schedule(
        num_devices=size.p,
        num_microbatches=size.m,
        placement=places.build(spec.placement, num_devices=size.p, num_chunks=size.v),
        orders=tuple(orders),
        origin={"name": spec.name} | ({"group": size.group} if spec.has_group else {}),
        routes=None if spec.executable else keyed.two_routes(size.p),
        route_of_microbatch=None if spec.executable else (0,) * half + (1,) * half,
        pairs=tuple(pairs) if any(map(len, pairs)) else (),
    )
