"""Sums of squares, without a copy of the tensor in double precision."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quartet_plugin.rank import squares


class LargestDouble(TorchDispatchMode):  # type: ignore[misc]
    """Remembers the elements of the largest tensor in double precision."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype is torch.float64:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("shape", [(1000,), (37, 11), (0,), ()])
def test_parts_sum_to_the_whole(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squares, "_MOST_ELEMENTS", 64)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    with LargestDouble() as seen:
        found = squares.sum_of_squares(tensor)
    assert found.dtype is torch.float64
    assert float(found) == pytest.approx(float(tensor.double().square().sum()), rel=1e-12)
    assert seen.largest <= 64


def test_a_transposed_tensor_counts_whole() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    assert float(squares.sum_of_squares(tensor)) == 55.0
