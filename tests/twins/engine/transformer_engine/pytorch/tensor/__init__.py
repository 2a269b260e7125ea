"""Quantized tensors, which the stand-in does not have."""


class QuantizedTensor:
    """No tensor is one."""
