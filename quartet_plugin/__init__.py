"""Tunes shape, split, pipeline schedule and rank mapping of LLM pretraining with short live trials.

Importing this package patches nothing and imports neither torch nor Megatron.
"""

__version__: str


def __getattr__(name: str) -> str:
    """`__version__`, looked up when it is asked for: the look-up takes longer than the whole import."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("quartet-plugin")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0.0.0"
