"""The example's pretrain script with a tensor partition, whose label is in PARTITION, and no plan.

At the end rank 0 prints the bytes that linears and borders have sent, `sent BYTES bordered BYTES`. Rank 1
prints the most bytes that autograd has saved in the first step, `peak BYTES`: rank 0 also reads the data, and
Megatron keeps a step's masks and position numbers there to run it again.
"""

import os
import runpy
from collections.abc import Callable
from typing import Any

from megatron.training import training

from quartet_plugin.megatron import seams
from quartet_plugin.megatron.partition.install import PartitionedModels
from quartet_plugin.model.tensor_partition import partition_from_label
from quartet_plugin.runtime.activation_tracker import SavedTensorTracker
from tests.megatron.support import PRETRAIN_SCRIPT


def main() -> None:
    """Install the partition, then run the script as it is."""
    partition = partition_from_label(os.environ["PARTITION"])
    models = None if partition is None else PartitionedModels(partition)
    if models is not None:
        seams.install(models.wrappers)
    tracker = SavedTensorTracker()
    training.train_step = tracked(training.train_step, tracker)
    runpy.run_path(str(PRETRAIN_SCRIPT), run_name="__main__")
    if os.environ["RANK"] == "0":
        sent = {} if models is None else models._context.messages.bytes_sent
        bordered = sum(size for key, size in sent.items() if key[1] == "border")
        print(f"\nsent {sum(sent.values()) - bordered} bordered {bordered}", flush=True)
    if os.environ["RANK"] == "1":
        print(f"\npeak {tracker.peak_bytes}", flush=True)


def tracked(train_step: Callable[..., Any], tracker: SavedTensorTracker) -> Callable[..., Any]:
    """The function with the tensors counted that autograd saves in its first call."""

    def train_and_count(forward_step: Any, iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if tracker.peak_bytes:
            return train_step(forward_step, iterator, model, *args, **kwargs)
        tracker.begin(parameter for chunk in model for parameter in chunk.parameters())
        with tracker.saving():
            return train_step(forward_step, iterator, model, *args, **kwargs)

    return train_and_count


if __name__ == "__main__":
    main()
