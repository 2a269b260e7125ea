"""The adapter of Megatron-Bridge: a plan as values of its configuration, measured by its callbacks."""
