"""The frame of an HTML page: one file that needs no network and runs no script.

All text is escaped. A content security policy forbids everything but this very style, so that what a name or
a message smuggles in stays text even where escaping had a hole.
"""

import base64
import hashlib
from collections.abc import Iterable
from html import escape

from quartet_plugin.report import markup
from quartet_plugin.report.style import STYLE


def document(title: str, sections: Iterable[str]) -> str:
    """The whole file of these sections of markup; empty ones are left out."""
    style = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{style}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n'
        f"<title>{markup.text(title)}</title>\n<style>{STYLE}</style>\n"
        "</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )
