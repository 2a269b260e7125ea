"""The parameters of a free order of slots: exchanges of runs of slots in a named order.

`mapping.run` is the length of the runs that move, or `none`, which keeps the named order and opens no other
parameter; `mapping.exchanges` is the number of exchanges, a power of two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quartet_plugin.mapping.exchanges import Pair, exchanged, exchanges_between, run_lengths
from quartet_plugin.mapping.order_rules import OrderRules
from quartet_plugin.mapping.orders import EXHAUSTIVE_RANKS, RankOrder
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Mapping, NodeInfo
from quartet_plugin.space.choices import ParamSource, choose, doubling

RUN = "mapping.run"
EXCHANGES = "mapping.exchanges"
NO_RUN = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedOrder:
    """An order of slots by the named order it begins from, the length of the runs, and their exchanges.

    `length` is None where it is the named order itself.
    """

    name: str
    length: int | None = None
    pairs: tuple[Pair, ...] = ()


def lengths_to_choose(layout: Layout, *, nodes: Sequence[NodeInfo], rules: OrderRules) -> tuple[int, ...]:
    """The lengths of runs that a layout's free order may have; none where every order has a name."""
    if layout.world_size <= EXHAUSTIVE_RANKS:
        return ()
    return run_lengths(layout, nodes=nodes, rules=rules)


def choose_order(
    source: ParamSource,
    order: RankOrder,
    *,
    lengths: Sequence[int],
    layout: Layout,
    rules: OrderRules,
) -> Mapping:
    """The mapping of a named order after the exchanges of the source, where they break no rule."""
    if not lengths:
        return order.mapping
    texts = (NO_RUN, *map(str, lengths))
    run = choose(source, f"{RUN}[{','.join(texts)}]", texts)
    if run == NO_RUN:
        return order.mapping
    length = int(run)
    num_runs = layout.world_size // length
    numbers = doubling(num_runs - 1)
    number = int(choose(source, f"{EXCHANGES}[{','.join(numbers)}]", numbers))
    pairs = [
        (
            source.integer(f"mapping.{index}.first[{num_runs}]", 0, num_runs - 1),
            source.integer(f"mapping.{index}.second[{num_runs}]", 0, num_runs - 1),
        )
        for index in range(number)
    ]
    slots = exchanged(order.mapping.slots, pairs, length=length, layout=layout, rules=rules)
    return Mapping(slots=slots)


def encoded_order(
    mapping: Mapping, *, orders: Sequence[RankOrder], lengths: Sequence[int]
) -> EncodedOrder | None:
    """How the space makes a mapping, by the longest runs and the fewest exchanges; None where it cannot."""
    for order in orders:
        if order.mapping == mapping:
            return EncodedOrder(name=order.name)
    for length in lengths:
        made = [
            EncodedOrder(name=order.name, length=length, pairs=tuple(pairs))
            for order in orders
            if (pairs := exchanges_between(order.mapping.slots, mapping.slots, length=length)) is not None
        ]
        if made:
            return min(made, key=lambda encoded: len(encoded.pairs))
    return None
