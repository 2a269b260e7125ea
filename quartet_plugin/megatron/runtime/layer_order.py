"""Compares the layers that the ranks of a pipeline have built with the order of the stages."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from quartet_plugin.errors import PlanError
from quartet_plugin.megatron.execution import built_stages
from quartet_plugin.megatron.placement.state import StagePlacement

# For a chunk without a list of layers.
_UNKNOWN = [-1, -1, -1, -1]


def check_layer_order(
    chunks: Sequence[Any], placement: StagePlacement, *, group: Any, device: torch.device
) -> None:
    """Check that the stages in order have the model's layers in order: otherwise another model would train.

    Every process of the pipeline's `group` calls this. Raises PlanError on all of them. A model without a
    list of layers is not checked.
    """
    stages = [
        [built.first_layer, built.num_layers, int(built.has_embedding), int(built.has_head)]
        for built in built_stages(chunks)
    ]
    here = torch.tensor(stages or [_UNKNOWN] * len(chunks), dtype=torch.int64, device=device)
    gathered = [torch.empty_like(here) for _ in range(placement.num_devices)]
    dist.all_gather(gathered, here, group=group)
    of_device = [rows.tolist() for rows in gathered]
    in_order = sorted(
        (stage, row)
        for number, rows in enumerate(of_device)
        for stage, row in zip(placement.stages(number), rows, strict=True)
    )
    if any(row == _UNKNOWN for _, row in in_order):
        return
    num_before = 0
    for stage, (first, count, has_embedding, has_head) in in_order:
        if count and first != num_before:
            raise PlanError(
                f"split: layers {first} to {first + count} were built as stage {stage} of the plan, and "
                f"{num_before} as the stages before it; the script must build what Megatron's arguments say"
            )
        if (has_embedding, has_head) != (stage == 0, stage == placement.num_stages - 1):
            raise PlanError(f"split: the embedding or the head is on another stage than the plan's ({stage})")
        num_before += count
