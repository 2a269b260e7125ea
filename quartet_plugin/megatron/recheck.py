"""`python -m quartet_plugin.megatron.recheck RESULT.json`: is the installed Megatron still the one we know?

Resolves every seam and writes what it found. Started by `quartet recheck`, which has no torch of its own.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quartet_plugin.errors import SeamError
from quartet_plugin.megatron import seams
from quartet_plugin.megatron.seams import Seam


def declared(*, with_runtime: bool) -> Iterator[Seam]:
    """Every seam; those of the runtime only where a plan uses it."""
    from quartet_plugin.megatron import checkpoints

    yield from (seams.ARGUMENTS, seams.TOKENIZER, seams.TRAIN_STEP, checkpoints.SAVE, checkpoints.LOAD)
    if not with_runtime:
        return
    from quartet_plugin.megatron.placement import ends, losses, tied
    from quartet_plugin.megatron.runtime import install

    yield from install.SCHEDULES
    yield from install.CALLED
    for module in (ends, losses, tied):
        yield from (value for value in vars(module).values() if isinstance(value, Seam))


def report(*, with_runtime: bool) -> dict[str, Any]:
    """The versions found, and every seam with its fault, None where it is as known."""
    content: dict[str, Any] = {"framework_version": None, "seams": []}
    try:
        content["framework_version"] = seams.installed_version().partition("+")[0]
        seams.check_version()
    except SeamError as error:
        content["seams"].append({"path": "megatron-core", "fault": str(error)})
        return content
    for seam in declared(with_runtime=with_runtime):
        try:
            seams.resolve(seam)
        except SeamError as error:
            content["seams"].append({"path": seam.path, "fault": str(error)})
        else:
            content["seams"].append({"path": seam.path, "fault": None})
    return content


def main(words: list[str]) -> int:
    """Write the report."""
    from quartet_plugin.megatron import cpu_device
    from quartet_plugin.megatron.entry import use_cpu
    from quartet_plugin.model.files import write_json_atomic
    from quartet_plugin.worker.options import Options

    target, runtime = words
    if use_cpu(Options()):
        cpu_device.install()
    write_json_atomic(Path(target), report(with_runtime=runtime == "runtime"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
