"""Ordering of published layouts: which pairs are compared, and which of them are in the right order."""

from typing import Any

import pytest

from benchmarks.predict_moe import ALIKE, Predicted, ordered_pairs

ROW = {"model": "m", "gpu": "g", "gpus": 64, "seq_len": 4096, "gbs": 8, "precision": "fp8"}
LAYOUT = {"mbs": 1, "tp": 1, "pp": 4, "cp": 1, "vpp": 1, "ep": 8}


def predicted(measured_s: float, seconds: float | None, **changes: Any) -> Predicted:
    return Predicted(
        row={**ROW, **LAYOUT, "iter_time_s": measured_s, **changes}, seconds=seconds, is_new=True
    )


@pytest.mark.parametrize(
    ("other", "counts"),
    [
        (predicted(20.0, 11.0, pp=8), (1, 1)),
        (predicted(20.0, 9.0, pp=8), (1, 0)),
        # As fast within 5 %, the same layout, another machine, and a refused row.
        (predicted(10.4, 9.0, pp=8), (0, 0)),
        (predicted(20.0, 11.0), (0, 0)),
        (predicted(20.0, 11.0, pp=8, gpus=128), (0, 0)),
        (predicted(20.0, None, pp=8), (0, 0)),
        # Twice the batch in the same time is faster, and predicted so.
        (predicted(10.0, 10.0, pp=8, gbs=16), (1, 1)),
    ],
)
def test_pairs_are_ordered_by_time_a_sequence(other: Predicted, counts: tuple[int, int]) -> None:
    assert ordered_pairs([predicted(10.0, 10.0), other]) == counts


def test_pairs_of_other_batches_are_left_out_where_batches_are_alike() -> None:
    rows = [predicted(10.0, 10.0), predicted(10.0, 10.0, pp=8, gbs=16), predicted(20.0, 11.0, pp=8)]
    assert ordered_pairs(rows) == (2, 2)
    assert ordered_pairs(rows, alike=(*ALIKE, "gbs")) == (1, 1)
