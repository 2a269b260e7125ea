"""The imports of the tests' ranks of Megatron: those of a trial's."""

from quartet_plugin.megatron.preload import preload

__all__ = ["preload"]
