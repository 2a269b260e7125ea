"""A Python that has the process-start hook, and fake frameworks that train nothing."""

import json
import os
import sys
from pathlib import Path

from quartet_plugin.model.schema import dump
from quartet_plugin.protocol.environment import START, STARTED
from quartet_plugin.protocol.training_start import START_FILE, STARTS_FOLDER, StartFile

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
