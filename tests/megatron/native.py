"""Megatron's own parser, built once for the tests that only edit words."""

import functools

from quartet_plugin.megatron.arguments import Flags


@functools.cache
def native_flags() -> Flags:
    """The flags of the installed Megatron."""
    from megatron.training.arguments import add_megatron_arguments

    return Flags(add_megatron_arguments)
