"""Who this process is, as torchrun or the deepspeed launcher tells it."""

import os
from collections.abc import Mapping

from quartet_plugin.rank.rendezvous import RankEnv

# What the deepspeed launcher calls the same.
_OTHER_NAMES = {"LOCAL_WORLD_SIZE": "LOCAL_SIZE", "GROUP_RANK": "CROSS_RANK"}


def place_of(environment: Mapping[str, str] | None = None) -> RankEnv:
    """The place that the environment (default: this process's) names."""
    known = dict(os.environ if environment is None else environment)
    for name, other in _OTHER_NAMES.items():
        if name not in known and other in known:
            known[name] = known[other]
    return RankEnv.of(known)
