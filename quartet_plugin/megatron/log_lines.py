"""Measures a Megatron without a `train_step`, from the line that it logs for every iteration.

Megatron logs on its last rank alone. When the run has ended by its own `--exit-interval`, all ranks get the
lines of that rank: the process groups may be gone, so they come through the launcher's store.
"""

import contextlib
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from quartet_plugin.megatron.arguments import Flags
from quartet_plugin.megatron.measure import MegatronMeter
from quartet_plugin.rank.rendezvous import Rendezvous
from quartet_plugin.rank.step_meter import StepResult

_ITERATION = re.compile(r"\biteration\s+(\d+)/\s*\d+ \|")
_ELAPSED_MS = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")
_LOSS = re.compile(r"\blm loss: ([-+.\dEe]+|nan|inf)")
_GRAD_NORM = re.compile(r"\bgrad norm: ([-+.\dEe]+|nan|inf)")

Line = tuple[float, float | None, float | None]


def logged_words(flags: Flags, words: Sequence[str], *, num_iterations: int) -> list[str]:
    """The words of a run that logs every iteration and ends by itself after `num_iterations`."""
    values: dict[str, Any] = {"log_interval": 1, "exit_interval": num_iterations}
    edited, _ = flags.edit(words, remove=set(values), append=flags.words_for(values))
    return edited


def parsed_line(line: str) -> Line | None:
    """Seconds, loss and gradient norm of an iteration's line, the last two None where it has none.

    None for any other line.
    """
    elapsed = _ELAPSED_MS.search(line)
    if elapsed is None or _ITERATION.search(line) is None:
        return None
    loss, norm = (pattern.search(line) for pattern in (_LOSS, _GRAD_NORM))
    return (
        float(elapsed[1]) / 1e3,
        None if loss is None else float(loss[1]),
        None if norm is None else float(norm[1]),
    )


class _WatchedStream:
    """A text stream that hands every whole line to `see`, and else behaves as the stream behind it."""

    def __init__(self, stream: Any, see: Any) -> None:
        self._stream = stream
        self._see = see
        self._rest = ""

    def write(self, text: str) -> int:
        """Write, and look at the lines that this completes."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._see(line)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class LogLineMeter(MegatronMeter):
    """The meter of one rank; `watch` before the script runs, `gather` when it has ended."""

    def watch(self, rendezvous: Rendezvous) -> None:
        """Look at what this process prints from now on."""
        self._rendezvous = rendezvous
        self._lines: list[Line] = []
        sys.stdout = _WatchedStream(sys.stdout, self._see)

    def wrap_choice(self, choose: Callable[..., Any]) -> Callable[..., Any]:
        """Keep the model and the function of the latest training step, which `choose` returns."""

        @functools.wraps(choose)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            function = choose(*args, **kwargs)

            @functools.wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                if "model" not in kwargs or kwargs.get("forward_only"):
                    return function(*args, **kwargs)
                is_first = not self._call
                self._call = {"model": kwargs["model"], "forward_backward_func": function}
                with self._modules if is_first else contextlib.nullcontext():
                    return function(*args, **kwargs)

            return run

        return chosen

    def gather(self) -> None:
        """Take over the lines of the rank that has logged; every rank must come."""
        everyone = self._rendezvous.all_gather("log lines", json.dumps(self._lines))
        lines = max((json.loads(text) for text in everyone), key=len)
        self._steps = [
            (seconds, StepResult(loss=loss, skipped=False, grad_norm=norm)) for seconds, loss, norm in lines
        ]

    def _see(self, text: str) -> None:
        line = parsed_line(text)
        if line is None:
            return
        self._lines.append(line)
        done = len(self._lines)
        self._files.move("warmup" if done < self._files.spec.warmup else "measure", done)
