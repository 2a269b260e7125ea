"""Groups whose links are alike take as long: the closed form computes them once."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.mapping.topology import Topology, group_link
from quartet_plugin.model.plan import Slot
from quartet_plugin.planner.closed_form import alike, different

NUM_DOMAINS = 5


def topology(*, is_equal: bool) -> Topology:
    """One slot a domain; all links equal, or each of its own."""
    rates = np.full((NUM_DOMAINS, NUM_DOMAINS), 1e9)
    if not is_equal:
        rates += np.arange(NUM_DOMAINS**2).reshape(rates.shape)
    return Topology(
        slots=tuple(Slot(node=index, local=0) for index in range(NUM_DOMAINS)),
        domain_of_slot=np.arange(NUM_DOMAINS),
        slowdown=np.ones(NUM_DOMAINS),
        inside_bytes_per_s=3e9,
        inside_latency_s=1e-6,
        between_bytes_per_s=rates,
        between_latency_s=np.full((NUM_DOMAINS, NUM_DOMAINS), 1e-5),
    )


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_the_first_group_of_a_kind_has_the_link_of_each(data: st.DataObject) -> None:
    size, count = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([1, 2, 7, 12, 33, 40]))
    domain = st.integers(0, NUM_DOMAINS - 1)
    flat = data.draw(st.lists(domain, min_size=size * count, max_size=size * count))
    groups = np.array(flat).reshape(count, size)
    for is_equal, kinds_of in ((True, alike), (False, different)):
        place = topology(is_equal=is_equal)
        assert place.has_equal_links == is_equal
        numbers, firsts = kinds_of(groups)
        for group, number in zip(groups, numbers.tolist(), strict=True):
            first = groups[firsts[number]]
            assert group_link(place, group.tolist()) == group_link(place, first.tolist())
