"""Named schedules with overlapped pairs: valid, and shorter where there is all-to-all."""

from dataclasses import replace

import numpy as np
import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.costs import stage_costs
from quartet_plugin.schedule.action import Action, ActionKind, OverlappedPair
from quartet_plugin.schedule.named import NAMED, named
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.simulate import simulate
from quartet_plugin.schedule.validate import validate
from tests.schedule.orders import unit_costs
from tests.schedule.pipelines import random_costs, with_exchanges


def repeated(schedule: Schedule, times: int) -> Schedule:
    """The lists one after the other, each with microbatches of its own."""
    m = schedule.num_microbatches

    def moved(entry: Action | OverlappedPair, step: int) -> Action | OverlappedPair:
        if isinstance(entry, OverlappedPair):
            return OverlappedPair(*(part._replace(microbatch=part.microbatch + step * m) for part in entry))
        return entry._replace(microbatch=entry.microbatch + step * m)

    return Schedule.of_actions(
        [
            [moved(entry, step) for step in range(times) for entry in schedule.entries(device)]
            for device in range(schedule.num_devices)
        ],
        num_microbatches=times * m,
        placement=schedule.placement,
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_period_is_what_many_repeated_lists_take(seed: int) -> None:
    rng = np.random.default_rng(seed)
    schedule = named("interleaved", num_devices=3, num_microbatches=6, with_pairs=True)
    table = with_exchanges(rng, random_costs(rng, num_devices=3, num_microbatches=6, num_layers=6))
    costs = stage_costs(table, placement=schedule.placement, layers_per_stage=(1,) * 6)
    spans = [simulate(repeated(schedule, times), costs).makespan_s for times in (20, 40)]
    assert simulate(schedule, costs).period_s == pytest.approx((spans[1] - spans[0]) / 20, rel=2e-3)


PAIRED = [name for name, spec in NAMED.items() if spec.make_paired is not None]
SIZES = [(2, 4), (2, 7), (4, 8), (4, 10), (4, 19), (6, 12), (8, 32)]


@pytest.mark.parametrize(
    ("name", "p", "m"),
    [
        (name, p, m)
        for name in PAIRED
        for p, m in SIZES
        # Two copies need an even number of microbatches, interleaved pairs whole groups.
        if not (name == "dualpipe" and m % 2) and not (name == "interleaved" and m % p)
    ],
)
def test_named_schedules_with_pairs_are_valid(name: str, p: int, m: int) -> None:
    for chunks in (2, 3, 4) if name == "interleaved" else (None,):
        schedule = named(name, num_devices=p, num_microbatches=m, num_chunks=chunks, with_pairs=True)
        validate(schedule)
        assert schedule.pairs
        if name != "interleaved":
            plain = named(name, num_devices=p, num_microbatches=m)
            assert all(map(np.array_equal, plain.orders, schedule.orders))
    if NAMED[name].executable:
        costs = unit_costs(schedule)
        beside = replace(costs, exchange_s=np.full((2, schedule.num_stages), 0.5))
        without = simulate(replace(schedule, pairs=()), beside).makespan_s
        assert simulate(schedule, beside).makespan_s < without


def test_interleaved_with_pairs_has_a_forward_of_warm_up_more_and_its_memory() -> None:
    plain = named("interleaved", num_devices=4, num_microbatches=8)
    paired = named("interleaved", num_devices=4, num_microbatches=8, with_pairs=True)
    for device in range(4):
        warm = next(n for n, a in enumerate(plain.actions(device)) if a.kind is ActionKind.B) - 1
        assert warm == 2 * (4 - device - 1) + 4
        assert paired.pairs[device].tolist() == list(range(warm + 1, 16 + 16 - warm - 1, 2))
    peaks = [simulate(s, unit_costs(s)).peak_activation_bytes for s in (plain, paired)]
    assert (peaks[1] - peaks[0]).tolist() == [1.0] * 4


def test_a_schedule_without_pairs_says_which_have_them() -> None:
    with pytest.raises(
        ConfigError, match="'1f1b': it has no overlapped pairs; schedules with pairs: interleaved, dual"
    ):
        named("1f1b", num_devices=4, num_microbatches=8, with_pairs=True)
