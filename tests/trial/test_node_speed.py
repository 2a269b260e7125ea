"""The speeds of nodes by the products that their ranks timed."""

import pytest

from quartet_plugin.protocol.rank_files import RankReport
from quartet_plugin.trial.node_speed import node_slowdowns, node_speeds
from tests.trial.factory import report


def ranks_of(**factors: float) -> list[RankReport]:
    """Two ranks on each node, whose products take 1 ms times the node's factor, the first rank's 2 % more."""
    reports: list[RankReport] = []
    for host, factor in factors.items():
        for local_rank, own in enumerate((1.02, 1.0)):
            times = tuple(1e-3 * factor * own * scatter for scatter in (1.0, 0.99, 1.01, 1.3))
            reports.append(report(len(reports), host=host, local_rank=local_rank, product_s=times))
    return reports


def slowdowns(reports: list[RankReport]) -> dict[str, float]:
    return {host: one.factor for host, one in node_slowdowns(node_speeds(reports)).items()}


@pytest.mark.parametrize("slow", ["a", "b", "c"])
def test_the_slow_one_of_several_nodes_is_told(slow: str) -> None:
    factors = {host: 1.5 if host == slow else 1.0 for host in ("a", "b", "c")}
    assert slowdowns(ranks_of(**factors)) == pytest.approx(factors)


def test_of_two_nodes_the_slower_one_is_told() -> None:
    assert slowdowns(ranks_of(a=1.4, b=1.0)) == pytest.approx({"a": 1.4, "b": 1.0})


def test_a_rank_that_is_slow_alone_does_not_make_its_node_twice_as_slow() -> None:
    first, *others = ranks_of(a=1.0, b=1.0)
    slow = report(0, host="a", local_rank=0, product_s=(2e-3, 2e-3))
    assert slowdowns([slow, *others])["a"] == pytest.approx(1.5, rel=0.02)
    assert first.host == slow.host


def test_nodes_of_other_kinds_do_not_compare() -> None:
    a, b = ranks_of(a=1.0)[:1], ranks_of(b=3.0)[:1]
    other = report(1, host="b", local_rank=0, device="H100", product_s=b[0].product_s)
    assert slowdowns([*a, other]) == {}
    crowded = report(1, host="b", local_rank=0, cores=(0,), product_s=b[0].product_s)
    assert slowdowns([*a, crowded]) == {}


def test_a_node_with_a_rank_that_timed_nothing_is_left_out() -> None:
    reports = [*ranks_of(a=1.0), *ranks_of(b=2.0)[:1], report(3, host="b", local_rank=1)]
    assert [speed.host for speed in node_speeds(reports)] == ["a"]
    assert node_speeds([report(0, product_s=(0.0, 1e-3))]) == ()


def test_the_more_the_times_scatter_the_less_a_factor_is_sure() -> None:
    def spread(scatter: float) -> float:
        times = [1e-3 * (1.0 + scatter * way) for way in (-1.0, 0.0, 1.0, 0.5, -0.5)]
        reports = [report(at, host=host, product_s=tuple(times)) for at, host in enumerate(("a", "b"))]
        return node_slowdowns(node_speeds(reports))["a"].spread

    assert spread(0.3) > 5 * spread(0.01) > 0.0
