"""The result of a tuning run, and its winner on disk: best/plan.json, receipt, command.sh, and the regret."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quartet_plugin.launchers.engines import LOCAL, OF_SLURM
from quartet_plugin.model.axis_gains import AxisGains
from quartet_plugin.model.files import write_text_atomic
from quartet_plugin.model.history import DriftMeasurement
from quartet_plugin.model.measurement import FinalChoice, Objective, Regret
from quartet_plugin.model.plan import Plan, write_plan
from quartet_plugin.model.receipt import Receipt, needs_receipt, receipt_path, write_receipt
from quartet_plugin.model.schema import write_record
from quartet_plugin.model.shape_curve import ShapeCurve
from quartet_plugin.model.trial_record import FinishedTrial
from quartet_plugin.protocol.accepted_sources import accepted_text
from quartet_plugin.protocol.environment import ACCEPT_CHANGED_SOURCE
from quartet_plugin.protocol.masking import shell_words
from quartet_plugin.tuner.accepted_sources import accepted_before
from quartet_plugin.tuner.run_folder import TuningRun
from quartet_plugin.tuner.winner_choice import FinalistResult

if TYPE_CHECKING:
    from quartet_plugin.tuner.full_size import FullSizeWinner


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The result of a tuning run. `winner` is None where nothing beat the baseline.

    `stand_in` is the stock plan that `baseline` is, where the user's command does not fit into memory.
    `rankings` are the finalists in order of choice, `choice` is how the winner was chosen among them. `seed`
    is the study's. `receipt` is the parity gate's for a winner with a custom schedule, `drift_checks` the
    baseline's re-measurements during the search, `regret` the estimate of what the search missed.
    `shape_curve` is there where several shapes were searched, `full_size` where trials had fewer replicas.
    """

    objective: Objective
    seed: int
    baseline: Plan
    trials: tuple[FinishedTrial, ...]
    rankings: tuple[FinalistResult, ...]
    winner: FinalistResult | None
    choice: FinalChoice | None = None
    receipt: Receipt | None = None
    drift_checks: tuple[DriftMeasurement, ...] = ()
    regret: Regret | None = None
    axis_gains: AxisGains | None = None
    shape_curve: ShapeCurve | None = None
    stand_in: FinishedTrial | None = None
    full_size: "FullSizeWinner | None" = None

    @property
    def best(self) -> Plan:
        """The plan to train with."""
        return self.baseline if self.winner is None else self.winner.trial.plan


def write_best(result: TuneResult, *, run: TuningRun) -> Plan | None:
    """Write the winner with its measurement and return it.

    A custom schedule has its receipt beside it, so that `quartet train` takes it at once. The regret, the
    gains of the axes and the curve of shapes are written where there are some. Without a winner a stand-in
    is written; without either nothing is, and the files that an earlier, shorter search of the run left are
    removed.
    """
    folder = run.folder
    receipt_file = receipt_path(folder.best_plan)
    if result.winner is None or result.receipt is None:
        receipt_file.unlink(missing_ok=True)
    _write_or_remove(result.regret, path=folder.best_regret)
    _write_or_remove(result.axis_gains, path=folder.best_axes)
    _write_or_remove(result.shape_curve, path=folder.best_shapes)
    _write_full_size(result, run=run)
    if result.winner is None and result.stand_in is None:
        for path in (folder.best_plan, folder.best_command):
            path.unlink(missing_ok=True)
        return None
    plan = result.best
    if result.winner is not None:
        plan = replace(plan, measurement=replace(result.winner.comparison, choice=result.choice))
    folder.best_plan.parent.mkdir(mode=0o700, exist_ok=True)
    if result.receipt is not None:
        assert result.receipt.plan_key == plan.key
        write_receipt(replace(result.receipt, plan_digest=plan.digest), path=receipt_file)
    write_plan(plan, path=folder.best_plan)
    write_text_atomic(folder.best_command, command_text(plan, run=run, path=folder.best_plan))
    return plan


def _write_or_remove(content: Regret | AxisGains | ShapeCurve | None, *, path: Path) -> None:
    """Write a search's results beside its plan; without results, remove those of an earlier search."""
    if content is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_record(content, path=path)


def _write_full_size(result: TuneResult, *, run: TuningRun) -> None:
    """Write the winner with all replicas; without one what an earlier search of the run left is removed."""
    folder, winner = run.folder, result.full_size
    if winner is None:
        for path in (folder.full_plan, folder.full_command, folder.full_prediction):
            path.unlink(missing_ok=True)
        return
    folder.full_plan.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_plan(winner.plan, path=folder.full_plan)
    write_record(winner.result, path=folder.full_prediction)
    write_text_atomic(folder.full_command, command_text(winner.plan, run=run, path=folder.full_plan))


def command_text(plan: Plan, *, run: TuningRun, path: Path) -> str:
    """A shell script, every word quoted where it must be; it takes secrets from its environment.

    Raises StorageError where the event log cannot be read.
    """
    train = ["quartet", "train", "--plan", str(path)]
    if run.config.device != "auto":
        train += ["--device", run.config.device]
    elif any(node.has_no_accelerator for node in plan.made_for.nodes):
        train += ["--device", "cpu"]  # as `train` asks for, which never takes a processor by itself
    where = ""
    if run.config.launcher in OF_SLURM:
        train += _launcher_words("slurm", plan=plan, run=run)
    elif run.config.launcher != LOCAL:
        launched = shlex.join([*train, *_launcher_words(run.config.launcher, plan=plan, run=run)])
        lines = [
            "Start this on every node, as you start your command there. Or have the launcher of the",
            "trials start it there: on this host, once, with what follows in place of `quartet train ...`:",
            *launched.splitlines(),
        ]
        where = "".join(f"# {line}\n" for line in lines)
    speedup = plan.measurement.speedup if plan.measurement is not None else None
    gain = f": {speedup.median:.2f}x ({speedup.low:.2f}x to {speedup.high:.2f}x)" if speedup else ""
    return (
        "#!/bin/sh\n"
        f"# Trains with the best plan of the run {run.name}{gain}.\n"
        f"{where}"
        f"cd {shlex.quote(str(run.cwd))} || exit\n"
        f"{_accepted_sources_line(plan, run=run)}"
        f"exec {shlex.join(train)} -- \\\n"
        f"    {shell_words(run.command)}\n"
    )


def _accepted_sources_line(plan: Plan, *, run: TuningRun) -> str:
    """The line of the script that accepts the changed functions that the run accepted, in their sources then.

    It is empty where there are none, or where the plan replaces no function.
    """
    functions = accepted_before(run.folder) if needs_receipt(plan) else ()
    return f"export {ACCEPT_CHANGED_SOURCE}={shlex.quote(accepted_text(functions))}\n" if functions else ""


def _launcher_words(launcher: str, *, plan: Plan, run: TuningRun) -> list[str]:
    """The options with which `quartet train` starts a plan on its nodes."""
    site = [] if run.config.site is None else ["--site", str(run.cwd / run.config.site)]
    return ["--launcher", launcher, "--nodes", str(len(plan.made_for.nodes)), *site]
