"""What commands share: options, the user's command, run folders."""

import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from quartet_plugin.errors import ConfigError, UsageError
from quartet_plugin.protocol.accepted_sources import EVERY_FUNCTION
from quartet_plugin.protocol.environment import ACCEPT_CHANGED_SOURCE

if TYPE_CHECKING:
    from quartet_plugin.cost.constants import Constants
    from quartet_plugin.cost.devices import DeviceSpec

Device = Literal["auto", "cpu", "cuda"]


def pass_on_changed_source(*, is_accepted: bool) -> None:
    """Let the ranks know: they inherit the variable from the launcher that this process starts."""
    if is_accepted:
        os.environ[ACCEPT_CHANGED_SOURCE] = EVERY_FUNCTION


def device_named(text: str) -> Device:
    """The value of `--device`. Raises UsageError for another word."""
    for device in get_args(Device):
        if device == text:
            return device  # type: ignore[no-any-return]
    raise UsageError(f"--device {text}: must be one of {', '.join(get_args(Device))}")


DeviceName = Annotated[
    Device, typer.Option(parser=device_named, metavar="<str>", help="The kind of device: auto, cpu or cuda.")
]
AcceptChangedSource = Annotated[
    bool,
    typer.Option("--accept-changed-source", hidden=True, help="Said below the table: see main.py."),
]
PlanFile = Annotated[Path, typer.Argument(help="A plan file.", show_default=False)]
PlanOrRun = Annotated[
    str,
    typer.Argument(
        metavar="PLAN.json|RUN",
        help="A plan file, or a run's folder or name for its best plan.",
        show_default=False,
    ),
]
TrialOfRun = Annotated[
    int | None,
    typer.Option(
        "--trial", metavar="N", min=0, help="With a run: the plan of this trial instead of the best plan."
    ),
]
RunName = Annotated[str | None, typer.Argument(metavar="[RUN]", help="A run's folder or name.")]
RunsFolder = Annotated[Path, typer.Option("--run-dir", help="The folder that contains the runs.")]
RUNS = Path("runs")
JsonSwitch = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
HardwareFolder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="A folder of device files, which override the library's."),
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A calibration of the cluster, written by `quartet calibrate`."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """One run of `quartet`, as `ctx.obj`.

    `user_command`: what follows `--`, None without it. `started_s`: when the process started, on the
    monotonic clock; limits on the whole command count from there.
    """

    user_command: tuple[str, ...] | None = None
    started_s: float = field(default_factory=time.monotonic)


def invocation(ctx: typer.Context) -> Invocation:
    """The typed `ctx.obj`."""
    return ctx.find_object(Invocation) or Invocation()


def user_command(ctx: typer.Context) -> tuple[str, ...]:
    """The user's command after `--`; raises UsageError where there is none."""
    words = invocation(ctx).user_command
    if not words:
        raise UsageError(
            f"{ctx.command_path}: the training command is missing; write it after --, as in: -- torchrun ..."
        )
    return words


def refuse_user_command(ctx: typer.Context) -> None:
    """Raise UsageError when something follows `--` although the command that was called runs nothing."""
    if invocation(ctx).user_command is not None:
        path = " ".join(filter(None, (ctx.command_path, ctx.invoked_subcommand)))
        raise UsageError(f"{path}: takes no training command; remove -- and the words after it")


def check_range(option: str, value: int, *, least: int = 1, most: int) -> None:
    """Raise UsageError for a number outside of `least` to `most`."""
    if not least <= value <= most:
        raise UsageError(f"{option} {value}: must be from {least} to {most}")


def check_seconds(option: str, value: float, *, least: float = 1.0, most: float = 1e6) -> None:
    """Raise UsageError for a number of seconds outside of `least` to `most`, NaN and infinity included."""
    if not least <= value <= most:
        raise UsageError(f"{option} {value:g}: must be from {least:g} to {most:g} seconds")


def check_folder(output: Path) -> None:
    """Raise ConfigError where the folder of an output is not there: before the work, not after it."""
    if not output.parent.is_dir():
        raise ConfigError(f"{output}: the folder {output.parent} does not exist; create it first")


def constants_of(calibration: Path | None) -> "Constants | None":
    """The constants that a calibration file corrected; None for the package's."""
    if calibration is None:
        return None
    from quartet_plugin.calibration.constants_fit import read_calibration

    return read_calibration(calibration).constants


def devices_of(hardware: Path | None) -> "Mapping[str, DeviceSpec] | None":
    """The devices of a folder of device files; None for the library's."""
    if hardware is None:
        return None
    from quartet_plugin.cost.devices import read_folder

    return read_folder(hardware)


def find_run(name: str | None, *, run_dir: Path) -> Path:
    """The run's folder; without a name the only run that there is.

    Raises ConfigError where there is no such run, UsageError where several could be meant.
    """
    if name is not None:
        # A plain name is a run's first: a folder of that name here may be anything.
        places = (run_dir / name, Path(name)) if "/" not in name else (Path(name), run_dir / name)
        for path in places:
            if (path / "config.json").is_file():
                return path
        raise ConfigError(
            f"{name}: no such run, here or in {run_dir}; name a folder that `quartet tune` wrote"
        )
    runs = all_runs(run_dir)
    if not runs:
        raise ConfigError(f"{run_dir}: contains no runs; name a run, or their folder with --run-dir")
    if len(runs) > 1:
        names = ", ".join(path.name for path in runs[:8]) + (", ..." if len(runs) > 8 else "")
        raise UsageError(f"{run_dir} holds {len(runs)} runs: name one of {names}")
    return runs[0]


def find_plan(name: str, *, run_dir: Path) -> Path:
    """The plan file: `name` itself, or the winner of the run of that name or folder.

    Raises ConfigError where there is no such run, or it has no winner.
    """
    path = Path(name)
    if path.is_file() or path.suffix == ".json":
        return path
    from quartet_plugin.tuner.history import open_run

    if not any((folder / "config.json").is_file() for folder in (path, run_dir / name)):
        raise ConfigError(f"{name}: no such plan file or run, here or in {run_dir}; name one of them")
    run = find_run(name, run_dir=run_dir)
    plan = open_run(run).folder.best_plan
    if not plan.is_file():
        raise ConfigError(f"{name}: {_no_winner_words(run)}")
    return plan


def _no_winner_words(run: Path) -> str:
    """Why a run has no winner, and what to do."""
    from quartet_plugin.tuner.history import read_history

    shown = path_here(run)
    history = read_history(run)
    nearest = history.finalists[0].number if history.finalists else None
    match history.state:
        case "running" | "elsewhere":
            return f"the run has no winner yet; see how far it is with `quartet status {shown}`"
        case "finished" if nearest is not None:
            return (
                "the run ended without a winner: no plan was proven faster than your command; "
                f"for the nearest plan (not proven faster) add --trial {nearest}"
            )
        case "finished":
            return (
                "the run ended without a winner: no plan was proven faster than your command; "
                f"`quartet trials {shown}` lists its plans"
            )
        case _:
            return "the run has no winner yet; `quartet tune --resume` continues it"


def all_runs(run_dir: Path) -> list[Path]:
    """Every run in a folder, by name."""
    return sorted(path.parent for path in run_dir.glob("*/config.json"))


def train_words(script: Path) -> str:
    """The words that start a script, as one would type them here."""
    return shlex.join(["sh", path_here(script)])


def path_here(path: Path) -> str:
    """The path as one would type it here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
