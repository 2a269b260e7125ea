"""Runs the user's script or module in this process as python would."""

import runpy
import sys
from pathlib import Path

from quartet_plugin.rank.entry_options import EntryCommand


def run_program(command: EntryCommand, arguments: list[str]) -> None:
    """Run a script or module as __main__, with sys.argv and sys.path[0] as python sets them."""
    sys.argv = [command.target, *arguments]
    if command.is_module:
        # `python -m` puts the current folder first, and so did the one that runs us.
        runpy.run_module(command.target, run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(command.target).resolve().parent)
    runpy.run_path(command.target, run_name="__main__")
