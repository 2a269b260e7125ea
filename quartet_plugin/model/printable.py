"""Text of scripts, files and paths for a terminal: nothing in it moves the cursor, and no line is endless."""

MAX_LINE = 1_000


def printable(text: str, *, limit: int = MAX_LINE) -> str:
    """`text` as one line of at most about `limit` characters.

    What a terminal would act on, or show as something else, is written as Python writes it (`\\x1b`): control
    characters, line ends and tabs included, marks of the writing direction, lone surrogates. Of a longer
    text the middle is left out, since a message says what is wrong at its end; its length stands there.
    """
    if len(text) <= limit:
        line = escaped(text)
        if len(line) <= limit:
            return line
    head, tail = escaped(text[:limit]), escaped(text[-limit:])
    return f"{head[: 2 * limit // 3]}... ({len(text):,} characters) ...{tail[-(limit // 4) :]}"


def escaped(text: str) -> str:
    """`text` with every character escaped that is not printable; a space is."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
