"""Makes text from elsewhere fit to show: as a line of a terminal or a log, and as a short reason."""

from quartet_plugin.model.printable import MAX_LINE, printable
from quartet_plugin.protocol.masking import masked


def terminal_line(text: str, *, limit: int = MAX_LINE) -> str:
    """`text` as one line: without secrets, printable and cut, whatever a script, a file or a path says."""
    return printable(masked(text), limit=limit)


def reason_line(text: str, *, limit: int) -> str:
    """`text` as one line for a file or a table: secrets masked, the rest in words, cut to `limit` characters.

    What is not printable is a blank, and several blanks are one.
    """
    shown = masked(text)[: 4 * limit]
    line = " ".join("".join(char if char.isprintable() else " " for char in shown).split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
