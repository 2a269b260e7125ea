"""As `recording_pretrain.py`, and checkpoints are written without another process."""

import sys
from pathlib import Path


def main() -> None:
    """Record, and run the example."""
    from tests.megatron import recording_pretrain
    from tests.megatron.local_writer import local_writer

    with local_writer():
        recording_pretrain.main()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
