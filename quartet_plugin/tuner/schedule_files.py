"""The schedule files that `search.schedule` names: read, compared with the command's flags, and kept.

They are copied when a run begins, so that a resumed run reads the same.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import Command
from quartet_plugin.launchers.megatron_flags import StatedCounts, flags_of
from quartet_plugin.model.files import read_json, write_json_atomic
from quartet_plugin.space.config import SearchConfig, is_schedule_file
from quartet_plugin.space.written_schedules import WrittenSchedule, read_written_schedule
from quartet_plugin.tuner.run_folder import RunFolder


def schedule_files_of(search: SearchConfig, *, cwd: Path) -> dict[str, Path]:
    """The files that `search.schedule` names, by file name. Raises ConfigError for one name twice."""
    files: dict[str, Path] = {}
    for word in filter(is_schedule_file, search.schedule or ()):
        path = cwd / word
        if path.name in files:
            raise ConfigError(f"search.schedule: {path.name}: two files of this name; rename one of them")
        files[path.name] = path
    return files


def read_schedule_files(files: Mapping[str, Path]) -> dict[str, WrittenSchedule]:
    """The schedules of the files. Raises ConfigError or PlanError for one that cannot be executed."""
    return {name: read_written_schedule(path) for name, path in files.items()}


def check_schedule_files(search: SearchConfig, *, command: Command, cwd: Path) -> None:
    """Raise ConfigError for a file that cannot be executed, or fits no plan by the command's own flags."""
    counts = flags_of(command).counts(num_processes=command.num_processes)
    for name, written in read_schedule_files(schedule_files_of(search, cwd=cwd)).items():
        fault = _fault(written, search, counts=counts, num_processes=command.num_processes)
        if fault is not None:
            raise ConfigError(f"search.schedule: {name}: {fault}")


def _fault(
    written: WrittenSchedule, search: SearchConfig, *, counts: StatedCounts, num_processes: int | None
) -> str | None:
    """Why no layout of the search has the schedule's counts, as far as the flags tell."""
    num_devices, num_microbatches = written.num_devices, written.schedule.num_microbatches
    for name, requested, count, field in (
        ("pipeline_parallel", search.pipeline_parallel, num_devices, f"num_devices: {num_devices}"),
        ("virtual_stages", search.virtual_stages, written.chunks, f"placement: {written.chunks} a device"),
    ):
        if requested and count not in requested:
            asked = requested[0] if len(requested) == 1 else list(requested)
            return f"{field}; must be one of search.{name}, {asked}"
    if num_processes is not None and num_processes % num_devices:
        return f"num_devices: {num_devices}; must divide the {num_processes} processes of the command"
    if search.scaling is None:
        faults = written.faults(num_layers=counts.num_layers, whose="the command")
        if faults:
            return faults[0]
    batch = counts.global_batch_size
    if batch is not None and batch % num_microbatches:
        return f"num_microbatches: {num_microbatches}; must divide the command's global batch of {batch}"
    return None


def keep_schedule_files(search: SearchConfig, *, cwd: Path, folder: RunFolder) -> None:
    """Copy the files into the run's folder. Raises ConfigError for one that cannot be read."""
    shutil.rmtree(folder.schedules, ignore_errors=True)  # of a run that failed before it measured
    for name, path in schedule_files_of(search, cwd=cwd).items():
        folder.schedules.mkdir(exist_ok=True)
        write_json_atomic(folder.schedules / name, read_json(path))


def kept_schedules(search: SearchConfig, *, folder: RunFolder) -> dict[str, WrittenSchedule]:
    """The schedules of the copies that the run was begun with."""
    names = schedule_files_of(search, cwd=Path())
    return read_schedule_files({name: folder.schedules / name for name in names})
