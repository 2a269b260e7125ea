"""Splits by end loads: every split can be reached, all are legal, and equal devices are balanced."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.split.layers import (
    EndLoads,
    end_loads_for_split,
    even_split,
    even_split_with_ends,
    is_legal_split,
    split_for_end_loads,
)


@pytest.mark.parametrize("num_layers", [1, 2, 7, 12])
def test_every_split_of_two_stages_can_be_reached(num_layers: int) -> None:
    for first in range(num_layers + 1):
        split = (first, num_layers - first)
        end_loads = end_loads_for_split(split, num_devices=2)
        assert end_loads is not None
        assert max(abs(end_loads.embedding), abs(end_loads.head)) <= num_layers
        assert split_for_end_loads(num_layers, num_devices=2, end_loads=end_loads) == split


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 30), st.floats(-1.0, 1.0), st.floats(-1.0, 1.0))
def test_splits_for_end_loads_are_legal(
    devices: int, chunks: int, more: int, embedding: float, head: float
) -> None:
    stages = devices * chunks
    layers = max(1, stages - 2) + more
    end_loads = EndLoads(embedding=embedding * layers, head=head * layers)
    split = split_for_end_loads(layers, num_devices=devices, num_chunks=chunks, end_loads=end_loads)
    assert is_legal_split(split, num_layers=layers, num_stages=stages)


def test_a_stage_with_multi_token_prediction_alone_is_legal_before_a_head_alone() -> None:
    for split, is_legal in (
        ((3, 3, 0, 0), True),
        ((3, 2, 1, 0), True),
        ((3, 2, 0, 1), False),
        ((6, 0, 0, 0), False),
    ):
        legal = is_legal_split(split, num_layers=6, num_stages=4, is_mtp_before_last=True)
        assert legal == is_legal
        assert is_legal_split(split, num_layers=6, num_stages=4) == (0 not in split[1:-1])


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 5), st.integers(1, 3), st.integers(0, 30), st.floats(-1.0, 1.0), st.floats(-1.0, 1.0))
def test_with_a_head_alone_the_other_stages_share_the_layers(
    devices: int, chunks: int, more: int, embedding: float, mtp: float
) -> None:
    stages = devices * chunks
    layers = max(1, stages - 3) + more
    end_loads = EndLoads(embedding=embedding * layers, head=2.0, mtp=mtp * layers)
    split = split_for_end_loads(layers, num_devices=devices, num_chunks=chunks, end_loads=end_loads)
    assert is_legal_split(split, num_layers=layers, num_stages=stages, is_mtp_before_last=True)
    if chunks == 1 and devices > 2:
        # The head's device has no other stage.
        alone = EndLoads(embedding=end_loads.embedding, head=mtp * layers)
        assert split == (*split_for_end_loads(layers, num_devices=devices - 1, end_loads=alone), 0)


def test_a_device_with_the_head_alone_on_a_stage_has_fewer_layers_on_its_others() -> None:
    for head in (0.0, 1.0, 3.0):
        end_loads = EndLoads(head=head, mtp=0.0)
        split = split_for_end_loads(12, num_devices=3, num_chunks=2, end_loads=end_loads)
        loads = [split[0] + split[3], split[1] + split[4], split[2] + head]
        assert max(loads) - min(loads) <= 1.0
        assert (sum(split), split[-1]) == (12, 0)


def test_the_even_split_leaves_the_last_stage_to_a_head_alone() -> None:
    assert even_split(8, num_stages=4, is_mtp_before_last=True) == (2, 3, 3, 0)
    assert even_split(8, num_stages=2, is_mtp_before_last=True) == (8, 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(1, 9), st.floats(-4.0, 8.0), st.floats(-4.0, 8.0))
def test_splits_for_end_loads_are_optimal(stages: int, more: int, embedding: float, head: float) -> None:
    layers = stages + more

    def worst(split: tuple[int, ...]) -> float:
        loads = [float(count) for count in split]
        loads[0] += embedding
        loads[-1] += head
        return max(loads)

    every = [
        split
        for split in product(range(layers + 1), repeat=stages)
        if is_legal_split(split, num_layers=layers, num_stages=stages)
    ]
    end_loads = EndLoads(embedding=embedding, head=head)
    best = split_for_end_loads(layers, num_devices=stages, end_loads=end_loads)
    assert worst(best) == pytest.approx(min(worst(split) for split in every))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_layers_go_one_by_one_to_the_least_loaded_device(data: st.DataObject) -> None:
    devices, chunks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    rows = [range(devices), *(data.draw(st.permutations(range(devices))) for _ in range(chunks - 1))]
    placement = [device for row in rows for device in row]
    stages = len(placement)
    layers = max(1, stages - 2) + data.draw(st.integers(0, 30))
    embedding, head = (data.draw(st.floats(-8.0, 8.0)) for _ in range(2))
    counts, loads = [0] * stages, [0.0] * devices
    loads[0] += embedding
    loads[placement[-1]] += head
    inner, ends = range(1, stages - 1), {0: embedding, stages - 1: head}
    for stage in inner:
        counts[stage] += 1
        loads[placement[stage]] += 1.0
    order = [*inner, *sorted(ends)]
    for _ in range(layers - len(inner)):
        least = min(order, key=lambda s: (loads[placement[s]], counts[s] + max(0.0, ends.get(s, 0.0))))
        counts[least] += 1
        loads[placement[least]] += 1.0
    found = split_for_end_loads(
        layers,
        num_devices=devices,
        num_chunks=chunks,
        end_loads=EndLoads(embedding=embedding, head=head),
        placement=placement,
    )
    assert found == tuple(counts)


@pytest.mark.parametrize(
    ("layers", "stages", "embedding", "head"),
    [(8, 4, 0, 0), (9, 8, 0, 1), (96, 96, 0, 1), (4, 4, 0, 3), (3, 2, 1, 5), (5, 1, 0, 1)],
)
def test_an_even_split_with_ends_has_all_layers_and_no_empty_stage_inside(
    layers: int, stages: int, embedding: int, head: int
) -> None:
    split = even_split_with_ends(layers, num_stages=stages, embedding=embedding, head=head)
    assert is_legal_split(split, num_layers=layers, num_stages=stages)


def test_a_heavy_head_takes_layers_off_its_stage() -> None:
    assert even_split_with_ends(12, num_stages=4, embedding=0, head=2) == (3, 4, 4, 1)
