"""How commands print: lines without secrets, printable and cut, whatever a script, a file or a path said.

JSON is printed by `typer.echo` as it is: it escapes what is not printable itself, and is never cut.
"""

import sys
import traceback

from quartet_plugin.model.printable import MAX_LINE
from quartet_plugin.protocol.terminal import terminal_line

# A flag is for copying: not even one with a thousand stages is cut.
MAX_FLAG_LINE = 100_000


def show(*lines: str, limit: int = MAX_LINE) -> None:
    """Print lines on the standard output."""
    for line in lines:
        print(terminal_line(line, limit=limit))


def say(line: str) -> None:
    """Print a line at once, while the command goes on."""
    print(terminal_line(line), flush=True)


def tell(*lines: str) -> None:
    """Print lines on the standard error."""
    for line in lines:
        print(terminal_line(line), file=sys.stderr, flush=True)


def tell_traceback() -> None:
    """Print the traceback of the exception that is being handled on the standard error.

    It is indented: a message of several lines cannot pass for one of this program.
    """
    tell(*(f"  {line}" for line in traceback.format_exc().rstrip("\n").split("\n")))
