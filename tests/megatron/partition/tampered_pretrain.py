"""The example script with tables of a tensor partition in which the weight's gradient has a product twice.

`tampered_pretrain.py FLAGS...` stands for a table that is wrong and passes its check: the last step of G
repeats the first. Without a partition nothing differs.
"""

import runpy
from dataclasses import replace
from typing import Any

from quartet_plugin.megatron.partition import context
from quartet_plugin.partition.layer import planned_partition
from quartet_plugin.partition.table import Partition, Phase
from quartet_plugin.runtime.partition import device_steps
from tests.megatron.support import PRETRAIN_SCRIPT


def main() -> None:
    """Run the example with the tampered tables, which nothing checks."""

    def tampered(*args: Any) -> Partition:
        table = planned_partition(*args)
        gradient = table.steps[Phase.G]
        return replace(table, steps={**table.steps, Phase.G: (*gradient[:-1], gradient[0])})

    vars(context)["planned_partition"] = tampered
    vars(device_steps)["validate"] = lambda _table: None
    runpy.run_path(str(PRETRAIN_SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
