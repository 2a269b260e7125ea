"""Checks a plan before a process starts: framework, processes, the command's flags and the receipt."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from quartet_plugin.cli.output import tell
from quartet_plugin.errors import PlanError
from quartet_plugin.model.frameworks import MEGATRON

if TYPE_CHECKING:
    from quartet_plugin.launchers.command import Command
    from quartet_plugin.model.plan import Plan


def check_before_start(plan: "Plan", *, command: "Command", path: Path) -> None:
    """Compare a plan with the installed framework and the command; PlanError names the first difference."""
    made_for = plan.made_for
    here = None if brings_megatron(command) else framework_version(made_for.framework)
    if here is not None and here != made_for.framework_version:
        raise PlanError(
            f"{path}: made for {made_for.framework} {made_for.framework_version}, here is {here}; "
            "make a plan with `quartet tune`"
        )
    if command.num_processes is not None and command.num_processes != made_for.world_size:
        raise PlanError(
            f"{path}: made for {made_for.world_size} processes, the command starts {command.num_processes}; "
            "make a plan with `quartet tune`"
        )
    if made_for.framework == MEGATRON.framework:
        try:
            made_for.check_same_job(_stated_job(command))
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error


def brings_megatron(command: "Command") -> bool:
    """Whether a tree of Megatron stands before the installed one on the path of the command's script."""
    return _tree_of(command) is not None


def _tree_of(command: "Command | None") -> Path | None:
    """The folder of the first tree of Megatron beside the command's script or on PYTHONPATH."""
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    folders = [*([] if command is None else [Path(command.target).parent]), *map(Path, named)]
    return next((folder for folder in folders if (folder / "megatron" / "core").is_dir()), None)


def megatron_here(command: "Command | None" = None) -> str | None:
    """The version of the Megatron that a command would train with, as its tree states it; else the installed.

    None where there is neither.
    """
    tree = _tree_of(command)
    if tree is None:
        return framework_version(MEGATRON.framework)
    info = tree / "megatron" / "core" / "package_info.py"
    text = info.read_text(encoding="utf-8") if info.is_file() else ""
    values = dict(re.findall(r"""^(MAJOR|MINOR|PATCH|PRE_RELEASE) *= *['"]?([^'"\s]*)""", text, re.MULTILINE))
    numbers = [values.get(name, "") for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(numbers) + values.get("PRE_RELEASE", "") if all(numbers) else None


def _stated_job(command: "Command") -> dict[str, int]:
    """The values of a plan's `made_for` that the command's own flags state, by name."""
    from quartet_plugin.launchers.megatron_flags import flags_of

    counts = flags_of(command).counts(num_processes=command.num_processes)
    stated = {"num_layers": counts.num_layers, "global_batch_size": counts.global_batch_size}
    return {name: value for name, value in stated.items() if value is not None}


def check_receipt(plan: "Plan", *, path: Path, skip: bool) -> None:
    """Require the parity gate's receipt of a plan with a custom schedule; PlanError without one.

    `skip` trains all the same and says so.
    """
    from quartet_plugin.model.receipt import needs_receipt, receipt_path, require_receipt

    if not needs_receipt(plan):
        return
    if not skip:
        require_receipt(plan, path=path, torch_version=framework_version("torch"))
        return
    tell(
        f"quartet: parity check skipped (--skip-parity-check): {receipt_path(path)} was not read; schedule "
        f"{plan.schedule.name!r} is not verified to train as stock does"
    )


def framework_version(framework: str) -> str | None:
    """The installed version; None where this environment has none (the command may bring its own)."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(framework).partition("+")[0]
    except PackageNotFoundError:
        return None
