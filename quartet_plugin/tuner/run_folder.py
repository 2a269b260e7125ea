"""A run's folder: its paths, and config.json, by which a run is resumed as it was begun."""

import shlex
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quartet_plugin.errors import ConfigError, StorageError
from quartet_plugin.model.axis_gains import FILE_NAME as AXES_NAME
from quartet_plugin.model.files import read_json, write_json_atomic
from quartet_plugin.model.shape_curve import FILE_NAME as SHAPES_NAME
from quartet_plugin.protocol.masking import is_same_command, masked_argv, num_same_words
from quartet_plugin.space.knobs.registry import BY_NAME
from quartet_plugin.study.storage import JOURNAL_NAME, SQLITE_NAME, STUDY_NAME, StudyStorage
from quartet_plugin.tuner.config import TuneConfig, parse_config

# What a resumed run may ask for anew: none of it changes what was measured.
_MAY_CHANGE = {
    ("study", "trials"),
    ("study", "patience"),
    ("study", "top_k"),
    ("study", "rounds"),
    ("study", "control"),
    ("study", "tensorboard"),
    ("trial", "deadline_s"),
    ("confirm", None),
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """A path inside of a run's folder."""

    name: str

    def __get__(self, folder: "RunFolder", owner: type["RunFolder"]) -> Path:
        return folder.path / self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The paths of a run."""

    path: Path

    config_file = _Entry("config.json")
    """q.yaml as it was read, and the user's command."""
    cluster_file = _Entry("cluster.json")
    """The nodes and slots that trial 0 ran on."""
    machine_file = _Entry("machine.json")
    """The cluster file that the run was given."""
    calibration_file = _Entry("calibration.json")
    """The calibration that the run was given."""
    schedules = _Entry("schedules")
    """Copies of the schedule files that the search names."""
    events_file = _Entry("events.jsonl")
    """The log of events, a line each."""
    trials = _Entry("trials")
    """The trials' folders."""
    depth_proxies = _Entry("cropped")
    """The folders of the trials' depth proxies."""
    drift_checks = _Entry("control")
    """The folders of the drift checks."""
    final = _Entry("final")
    """The folders of the final rounds' launches."""
    parity = _Entry("parity")
    """The parity gate's runs, with receipts beside their plans."""
    parity_weights = _Entry("parity/weights")
    """The weights that the parity gate's runs start from; removed when the tuner ends."""
    best_plan = _Entry("best/plan.json")
    """The winner."""
    best_command = _Entry("best/command.sh")
    """A shell line that trains with the winner."""
    best_regret = _Entry("best/regret.json")
    """The estimate of the regret."""
    best_axes = _Entry(f"best/{AXES_NAME}")
    """The gain of each axis of the winner."""
    best_shapes = _Entry(f"best/{SHAPES_NAME}")
    """Throughput against shape, where the search had several shapes."""
    full_size = _Entry("full-size")
    """The launches at full size of a run whose trials have fewer replicas."""
    full_plan = _Entry("best/full-size/plan.json")
    """The winner at full size."""
    full_command = _Entry("best/full-size/command.sh")
    """A shell line that trains with the winner at full size."""
    full_prediction = _Entry("best/full-size/prediction.json")
    """The prediction of the winner at full size, of the user's command, and the speedup."""

    @property
    def train_command(self) -> Path:
        """The shell line that trains with the winner: at full size where trials had a part of the job."""
        return self.full_command if self.full_command.is_file() else self.best_command

    @property
    def has_study(self) -> bool:
        """Whether a study was begun, in the folder or on a server."""
        return any((self.path / name).exists() for name in (SQLITE_NAME, JOURNAL_NAME, STUDY_NAME))

    @property
    def is_begun(self) -> bool:
        """Whether a study was begun; or the baseline was measured, or launched by a tuner that was killed.

        A run that has only failed may begin again.
        """
        return self.has_study or not all(map(_has_failed, self.trial(0).glob("attempt-*")))

    def trial(self, number: int) -> Path:
        """One trial's folder."""
        return self.trials / f"{number:06d}"

    def drift_check(self, num_tried: int) -> Path:
        """The folder of the baseline's re-measurement after this number of trials."""
        return self.drift_checks / f"{num_tried:06d}"

    def depth_proxy(self, number: int) -> Path:
        """The folder of a trial's model with fewer layers."""
        return self.depth_proxies / f"{number:06d}"

    def full_size_launch(self, number: int, *, round_number: int) -> Path:
        """The folder of a launch at full size, as `final_launch` names it."""
        return self.full_size / f"{number:06d}-round-{round_number + 1}"

    @property
    def full_size_launches(self) -> list[Path]:
        """The folders of all launches at full size so far."""
        return sorted(self.full_size.glob("*-round-*"))

    def final_launch(self, number: int, *, round_number: int) -> Path:
        """The folder of a trial's plan in one of the final rounds, both counted from 0."""
        return self.final / f"{number:06d}-round-{round_number + 1}"

    def final_launches(self) -> dict[int, dict[int, Path]]:
        """The folders of the final rounds' launches so far, by trial and round, both counted from 0."""
        launches: dict[int, dict[int, Path]] = {}
        for path in sorted(self.final.glob("*-round-*")):
            number, _, round_number = path.name.partition("-round-")
            if number.isdecimal() and round_number.isdecimal() and int(round_number) > 0:
                launches.setdefault(int(number), {})[int(round_number) - 1] = path
        return launches

    @property
    def num_final_rounds(self) -> int:
        """The number of final rounds that were begun."""
        return max((1 + max(rounds) for rounds in self.final_launches().values()), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRun:
    """A run as it was begun: its folder, configuration, the user's command and where that starts.

    A run that is read back without its command has the secrets in it masked, as they are on disk.
    `cores_per_trial` is the number of processor cores that each trial may use; None where trials do not
    train on this host's processor, or the run was begun by a version that did not keep it.
    """

    folder: RunFolder
    config: TuneConfig
    command: tuple[str, ...]
    cwd: Path
    cores_per_trial: int | None = None

    @property
    def name(self) -> str:
        """The run's name."""
        return self.config.run or self.folder.path.name

    @property
    def storage(self) -> StudyStorage:
        """The storage of its study."""
        return StudyStorage(folder=self.folder.path, run=self.name, address=self.config.study.storage)


def prepare_folder(path: Path, *, is_resumed: bool) -> Path:
    """The run's folder, made where the run begins.

    Raises ConfigError where a run that begins has measured something already, or one to resume is not there;
    StorageError when it cannot be made.
    """
    folder = RunFolder(path=path.absolute())
    if is_resumed:
        if not folder.config_file.is_file():
            raise ConfigError(f"{path}: no run to resume; omit --resume to start one")
        return folder.path
    if folder.is_begun:
        raise ConfigError(f"{path}: the run exists; add --resume to continue it, or choose another `run:`")
    try:
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not stat.S_ISDIR(folder.path.lstat().st_mode):
            raise ConfigError(f"{path}: is a symbolic link; a run needs a real folder")
    except FileExistsError as error:
        raise ConfigError(f"{path}: is not a folder; choose another `run:`") from error
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be created: {error.strerror}; name a folder that can with --run-dir"
        ) from error
    return folder.path


def _has_failed(attempt: Path) -> bool:
    """Whether the attempt has a result, and not one of a measured launch."""
    try:
        result = read_json(attempt / "result.json")
    except ConfigError:
        return False
    return isinstance(result, dict) and result.get("outcome") not in ("OK", "UNSTABLE")


def create_run(
    path: Path, *, config: TuneConfig, command: Sequence[str], cores_per_trial: int | None = None
) -> TuningRun:
    """Start a run: write its configuration and command, and the cores of each trial.

    Raises ConfigError if the run already exists.
    """
    folder = RunFolder(path=prepare_folder(path, is_resumed=False))
    run = TuningRun(
        folder=folder,
        config=config,
        command=tuple(command),
        cwd=Path.cwd(),
        cores_per_trial=cores_per_trial,
    )
    _write_config(run)
    return run


def resume_run(
    path: Path,
    *,
    config: TuneConfig | None,
    command: Sequence[str] | None,
    cores_per_trial: int | None = None,
) -> TuningRun:
    """The run of `begun_run`, whose configuration is written down where one is given.

    Whoever gives the command holds the run's lease: what a killed tuner left half-written is removed.
    `cores_per_trial`, where given, replaces what the run was begun with: nothing was measured with that.
    """
    run = begun_run(path, config=config, command=command)
    if cores_per_trial is not None:
        run = replace(run, cores_per_trial=cores_per_trial)
    if command is not None:
        _remove_torn(run.folder)
    if config is not None:
        _write_config(run)
    return run


def begun_run(path: Path, *, config: TuneConfig | None, command: Sequence[str] | None) -> TuningRun:
    """The run in `path` with its configuration and command; nothing is written.

    `config` and `command`, where given, must be those it was begun with, but for what changes no measurement
    (the number of trials, the final rounds, the deadline). Raises ConfigError with the first difference.
    """
    folder = RunFolder(path=prepare_folder(path, is_resumed=True))
    data = read_json(folder.config_file)
    if not isinstance(data, dict) or not _is_command(data.get("command")):
        raise ConfigError(f"{folder.config_file}: command: must be a list of words")
    if not isinstance(data.get("cwd"), str):
        raise ConfigError(f"{folder.config_file}: cwd: must be the folder that the command starts in")
    cores_per_trial = data.get("cores_per_trial")
    if cores_per_trial is not None and not (type(cores_per_trial) is int and cores_per_trial > 0):
        raise ConfigError(
            f"{folder.config_file}: cores_per_trial: must be a number of cores from 1 on, or null"
        )
    begun = parse_config(_unfilled(_with_auto(data.get("config"))), where=str(folder.config_file))
    begun_with = masked_argv(data["command"])
    if command is not None and not is_same_command(data["command"], command):
        difference = _difference(begun_with, masked_argv(command))
        raise ConfigError(
            f"{path}: the run was started with another command: {difference}; "
            "give the same one, or choose another `run:`"
        )
    if config is not None:
        _refuse_changes(begun, config, path=path)
    return TuningRun(
        folder=folder,
        config=begun if config is None else config.model_copy(update={"run": begun.run}),
        command=tuple(begun_with if command is None else command),
        cwd=Path(data["cwd"]),
        cores_per_trial=cores_per_trial,
    )


def _remove_torn(folder: RunFolder) -> None:
    """Temporary files of a writer that was killed before the rename; those of trials are the trials' own."""
    for place in (folder.path, folder.best_plan.parent):
        for torn in (*place.glob(".*.tmp"), *place.glob(".*.draft")):
            torn.unlink(missing_ok=True)


def _difference(begun: Sequence[str], now: Sequence[str]) -> str:
    """The first words in which two commands differ, with the word before: a flag with its value."""
    same = num_same_words(begun, now)
    was, here = (shlex.join(words[max(0, same - 1) : same + 2])[:100] for words in (begun, now))
    return f"it has `{was}` where this one has `{here}`"


def _is_command(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(word, str) for word in value)


def _with_auto(data: Any) -> Any:
    """The configuration with `auto` for each knob that is null in config.json: not each has it by default."""
    search = data.get("search") if isinstance(data, dict) else None
    if not isinstance(search, dict):
        return data
    tuned = {name: "auto" for name, value in search.items() if value is None and name in BY_NAME}
    return {**data, "search": {**search, **tuned}}


def _unfilled(data: Any) -> Any:
    """config.json holds null where nothing is said, which q.yaml has no word for."""
    if isinstance(data, dict):
        return {key: _unfilled(value) for key, value in data.items() if value is not None}
    return [_unfilled(value) for value in data] if isinstance(data, list) else data


def _refuse_changes(begun: TuneConfig, config: TuneConfig, *, path: Path) -> None:
    before, after = begun.model_dump(), config.model_dump()
    for section in before:
        if section == "run":
            continue
        old, new = before[section], after[section]
        keys = old if isinstance(old, dict) else {None: None}
        for key in keys:
            was, now = (old, new) if key is None else (old[key], new[key])
            if was != now and (section, key) not in _MAY_CHANGE:
                name = section if key is None else f"{section}.{key}"
                raise ConfigError(
                    f"{path}: {name}: {now}; the run was started with {was}: keep it, or choose another "
                    "`run:`"
                )


def _write_config(run: TuningRun) -> None:
    from quartet_plugin import __version__

    content = {
        "schema_version": 1,
        "quartet_version": __version__,
        "config": run.config.model_dump(mode="json"),
        "command": masked_argv(run.command),
        "cwd": str(run.cwd),
        "cores_per_trial": run.cores_per_trial,
    }
    write_json_atomic(run.folder.config_file, content)
