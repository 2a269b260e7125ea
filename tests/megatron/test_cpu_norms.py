"""The norm of gradients on the CPU device."""

import pytest
import torch

from quartet_plugin.megatron.cpu_device.norms import blockwise_l2_norm


@pytest.mark.parametrize("rows", [1, 7, 16384])
def test_small_gradients_beside_large_ones_count(rows: int) -> None:
    """Also of a tensor with millions of elements, few of which are large; torch's own norm loses some."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(rows, 192, generator=generator) * 1e-4
    gradients[:1] *= 3e3
    rest = torch.randn(5, generator=generator)
    norm, per_tensor = blockwise_l2_norm(65536, None, [[gradients, rest]], False)
    exact = (gradients.double().square().sum() + rest.double().square().sum()).sqrt()
    assert (norm.dtype, norm.shape, per_tensor) == (torch.float32, (1,), None)
    assert float(norm) == pytest.approx(float(exact), rel=3e-7)


def test_halves_have_the_norm_of_the_whole() -> None:
    gradients = torch.randn(4096, 192, generator=torch.Generator().manual_seed(1))
    gradients[64:] *= 1e-3
    whole, _ = blockwise_l2_norm(65536, None, [[gradients]], False)
    halves = [blockwise_l2_norm(65536, None, [[half]], False)[0] for half in gradients.chunk(2)]
    assert float(torch.cat(halves).double().norm()) == pytest.approx(float(whole), rel=3e-7)


def test_no_gradients_have_no_norm() -> None:
    assert float(blockwise_l2_norm(65536, None, [[]], False)[0]) == 0.0
