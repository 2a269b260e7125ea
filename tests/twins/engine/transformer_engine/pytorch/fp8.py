"""FP8, which the stand-in does not have."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class FP8GlobalStateManager:
    """FP8 is off."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Whether FP8 is on."""
        return False


@contextmanager
def fp8_autocast(enabled: bool = False, **_kwargs: Any) -> Iterator[None]:
    """A context without FP8."""
    assert not enabled
    yield


fp8_model_init = fp8_autocast
