"""A Python that has the process-start hook, and fake frameworks that train nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from quartet_plugin.model.schema import dump
from quartet_plugin.protocol.environment import START, STARTED
from quartet_plugin.protocol.training_start import (
    START_FILE,
    STARTS_FOLDER,
    StartFile,
    fault_of,
    read_starts,
    words_of,
)

REPOSITORY = Path(__file__).parents[2]
HOOK = REPOSITORY / "quartet_plugin_start.pth"
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", START, STARTED)


def make_site(folder: Path) -> Path:
    """A folder of packages with the hook and the fakes; they print when they are imported."""
    site = folder / "site"
    for name in ("megatron/training", "deepspeed"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text("print('imported', __name__)\n")
    (site / HOOK.name).write_text(HOOK.read_text())
    return site


def environment(site: Path, **more: str) -> dict[str, str]:
    """For Pythons that read the site folder at their start, its .pth files included."""
    custom = site.parent / "custom"
    custom.mkdir(exist_ok=True)
    (custom / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(site)!r})\n")
    kept = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    path = os.pathsep.join([str(custom), str(site), str(REPOSITORY)])
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**kept, "PYTHONPATH": path, "PATH": programs, "OMP_NUM_THREADS": "1", **more}


def start_file(folder: Path, *flags: str) -> Path:
    """A start.json as a trial's folder has it."""
    (folder / STARTS_FOLDER).mkdir(parents=True)
    file = folder / START_FILE
    file.write_text(json.dumps(dump(StartFile(flags=flags))))
    return file


def assert_found(
    words: Sequence[str],
    folder: Path,
    variables: Mapping[str, str],
    *,
    world_size: int,
    variable: str | None,
    timeout_s: float,
) -> None:
    """Run a command that trains `train.py`, and assert that its ranks were found and that none trained.

    `variable` is the one that the ranks come from; QUARTET_START is among `variables`, and names a trial that
    is missing, so that every rank ends in the adapter's entry.
    """
    done = subprocess.run(
        words, env=variables, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    starts = read_starts(Path(variables[START]).parent)
    training = [start for start in starts if start.framework is not None]
    # Of several processes the first one that fails may end the others before they have begun.
    assert training, done.stdout + done.stderr
    assert {start.world_size for start in training} == {world_size}
    assert {start.ranks_from for start in training} == {variable}
    assert {start.framework for start in training} == {"Megatron"}
    assert all("train.py" in start.argv for start in training)
    assert fault_of(starts) is None
    if any(start.rank == 0 for start in training):
        assert f"{world_size} processes, ranks from {variable}" in str(words_of(starts))
    log = folder / "log"
    output = done.stdout + done.stderr + (log.read_text() if log.exists() else "")
    assert "missing.json" in output
    assert "trained" not in output
