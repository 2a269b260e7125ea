"""A torchrun for the command line's tests: starts the fake training in milliseconds, without the adapter."""

import os
import sys
from pathlib import Path

FAULTS = Path(__file__).parents[1] / "faults"


def main() -> None:
    """Leave the adapter's module out, and become the torchrun of the trials' tests."""
    words = sys.argv[1:]
    at = words.index("quartet_plugin.megatron")
    del words[at - 1 : at + 1]
    os.execv(sys.executable, [sys.executable, str(FAULTS / "torchrun.py"), *words])


if __name__ == "__main__":
    main()
