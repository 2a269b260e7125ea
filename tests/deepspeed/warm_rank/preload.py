"""The imports of the tests' ranks of DeepSpeed: those of a trial's."""

from quartet_plugin.deepspeed.preload import preload as preload_trial
from quartet_plugin.rank import session


def preload(*, on_cpu: bool) -> None:
    """Import what every rank of a trial imports. Raises what the imports raise."""
    preload_trial(on_cpu=on_cpu)
    # torchrun ends the other ranks once the first one has refused, on a busy machine later than in a second.
    session._GRACE_S = 60.0
