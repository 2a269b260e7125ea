"""The run's winner on disk: best/plan.json, its receipt, a shell line that trains with it, and the regret."""

import shlex
from dataclasses import replace
from pathlib import Path

from quartet_plugin.model.files import write_text_atomic
from quartet_plugin.model.plan import Plan, write_plan
from quartet_plugin.model.receipt import receipt_path, write_receipt
from quartet_plugin.model.regret import write_regret
from quartet_plugin.trial.redact import shell_words
from quartet_plugin.tuner.coordinator import TuneResult
from quartet_plugin.tuner.run_folder import TuningRun


def write_best(result: TuneResult, *, run: TuningRun) -> Plan | None:
    """Write the winner with its measurement and return it.

    A schedule of ours has its receipt beside it, so that `quartet train` takes it at once. What the search
    may have missed is written in any case. Without a winner nothing else is, and what an earlier, shorter
    search of the run left is removed.
    """
    folder = run.folder
    receipt_file = receipt_path(folder.best_plan)
    if result.winner is None or result.receipt is None:
        receipt_file.unlink(missing_ok=True)
    if result.regret is None:
        folder.best_regret.unlink(missing_ok=True)
    else:
        folder.best_plan.parent.mkdir(mode=0o700, exist_ok=True)
        write_regret(result.regret, path=folder.best_regret)
    if result.winner is None:
        for path in (folder.best_plan, folder.best_command):
            path.unlink(missing_ok=True)
        return None
    plan = replace(result.winner.trial.plan, measurement=result.winner.comparison)
    folder.best_plan.parent.mkdir(mode=0o700, exist_ok=True)
    if result.receipt is not None:
        assert result.receipt.plan_key == plan.key
        write_receipt(replace(result.receipt, plan_digest=plan.digest), path=receipt_file)
    write_plan(plan, path=folder.best_plan)
    write_text_atomic(folder.best_command, command_text(plan, run=run, path=folder.best_plan))
    return plan


def command_text(plan: Plan, *, run: TuningRun, path: Path) -> str:
    """A shell script, every word quoted where it must be; it takes secrets from its environment."""
    train = ["quartet", "train", "--plan", str(path)]
    if run.config.device != "auto":
        train += ["--device", run.config.device]
    speedup = plan.measurement.speedup if plan.measurement is not None else None
    gain = f": {speedup.median:.2f}x ({speedup.low:.2f} to {speedup.high:.2f})" if speedup else ""
    return (
        "#!/bin/sh\n"
        f"# Trains with the best plan of the run {run.name}{gain}.\n"
        f"cd {shlex.quote(str(run.cwd))} || exit\n"
        f"exec {shlex.join(train)} -- \\\n"
        f"    {shell_words(run.command)}\n"
    )
