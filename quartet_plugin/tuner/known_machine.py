"""What a run is told of its machine before it measures: a cluster file, an earlier calibration.

Both are copied into the run's folder when it begins, so that a resumed run stands on the same ground.
"""

from pathlib import Path

from quartet_plugin.calibration.constants_fit import read_calibration
from quartet_plugin.calibration.machine_prior import KnownMachine
from quartet_plugin.model.cluster import read_cluster
from quartet_plugin.model.files import read_json, write_json_atomic
from quartet_plugin.tuner.config import MachineConfig
from quartet_plugin.tuner.run_folder import RunFolder


def machine_of(config: MachineConfig, *, cwd: Path) -> KnownMachine:
    """What the files that `config` names hold. Raises ConfigError in one line."""
    return _read(
        cluster=None if config.cluster is None else cwd / config.cluster,
        calibration=None if config.calibration is None else cwd / config.calibration,
    )


def keep_machine(config: MachineConfig, *, cwd: Path, folder: RunFolder) -> None:
    """Copy the files into the run's folder. Raises ConfigError for one that cannot be read."""
    copies = {folder.machine_file: config.cluster, folder.calibration_file: config.calibration}
    for copy, source in copies.items():
        if source is None:
            copy.unlink(missing_ok=True)  # of a run that failed before it measured
        else:
            write_json_atomic(copy, read_json(cwd / source))


def kept_machine(folder: RunFolder) -> KnownMachine:
    """What the run was begun with."""
    cluster, calibration = folder.machine_file, folder.calibration_file
    return _read(
        cluster=cluster if cluster.exists() else None,
        calibration=calibration if calibration.exists() else None,
    )


def _read(*, cluster: Path | None, calibration: Path | None) -> KnownMachine:
    return KnownMachine(
        cluster=None if cluster is None else read_cluster(cluster),
        calibration=None if calibration is None else read_calibration(calibration),
    )
