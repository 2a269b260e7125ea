"""Pieces of HTML. Every word that is not markup already goes through `text`."""

import re
from collections.abc import Sequence, Set
from html import escape

from quartet_plugin.protocol.masking import masked


def text(words: str) -> str:
    """Words that stay words, inside elements and attributes, without secrets."""
    return escape(masked(words), quote=True)


# Characters of a long word between two places where it may be broken.
PIECE = 24


def breakable(words: str) -> str:
    """Words that may be broken after a +: a split of many stages is one long word.

    No piece is shorter than PIECE, so that a narrow column does not have a number a line.
    """
    pieces = [""]
    for part in re.split(r"(?<=\+)", text(words)):
        if len(pieces[-1]) >= PIECE:
            pieces.append("")
        pieces[-1] += part
    if len(pieces) > 1 and len(pieces[-1]) < PIECE:
        pieces[-2:] = ["".join(pieces[-2:])]
    return "<wbr>".join(pieces)


def section(heading: str, body: str) -> str:
    """A heading over markup; nothing without a body."""
    return f"<section>\n<h2>{text(heading)}</h2>\n{body}\n</section>" if body else ""


def pair(*sections: str) -> str:
    """Sections side by side where the page is wide enough."""
    shown = [section for section in sections if section]
    return f'<div class="pair">{"".join(shown)}</div>' if len(shown) > 1 else "".join(shown)


def figure(svg: str, caption: str) -> str:
    """A drawing with its caption."""
    return f"<figure>{svg}<figcaption>{text(caption)}</figcaption></figure>"


def by_width(wide: str, narrow: str) -> str:
    """Two drawings of the same, of which a narrow window shows the second."""
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'


def scrolled(svg: str, *, label: str) -> str:
    """A drawing that keeps its size and is moved sideways in a narrow window."""
    return f'<div class="scroll natural" {_region(label)}>{svg}</div>'


def _region(label: str) -> str:
    """The attributes that let a keyboard scroll a part sideways and a screen reader name it."""
    return f'role="region" tabindex="0" aria-label="{text(label)}"'


def details(summary: str, body: str) -> str:
    """Markup that is shown when its summary is chosen, by a pointer or a key."""
    return f"<details><summary>{text(summary)}</summary>{body}</details>"


def note(words: str) -> str:
    """A paragraph of plain words, less prominent than the page's text."""
    return f'<p class="note">{text(words)}</p>'


def pre(lines: Sequence[str]) -> str:
    """Lines to copy."""
    return f"<pre>{text(chr(10).join(lines))}</pre>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, label: str) -> str:
    """A table of plain words; `label` names it for a screen reader."""
    body = [f"<tr>{''.join(cell(breakable(words)) for words in row)}</tr>" for row in rows]
    return grid(heads, body, label=label)


def grid(heads: Sequence[str], rows: Sequence[str], *, label: str, numbers: Set[str] = frozenset()) -> str:
    """A table whose rows are markup already; the columns of `numbers` are aligned right."""
    cells = "".join(
        f'<th scope="col" class="number">{text(head)}</th>'
        if head in numbers
        else f'<th scope="col">{text(head)}</th>'
        for head in heads
    )
    top = f"<thead><tr>{cells}</tr></thead>" if any(heads) else ""
    return f'<div class="scroll" {_region(label)}><table>{top}<tbody>{"".join(rows)}</tbody></table></div>'


def cell(inner: str, *, style: str = "") -> str:
    """One cell of markup; `style` is a class of the page's."""
    return f'<td class="{style}">{inner}</td>' if style else f"<td>{inner}</td>"
