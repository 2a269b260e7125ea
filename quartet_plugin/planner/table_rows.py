"""Rows of integer tables: packed comparison, and the layout that a row of columns stands for."""

from math import prod

import numpy as np

from quartet_plugin.model.costs import IntArray
from quartet_plugin.model.layout import Layout, Recompute
from quartet_plugin.model.tensor_partition import TensorPartition

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


def layout_of(
    tp: int,
    cp: int,
    pp: int,
    dp: int,
    size: int,
    virtual: int,
    recompute: int,
    sharded: int,
    *,
    ep: int = 1,
    partition: TensorPartition | None = None,
) -> Layout:
    """A layout from the columns of `LayoutTable`; sequence parallelism goes with tensor parallelism."""
    return Layout(
        tensor_parallel=tp,
        pipeline_parallel=pp,
        data_parallel=dp,
        virtual_stages=virtual,
        context_parallel=cp,
        expert_parallel=ep,
        micro_batch_size=size,
        sequence_parallel=tp > 1,
        distributed_optimizer=bool(sharded),
        recompute=RECOMPUTE[recompute],
        tensor_partition=partition,
    )


def unique_rows(columns: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The different rows, the index where each first occurs, and the different row of every row.

    Rows are packed into one number each, which must fit in 62 bits.
    """
    spans = columns.max(axis=0, initial=0) + 1
    assert prod(int(span) for span in spans) < 2**62
    packed = np.zeros(len(columns), dtype=np.int64)
    for column, span in zip(columns.T, spans, strict=True):
        packed = packed * span + column
    _, index, inverse = np.unique(packed, return_index=True, return_inverse=True)
    return columns[index], index, inverse.ravel()
