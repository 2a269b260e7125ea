"""The benchmark of tight memory: its V-Half row, however little the search may do."""

from benchmarks.schedule_search import capped_costs
from quartet_plugin.schedule.search.engine import search

# What V-Half of its authors' published generator takes there: 116.7058 times a device's W of 4 ms.
PUBLISHED_S = 116.7058 * 4e-3


def test_a_search_at_v_halfs_cap_is_never_longer_than_the_published_v_half() -> None:
    costs = capped_costs(8, 32, 5 / 8, hidden=4096, length=4096)
    result = search(costs, split="even", evaluations=1)
    assert result.named_best is not None
    assert result.named_best.label == "v-half"
    assert result.named_best.score_s <= PUBLISHED_S * (1 + 1e-6)
    assert result.simulation.makespan_s <= result.named_best.score_s * (1 + 1e-9)
