"""The example's pretrain script with a tensor partition, whose label is in PARTITION, and no plan.

At the end rank 0 prints what it has sent in linears: `sent LINEARS BYTES`, and at borders: `bordered BYTES`.
"""

import os
import runpy

from quartet_plugin.megatron import seams
from quartet_plugin.megatron.partition.install import PartitionedModels
from quartet_plugin.model.tensor_partition import partition_from_label
from tests.megatron.support import PRETRAIN_SCRIPT


def main() -> None:
    """Install the partition, then run the script as it is."""
    partition = partition_from_label(os.environ["PARTITION"])
    assert partition is not None
    models = PartitionedModels(partition)
    seams.install(models.wrappers)
    runpy.run_path(str(PRETRAIN_SCRIPT), run_name="__main__")
    if os.environ["RANK"] == "0":
        sent = models._context.messages.bytes_sent
        bordered = sum(size for key, size in sent.items() if key[1] == "border")
        print(f"\nsent {sum(sent.values()) - bordered} bordered {bordered}", flush=True)


if __name__ == "__main__":
    main()
