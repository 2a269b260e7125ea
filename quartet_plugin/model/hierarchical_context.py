"""The sizes of hierarchical context parallelism, which a command says, or a plan with `a2a+p2p`.

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


def two_level_sizes(num_ranks: int) -> tuple[str, ...]:
    """The texts of two sizes above 1 with the product `num_ranks`, the smallest first size first."""
    divisors = (size for size in range(2, num_ranks // 2 + 1) if num_ranks % size == 0)
    return tuple(f"{size}+{num_ranks // size}" for size in divisors)


def sizes_of(text: Any) -> tuple[int, ...] | None:
    """The sizes of a text; None for another value."""
    if not (isinstance(text, str) and _TEXT.fullmatch(text)):
        return None
    return tuple(map(int, text.split("+")))
