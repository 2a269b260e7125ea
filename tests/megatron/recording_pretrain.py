"""The example script, with what every step returned written down: `recording_pretrain.py FOLDER FLAGS...`."""

import runpy
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"


def main() -> None:
    """Record, and run the example."""
    from tests.megatron.rank_on_cpu import record_steps

    folder = Path(sys.argv.pop(1))
    folder.mkdir(parents=True, exist_ok=True)
    record_steps(folder)
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLE.parents[1]))
    main()
