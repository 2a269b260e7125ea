"""`quartet convert`: saves a checkpoint again, in the form that any split and placement can load."""

import re
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from quartet_plugin.cli.command import DeviceName, user_command
from quartet_plugin.cli.output import tell
from quartet_plugin.errors import ConfigError, ExitCode, InfrastructureError, StorageError

STOCK = "stock"
_ITERATION = re.compile(r"iter_(\d{7})")


def convert_command(
    ctx: typer.Context,
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A folder written by --save, or the folder of one iteration in it.", show_default=False
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="NEW", help="The folder to write; it must not exist.")
    ],
    to: Annotated[
        str,
        typer.Option(
            metavar="PLAN|stock",
            help="The stages of the converted checkpoint: a plan's, or the command's (stock).",
        ),
    ],
    weights_only: Annotated[
        bool,
        typer.Option("--weights-only", help="Omit the state of the optimizer and of the random generators."),
    ] = False,
    device: DeviceName = "auto",
) -> int:
    """Convert a Megatron checkpoint to another split, placement or layout."""
    from quartet_plugin.cli.plan_checks import check_before_start
    from quartet_plugin.cli.train import run_wrapped
    from quartet_plugin.launchers.command import ENTRY_MODULE, parse_command
    from quartet_plugin.model.conversion import FORMAT, TRACKER, Conversion
    from quartet_plugin.model.files import write_json_atomic
    from quartet_plugin.model.plan import read_plan
    from quartet_plugin.model.schema import dump
    from quartet_plugin.protocol.environment import CONVERSION_FILE, DEVICE_FLAG, PLAN_FLAG

    training = parse_command(user_command(ctx))
    if training.entry != ENTRY_MODULE:
        raise ConfigError(
            f"command {training.target!r}: only checkpoints of Megatron's own training scripts can be "
            "converted, not DeepSpeed's or Megatron-Bridge's"
        )
    folder, step = checkpoint_of(checkpoint, tracker=TRACKER)
    if output.exists() or output.is_symlink():
        raise ConfigError(f"{output}: exists; name a new folder")
    flags = [DEVICE_FLAG, device] if device != "auto" else []
    if to != STOCK:
        check_before_start(read_plan(Path(to)), command=training, path=Path(to))
        flags += [PLAN_FLAG, str(Path(to).absolute())]
    partial = _temporary_folder(output)
    try:
        conversion = Conversion(load=str(folder), save=str(partial), step=step, is_weights_only=weights_only)
        write_json_atomic(partial / "conversion.json", dump(conversion))
        environment = {CONVERSION_FILE: str(partial / "conversion.json")}
        code = run_wrapped(training, flags=flags, device=device, environment=environment)
        if code != ExitCode.DONE:
            return code
        if not (partial / FORMAT / TRACKER).is_file():
            raise InfrastructureError("the command ended without saving; its output above gives the reason")
        (partial / FORMAT).rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    tell(f"quartet: {folder} is in {output} for the stages of {to}")
    return int(ExitCode.DONE)


def checkpoint_of(path: Path, *, tracker: str) -> tuple[Path, int | None]:
    """The folder for `--load`, and the iteration if `path` names one; raises ConfigError without one."""
    place = path.absolute()
    match = _ITERATION.fullmatch(place.name)
    if match is not None and place.is_dir() and any(place.iterdir()):
        return place.parent, int(match[1])
    if not (place / tracker).is_file():
        raise ConfigError(
            f"{path}: not a checkpoint of Megatron; name the folder that --save wrote, with {tracker} in it"
        )
    return place, None


def _temporary_folder(output: Path) -> Path:
    """An empty folder on the same file system, so that the same nodes can access both."""
    try:
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.absolute().parent))
    except OSError as error:
        raise StorageError(f"{output}: cannot be written: {error.strerror}; name a writable place") from error
