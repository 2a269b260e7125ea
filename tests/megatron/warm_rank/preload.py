"""The imports of the tests' ranks of Megatron: those of a trial's."""

from quartet_plugin.megatron.preload import preload as preload_trial
from tests.megatron.argument_docs import keep_argument_docs


def preload(*, on_cpu: bool) -> None:
    """Import what every rank of a trial imports. Raises what the imports raise."""
    preload_trial(on_cpu=on_cpu)
    keep_argument_docs()
