"""`python -m quartet_plugin.megatron.doctor RESULT.json` says what the Megatron here gives, axis by axis.

Its functions are compared in their files, its flags are asked of its own parser. Started by `quartet doctor`,
which has no torch of its own.
"""

import ast
import difflib
import os
import sys
import tempfile
import zipfile
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quartet_plugin.errors import SeamError
from quartet_plugin.megatron.seams import MEGATRON, Seam, installed_version, known_releases, package_roots
from quartet_plugin.megatron.seams.declared import (
    ALL,
    ARGUMENTS,
    CHECKPOINTS,
    CUSTOM_SCHEDULE,
    TOKENIZER,
    TRAIN_STEP,
)
from quartet_plugin.megatron.support import accepts_changed_source, source_faults, texts_of
from quartet_plugin.rank.source_tree import SourceTree
from quartet_plugin.space.axes import Axis
from quartet_plugin.space.knobs.registry import SETTINGS
from quartet_plugin.space.needed_flags import flag_of, missing_flags

WORKS, KEPT = "works", "kept"
CUSTOM_SCHEDULES, MEASURING = "custom_schedules", "measuring"


def report() -> dict[str, Any]:
    """Version and place of the Megatron here, its axes and functions; `fault` where nothing can be tuned."""
    content: dict[str, Any] = {
        "framework": MEGATRON.package,
        "framework_version": None,
        "folder": None,
        "nearest": None,
        "fault": None,
        "axes": [],
        "functions": [],
    }
    try:
        version, roots = installed_version(), package_roots()
    except SeamError as error:
        return {**content, "fault": str(error)}
    tree = SourceTree(roots)
    folder = next((root / "megatron" for root in roots if (root / "megatron" / "core").is_dir()), None)
    faults = _faults(tree)
    content |= {
        "framework_version": version.partition("+")[0],
        "folder": str(folder),
        "nearest": nearest_release(tree),
        "functions": [
            {"path": seam.path, "need": _need(seam), "fault": faults.get(seam.path)} for seam in ALL
        ],
    }
    try:
        known_flags = set(parser_destinations())
    except (Exception, SystemExit) as error:
        return {**content, "fault": f"{ARGUMENTS.path}: its flags cannot be read ({error})"}
    axes = [_axis(axis, known_flags) for axis in Axis]
    return {**content, "axes": [*axes, _custom_schedules(faults, tree), _measuring(tree)]}


def _faults(tree: SourceTree) -> dict[str, str]:
    """How functions differ from what is known of them, by path: sources, of those not replaced parameters."""
    faults = source_faults(lambda seam: tree.function(seam.module, seam.name))
    for seam in (TOKENIZER, *CHECKPOINTS):
        fault = seam.parameters_fault(tree.function(seam.module, seam.name))
        if fault is not None:
            faults[seam.path] = fault
    return faults


def _need(seam: Seam) -> str:
    if seam == ARGUMENTS:
        return "flags"
    return "custom schedules" if seam in CUSTOM_SCHEDULE else "measured"


def nearest_release(tree: SourceTree) -> str:
    """The release that custom schedules have trained with and that shares most functions with the tree."""
    here = {seam.path: tree.function(seam.module, seam.name) for seam in ALL}

    def shared(functions: Mapping[str, Any]) -> int:
        return sum(
            function is not None and known is not None and function.source == known.source
            for path, known in functions.items()
            for function in [here.get(path)]
        )

    tried = {name: functions for name, (is_tried, functions) in known_releases().items() if is_tried}
    # Releases that can be had as a wheel, the newest of equals.
    return max((name for name in tried if name[0].isdigit()), key=lambda name: (shared(tried[name]), name))


def parser_destinations() -> Iterable[str]:
    """The destinations of Megatron's own parser.

    Imports Megatron, on the CPU device where there is no accelerator.
    """
    from quartet_plugin.megatron import cpu_device
    from quartet_plugin.megatron.arguments import Flags
    from quartet_plugin.megatron.entry import lacks_accelerator
    from quartet_plugin.megatron.seams import locate

    if lacks_accelerator():
        cpu_device.install()
    _, add_megatron_arguments = locate(ARGUMENTS)

    def fill(parser: ArgumentParser) -> None:
        add_megatron_arguments(parser)

    return Flags(fill).defaults


def _axis(axis: Axis, known_flags: set[str]) -> dict[str, str]:
    if axis is Axis.MAPPING:
        return _row(axis.value, WORKS, "RANK of each process; no flag and no function")
    if axis is Axis.OPTIONS:
        missing = [knob.flag for knob in SETTINGS if knob.destination not in known_flags]
        lacking = f"without {', '.join(missing)}" if missing else ""
        if len(missing) == len(SETTINGS):
            return _row(axis.value, KEPT, f"this Megatron has no {', '.join(missing)}")
        return _row(axis.value, WORKS, ", ".join(filter(None, ("native flags", lacking))))
    needed = missing_flags(axis, known_flags)
    if needed:
        return _row(axis.value, KEPT, f"this Megatron has no {_flags(needed)}")
    return _row(axis.value, WORKS, "native flags")


def _flags(names: Iterable[str]) -> str:
    return ", ".join(flag_of(name) for name in names)


def _custom_schedules(faults: Mapping[str, str], tree: SourceTree) -> dict[str, str]:
    changed = texts_of(
        lambda seam: tree.function(seam.module, seam.name),
        (seam for seam in CUSTOM_SCHEDULE if seam.path in faults),
    )
    if not changed:
        return _row(CUSTOM_SCHEDULES, WORKS, "every function that they replace is unchanged")
    names = ", ".join([*changed][:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
    if accepts_changed_source(changed.values()):
        return _row(
            CUSTOM_SCHEDULES, WORKS, f"changed functions are accepted, under the parity gate: {names}"
        )
    return _row(CUSTOM_SCHEDULES, KEPT, f"changed: {names}")


def _measuring(tree: SourceTree) -> dict[str, str]:
    function = tree.function(TRAIN_STEP.module, TRAIN_STEP.name)
    if function is None:
        return _row(MEASURING, WORKS, "no train_step: times from the log line of each iteration")
    if TRAIN_STEP.parameters_fault(function) is not None:
        return _row(MEASURING, WORKS, "train_step with other parameters: times, and losses where it has them")
    return _row(MEASURING, WORKS, "times, losses and gradient norms of train_step")


def _row(axis: str, state: str, reason: str) -> dict[str, str]:
    return {"axis": axis, "state": state, "reason": reason}


def differences(against: Path) -> dict[str, str]:
    """Unified diffs of the changed functions against a wheel or source tree, by path."""
    here = SourceTree(package_roots())
    with tempfile.TemporaryDirectory() as folder:
        root = against
        if against.suffix == ".whl":
            with zipfile.ZipFile(against) as wheel:
                wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith("megatron/")])
            root = Path(folder)
        there = SourceTree((root,))
        return {
            seam.path: text
            for seam in ALL
            if seam.path in _faults(here)
            for text in [_diff(seam, there, here)]
            if text
        }


def _diff(seam: Seam, before: SourceTree, after: SourceTree) -> str:
    texts = []
    for tree in (before, after):
        file, definition = tree.file(seam.module), tree.definition(seam.module, seam.name)
        source = file.read_text(encoding="utf-8") if file is not None and definition is not None else ""
        segment = ast.get_source_segment(source, definition) if definition is not None else ""
        texts.append((segment or "").splitlines())
    there, here = texts
    return "\n".join(
        difflib.unified_diff(there, here, f"{seam.path} there", f"{seam.path} here", lineterm="")
    )


def main(words: list[str]) -> int:
    """Write the report, with the differences against a wheel or tree where one is named."""
    from quartet_plugin.model.files import write_json_atomic

    target, *against = words
    content = report()
    if against:
        content["differences"] = differences(Path(against[0]))
    write_json_atomic(Path(target), content)
    # Megatron on the CPU device may have threads that do not end.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
