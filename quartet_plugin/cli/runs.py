"""Which run a command means: a folder, or a name below the folder that runs are kept in."""

from pathlib import Path

from quartet_plugin.errors import ConfigError, UsageError


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
    found = all_runs(run_dir)
    if not found:
        raise ConfigError(f"{run_dir}: no runs there; name one, or their folder with --run-dir")
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:8]) + (", ..." if len(found) > 8 else "")
        raise UsageError(f"{run_dir} holds {len(found)} runs: name one of {names}")
    return found[0]


def all_runs(run_dir: Path) -> list[Path]:
    """Every run in a folder, by name."""
    return sorted(path.parent for path in run_dir.glob("*/config.json"))
