"""best/native.sh: the user's own command with the winner's flags behind it, for machines without the plugin.

Megatron's parser takes the last of two, so nothing of the command is edited. Where that does not say the
whole plan (a schedule of ours, an order of ranks, a switch of the command that would have to go) there is no
script, and one line says why.
"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from quartet_plugin.errors import PlanError, QuartetError
from quartet_plugin.trial.redact import shell_words

if TYPE_CHECKING:
    from quartet_plugin.model.plan import Plan
    from quartet_plugin.tuner.run_folder import TuningRun

FILE_NAME = "native.sh"


def write_native(plan: "Plan | None", *, run: "TuningRun") -> str:
    """Write the script beside the plan, or remove an earlier one; where it is, or why there is none.

    Raises ConfigError or StorageError where it cannot be written.
    """
    from quartet_plugin.model.files import write_text_atomic

    path = native_path(run.folder.path)
    path.unlink(missing_ok=True)
    if plan is None:
        return ""
    try:
        text = native_text(plan, command=run.command, cwd=run.cwd)
    except QuartetError as error:
        return f"no {FILE_NAME}: {error}"
    write_text_atomic(path, text)
    return f"sh {path}"


def native_path(run_folder: Path) -> Path:
    """Where the script of a run is."""
    return run_folder / "best" / FILE_NAME


def native_text(plan: "Plan", *, command: tuple[str, ...], cwd: Path) -> str:
    """The script. Raises PlanError where appended flags do not say the whole plan."""
    from quartet_plugin.cli.export import export

    content = export(plan)
    if "flags" not in content:
        raise PlanError(f"{plan.made_for.framework} takes no flags for a plan")
    if not content["is_stock_order"]:
        raise PlanError("the plan orders the ranks, and no flag does")
    if "--" in command:
        raise PlanError("the command has a -- of its own, behind which flags are not read")
    given = {word.partition("=")[0].replace("_", "-") for word in command if word.startswith("--")}
    contradicted = [flag for flag in content["leave_out"] if flag.replace("_", "-") in given]
    if contradicted:
        raise PlanError(f"the plan does without {', '.join(contradicted)} of the command")
    words = [*command]
    for name, value in content["flags"].items():
        words += [name] if value is True else [name, str(value)]
    origin = " ".join(f"trial {plan.provenance.trial} of the run {plan.provenance.run}".split())
    return (
        "#!/bin/sh\n"
        f"# Trains with {origin} by the framework's own flags; needs no plugin.\n"
        f"cd {shlex.quote(str(cwd))} || exit\n"
        f"exec {shell_words(command)} \\\n"
        f"    {shlex.join(words[len(command) :])}\n"
    )
