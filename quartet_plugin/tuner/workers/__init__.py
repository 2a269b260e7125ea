"""Runs several trials at once: a coordinator gives plans to workers, here and on other hosts."""
