"""Sums of squares in double precision that need little memory beside the tensor."""

from typing import Any

# Elements that are in double precision at a time: 2 x 64 MiB.
_MOST_ELEMENTS = 1 << 23


def sum_of_squares(tensor: Any) -> Any:
    """The sum of the tensor's squared elements, a double on its device.

    A gradient's shard may be a gigabyte on a device that training has filled: it is not converted as a whole.
    """
    parts = tensor.detach().reshape(-1).split(_MOST_ELEMENTS)
    return sum(part.double().square_().sum() for part in parts)
