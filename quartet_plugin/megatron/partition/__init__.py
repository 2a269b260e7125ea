"""Megatron's linears cut as a plan's tensor partition says: put in through the layer's specification."""
