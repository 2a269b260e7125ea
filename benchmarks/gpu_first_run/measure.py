"""One step of the first run: `python -m benchmarks.gpu_first_run.measure STEP DEVICE FOLDER`.

Each measure writes FOLDER/found.json, again whenever it knows more: what was measured, and under `faults` a
line for everything that must hold and does not.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_first_run import hardware, provoked, training
from quartet_plugin.model.files import write_json_atomic

# Seconds, bytes and words by name. A measure hands them on to be kept as soon as it has them.
type Keep = Callable[[dict[str, Any]], None]

MEASURES: dict[str, Callable[[str, Path, Keep], None]] = {
    "versions": hardware.versions,
    "communicators": hardware.communicators,
    "events": hardware.events,
    "memory": hardware.memory,
    "failures": provoked.failures,
    "parity": training.parity,
    "layer_times": training.layer_times,
    "several_ranks": training.several_ranks,
    "trial": training.trial,
}


def main() -> None:
    """Measure one step."""
    name, device, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    found: dict[str, Any] = {"faults": []}

    def keep(more: dict[str, Any]) -> None:
        found["faults"] += more.pop("faults", [])
        found.update(more)
        write_json_atomic(folder / "found.json", found)

    MEASURES[name](device, folder, keep)


if __name__ == "__main__":
    main()
