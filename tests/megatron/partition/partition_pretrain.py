"""The example's pretrain script with a tensor partition, whose label is in PARTITION, and no plan."""

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
    seams.install(PartitionedModels(partition).wrappers)
    runpy.run_path(str(PRETRAIN_SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
