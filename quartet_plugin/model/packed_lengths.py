"""The documents that a job packs into its sequences, as its ranks counted them."""

from collections.abc import Iterable
from typing import Annotated

from quartet_plugin.model.schema import Bounds, record

_Mean = Annotated[float, Bounds(gt=0, le=2.0**80)]


@record
class PackedLengths:
    """Means over a job's sequences: tokens without padding, and the sum of the squared lengths of documents.

    A token attends to its own document alone, so the work of attention follows the squares.
    """

    tokens_per_sequence: _Mean
    squares_per_sequence: _Mean

    @property
    def attended_length(self) -> float:
        """The length of the document that a token lies in, in the mean of all tokens."""
        return self.squares_per_sequence / self.tokens_per_sequence


@record
class PackedTokens:
    """What the microbatches of an iteration hold that a rank computed: `num_tokens` without padding."""

    num_microbatches: Annotated[int, Bounds(ge=1, le=2**31)]
    num_tokens: Annotated[float, Bounds(ge=0, le=2.0**80)]
    squared_lengths: Annotated[float, Bounds(ge=0, le=2.0**80)]


def packed_lengths_of(counts: Iterable[PackedTokens], *, micro_batch_size: int) -> PackedLengths | None:
    """The means of what ranks counted; None where they counted nothing.

    Ranks that hold parts of one model copy count the same, and each copy has as many of them.
    """
    counts = tuple(counts)
    num_sequences = micro_batch_size * sum(count.num_microbatches for count in counts)
    num_tokens = sum(count.num_tokens for count in counts)
    if num_tokens <= 0:
        return None
    return PackedLengths(
        tokens_per_sequence=num_tokens / num_sequences,
        squares_per_sequence=sum(count.squared_lengths for count in counts) / num_sequences,
    )
