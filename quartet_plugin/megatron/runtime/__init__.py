"""Executes a lowered schedule: one device's instructions, its compute, its transfers and its records.

`executor` and `records` know neither Megatron nor a communication library; `transport` moves tensors with
`torch.distributed`; `programs` makes the instructions for any number of microbatches.
"""
