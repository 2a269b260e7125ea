"""Measures a machine's devices and links, as processes of its own under torchrun: it imports torch."""
