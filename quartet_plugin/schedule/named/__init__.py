"""Every schedule of the literature that has a name, generated exactly."""

from quartet_plugin.schedule.named.registry import (
    NAMED,
    NamedSchedule,
    Offer,
    lookup,
    named,
    refusal_of,
)

__all__ = ["NAMED", "NamedSchedule", "Offer", "lookup", "named", "refusal_of"]
