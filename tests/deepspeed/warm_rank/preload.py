"""The imports of the tests' ranks of DeepSpeed: those of a trial's."""

from quartet_plugin.deepspeed.preload import preload

__all__ = ["preload"]
