"""The example script on process groups that are as strict as NCCL: a barrier takes RANK for the device.

`nccl_pretrain.py FLAGS...`
"""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Run the example."""
    sys.path.append(str(ROOT))
    from tests.runtime import nccl_sim

    nccl_sim.install()
    runpy.run_path(str(ROOT / "examples" / "pretrain_gpt.py"), run_name="__main__")


if __name__ == "__main__":
    main()
