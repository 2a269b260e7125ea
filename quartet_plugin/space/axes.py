"""The axes of a plan: a name for each of its parts that a search may choose."""

from enum import StrEnum


class Axis(StrEnum):
    """The axes that a plan can vary; the first four are the paper's, the others the parallel layout's."""

    SCALING = "scaling"
    SPLIT = "split"
    SCHEDULE = "schedule"
    MAPPING = "mapping"
    DEGREES = "degrees"
    MICRO_BATCH = "micro_batch"
    RECOMPUTE = "recompute"
    OPTIONS = "options"
