"""Questions to a service that may be away for minutes: Slurm's controller, Kubernetes' API server."""

import time
from collections.abc import Callable

from quartet_plugin.errors import InfrastructureError

# How long a service may be away.
PATIENCE_S = 180.0


class NoAnswerError(InfrastructureError):
    """A service does not answer."""


class Patience:
    """Questions of one who has other work meanwhile: a trial that is watched keeps its lease by it."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def answer[T](self, ask: Callable[[], T]) -> T | None:
        """The answer to one question, which `ask` does not repeat; None without one.

        Raises NoAnswerError where there has been none for PATIENCE_S.
        """
        try:
            answer = ask()
        except NoAnswerError:
            now = time.monotonic()
            self._since_s = now if self._since_s is None else self._since_s
            if now - self._since_s >= PATIENCE_S:
                raise
            return None
        self._since_s = None
        return answer
