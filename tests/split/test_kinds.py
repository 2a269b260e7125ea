"""The balanced split of layers of several kinds, against all splits."""

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from quartet_plugin.cost.layer_kinds import layers_before
from quartet_plugin.schedule import placement as places
from quartet_plugin.split.kinds import KindLoads, balanced_by_kinds, least_by_stage


def every_split(num_layers: int, least: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for edges in itertools.combinations_with_replacement(range(num_layers + 1), len(least) - 1):
        split = tuple(b - a for a, b in itertools.pairwise((0, *edges, num_layers)))
        if all(count >= fewest for count, fewest in zip(split, least, strict=True)):
            yield split


def random_loads(draw: random.Random, placement: tuple[int, ...], num_layers: int) -> KindLoads:
    letters = "*-M"
    pattern = "".join(draw.choice(letters) for _ in range(num_layers))
    fixed = np.zeros(len(placement))
    fixed[0], fixed[-1] = draw.uniform(0.0, 2.0), draw.uniform(0.0, 4.0)
    layer = np.array([[draw.uniform(0.2, 5.0)] for _ in letters])
    speeds = np.array([draw.choice([1.0, 1.0, 2.0]) for _ in range(max(placement) + 1)])
    return KindLoads(
        fixed=fixed,
        layer=layer * speeds[list(placement)],
        before=layers_before(pattern, letters),
        placement=placement,
    )


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_one_stage_a_device_is_balanced_exactly(num_stages: int) -> None:
    draw = random.Random(num_stages)
    for _ in range(40):
        num_layers = draw.randint(num_stages, 9)
        loads = random_loads(draw, places.linear(num_stages), num_layers)
        least = tuple(draw.choice([0, 1]) for _ in range(num_stages))
        split = balanced_by_kinds(loads, least)
        assert all(count >= fewest for count, fewest in zip(split, least, strict=True))
        every = np.array(list(every_split(num_layers, least)))
        busiest = loads.of_devices(np.array([split])).max()
        assert busiest == pytest.approx(loads.of_devices(every).max(axis=1).min())


@pytest.mark.parametrize("placement", [places.loop(2, 2), places.v_shape(2)])
def test_several_stages_a_device_are_nearly_balanced(placement: tuple[int, ...]) -> None:
    draw, ratios = random.Random(0), []
    for _ in range(40):
        loads = random_loads(draw, placement, draw.randint(6, 10))
        num_layers = loads.before.shape[1] - 1
        least = least_by_stage(len(placement), num_layers)
        every = np.array(list(every_split(num_layers, least)))
        busiest = loads.of_devices(np.array([balanced_by_kinds(loads, least)])).max()
        ratios.append(busiest / loads.of_devices(every).max(axis=1).min())
    assert np.mean(ratios) < 1.05


def test_only_end_stages_may_be_left_empty() -> None:
    assert least_by_stage(4, 8) == least_by_stage(4, 4) == (1, 1, 1, 1)
    assert least_by_stage(4, 3) == (0, 1, 1, 1)
    assert least_by_stage(4, 2) == (0, 1, 1, 0)
