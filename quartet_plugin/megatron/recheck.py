"""`python -m quartet_plugin.megatron.recheck RESULT.json` compares the installed Megatron with the seams.

It resolves every seam and writes the faults. Started by `quartet recheck`, which has no torch of its own.
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
    if with_runtime:
        from quartet_plugin.megatron.runtime import install

        yield from install.declared()


def report(*, with_runtime: bool) -> dict[str, Any]:
    """The installed version and its fault, and every seam with its fault; None for no fault.

    In an unsupported release the seams are resolved too, so that its changes are named.
    """
    content: dict[str, Any] = {"framework_version": None, "fault": None, "seams": []}
    try:
        content["framework_version"] = seams.installed_version().partition("+")[0]
        seams.check_version()
    except SeamError as error:
        content["fault"] = str(error)
    if content["framework_version"] is None:
        return content
    try:
        known = list(declared(with_runtime=with_runtime))
    except ImportError as error:
        content["fault"] = content["fault"] or f"{error.name}: cannot be imported ({error})"
        return content
    for seam in known:
        fault = None
        try:
            seams.resolve(seam)
        except SeamError as error:
            fault = str(error)
        content["seams"].append({"path": seam.path, "fault": fault})
    return content


def main(words: list[str]) -> int:
    """Write the report."""
    from quartet_plugin.megatron import cpu_device
    from quartet_plugin.megatron.entry import use_cpu
    from quartet_plugin.model.files import write_json_atomic
    from quartet_plugin.rank.entry_options import EntryOptions

    target, runtime = words
    if use_cpu(EntryOptions()):
        cpu_device.install()
    write_json_atomic(Path(target), report(with_runtime=runtime == "runtime"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
