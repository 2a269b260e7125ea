"""The one function through which text from elsewhere reaches a terminal or a log."""

from quartet_plugin.model.printable import MAX_LINE, printable
from quartet_plugin.protocol.masking import masked


def terminal_line(text: str, *, limit: int = MAX_LINE) -> str:
    """`text` as one line: without secrets, printable and cut, whatever a script, a file or a path says."""
    return printable(masked(text), limit=limit)
