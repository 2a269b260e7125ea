"""`quartet init`: a q.yaml to begin with, every key explained."""

from pathlib import Path
from typing import Annotated

import typer

from quartet_plugin.cli.output import show
from quartet_plugin.errors import ConfigError


def init_command(
    file: Annotated[
        Path,
        typer.Argument(metavar="[FILE]", help="The file to write; an existing file is never overwritten."),
    ] = Path("q.yaml"),
) -> None:
    """Write a q.yaml that lists every key as a comment, with its default and its meaning."""
    from quartet_plugin.model.files import write_text_atomic
    from quartet_plugin.tuner.config_template import config_text

    if file.exists():
        raise ConfigError(f"{file}: exists; name another file")
    write_text_atomic(file, config_text())
    show(f"wrote {file}: quartet tune --config {file} -- torchrun ...")
