"""Several trials at once: one coordinator hands plans out, workers measure them, here and on other hosts."""
