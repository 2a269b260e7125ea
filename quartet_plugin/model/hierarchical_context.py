"""The sizes of hierarchical context parallelism, which a command says and no plan changes.

The first counts neighbouring ranks, which exchange heads; the second the ranks of each ring.
"""

import re
from typing import Any

# The name in Megatron's arguments, and among a job's settings.
SIZES = "hierarchical_context_parallel_sizes"
_TEXT = re.compile(r"[1-9][0-9]{0,8}(\+[1-9][0-9]{0,8})*", re.ASCII)


def sizes_text(sizes: Any) -> str | None:
    """The text of Megatron's argument, `2+4`; None for no sizes, or another value than whole numbers."""
    text = "+".join(map(str, sizes)) if isinstance(sizes, list | tuple) else ""
    return text if _TEXT.fullmatch(text) else None


def sizes_of(text: Any) -> tuple[int, ...] | None:
    """The sizes of a text; None for another value."""
    if not (isinstance(text, str) and _TEXT.fullmatch(text)):
        return None
    return tuple(map(int, text.split("+")))
