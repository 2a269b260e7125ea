"""Tensor partition: how a linear layer's three products are cut over devices, as tables of steps."""
