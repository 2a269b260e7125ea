# ruff: noqa: RUF001 (the table holds the characters themselves)
"""Text in any encoding of the terminal: a character that the encoding lacks is written as plain ASCII.

A letter on the screen is worth no traceback: `LC_ALL=C`, an old terminal and a pipe of Windows all lack some.
"""

import codecs
import io
from typing import TextIO

_PLAIN = "quartet-plain"
_ASCII = {
    "·": ".", "•": "*", "×": "x", "…": "...", "–": "-", "—": "-", "−": "-",
    "→": "->", "←": "<-", "↔": "<->", "⇒": "=>", "↑": "^", "↓": "v", "▶": ">", "◀": "<",
    "≤": "<=", "≥": ">=", "≈": "~", "±": "+-", "°": "deg", "²": "^2", "³": "^3", "µ": "u", "μ": "u",
    "‘": "'", "’": "'", "“": '"', "”": '"', "\N{NO-BREAK SPACE}": " ", "✓": "+", "✗": "x",
}  # fmt: skip
_HORIZONTAL = "─━┄┅┈┉╌╍═╴╶╸╺╼╾"
_VERTICAL = "│┃┆┇┊┋╎╏║╵╷╹╻╽╿"


def encodable(stream: TextIO) -> TextIO:
    """The stream, or one in its place, that takes any text; characters without an encoding become ASCII.

    Error handlers that the user has named (`PYTHONIOENCODING=latin-1:replace`) stay, and so does a stream
    that is no encoder, such as a test's.
    """
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    if codecs.lookup(stream.encoding).name == "ascii":
        writer = _AsciiWriter(
            stream.buffer,
            encoding="latin-1",
            errors="strict",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        writer.replaced = stream
        return writer
    if stream.errors in ("strict", "backslashreplace"):
        stream.reconfigure(errors=_PLAIN)
    return stream


class _AsciiWriter(io.TextIOWrapper):
    """Writes ASCII alone. Its encoding has another name: typer writes UTF-8 past a stream that is ASCII."""

    # It would close the buffer when it is collected.
    replaced: TextIO

    def write(self, text: str, /) -> int:
        """Write `text`; returns the number of characters written."""
        return super().write(text.encode("ascii", _PLAIN).decode("ascii"))


def _plain(error: UnicodeError) -> tuple[str, int]:
    """The ASCII text for the characters that an encoder refused, and where it goes on."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(_plain_character, error.object[error.start : error.end])), error.end


def _plain_character(character: str) -> str:
    if character in _ASCII:
        return _ASCII[character]
    if "─" <= character <= "╿":
        return "-" if character in _HORIZONTAL else "|" if character in _VERTICAL else "+"
    if "▀" <= character <= "▟":
        return "#"
    return character.encode("ascii", "backslashreplace").decode("ascii")


codecs.register_error(_PLAIN, _plain)
