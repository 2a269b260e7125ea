"""Compute that sleeps for an action's time, and a transport that delivers no earlier than a network.

The emulated device has a clock of its own, as a GPU does: the host's work between two actions costs time only
where the device is idle. A transfer takes as long as it really takes, and at least as long as the costs say.
"""

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from quartet_plugin.model.costs import StageCosts
from quartet_plugin.runtime.process_groups import Channels
from quartet_plugin.runtime.transport import Boundary, PairTransport
from quartet_plugin.schedule.action import Action, ActionKind, OverlappedPair
from quartet_plugin.schedule.instruction import Side, Transfer
from quartet_plugin.schedule.kernel import hidden_s

# One number crosses every boundary: when its producer ended, on the clock that all processes share. A
# transport hands out when it arrived.
BOUNDARY = Boundary(shape=(1,), dtype=torch.float64, device=torch.device("cpu"))

_PR_SET_TIMERSLACK = 29


def wake_on_time() -> None:
    """Ask the system to wake this process's threads when they are due, as far as it allows.

    Linux wakes sleepers up to 50 us late to save power unless a process minds, and on a busy machine behind
    others unless it goes before them. These sleep nearly always, so nobody has to wait for them.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with contextlib.suppress(OSError, AttributeError):
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))


def sleep_until(due_s: float) -> None:
    """Return at `due_s` of the monotonic clock, at once when it has passed. Rehearsals share few cores."""
    left_s = due_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)


class SleepingCompute:
    """The work of one device's stages: every action lasts as long as the costs say, times `scale`."""

    def __init__(self, costs: StageCosts, *, show: Callable[[str], None], scale: float = 1.0) -> None:
        """`show` gets every action's text before it starts."""
        self._last = costs.num_stages - 1
        self._show = show
        self._begin_s = self._free_s = 0.0
        self.start_s: list[float] = []
        self.end_s: list[float] = []
        self._forward_s = (costs.forward_s * scale).tolist()
        self._backward_s = (costs.backward_s * scale).tolist()
        self._input_grad_s = (costs.input_grad_s * scale).tolist()
        self._weight_grad_s = (costs.weight_grad_s * scale).tolist()
        exchange_s = np.zeros((2, costs.num_stages)) if costs.exchange_s is None else costs.exchange_s
        self._exchange_s = (exchange_s * scale).tolist()

    def begin(self, begin_s: float) -> None:
        """Begin a step at `begin_s`, from which `start_s` and `end_s` of every action count."""
        self._begin_s = self._free_s = begin_s
        self.start_s, self.end_s = [], []

    def forward(self, stage: int, microbatch: int, received: Any) -> Any:
        """Sleep as long as the stage's F takes; what is sent to the next stage."""
        return self._act(f"{stage}F{microbatch}", self._forward_s[stage], received, sent=stage < self._last)

    def backward(self, stage: int, microbatch: int, received: Any) -> Any:
        """Sleep as long as the stage's B takes; what is sent to the stage before."""
        return self._act(f"{stage}B{microbatch}", self._backward_s[stage], received, sent=stage > 0)

    def input_grad(self, stage: int, microbatch: int, received: Any) -> Any:
        """Sleep as long as the stage's I takes; what is sent to the stage before."""
        return self._act(f"{stage}I{microbatch}", self._input_grad_s[stage], received, sent=stage > 0)

    def weight_grad(self, stage: int, microbatch: int) -> None:
        """Sleep as long as the stage's W takes."""
        self._act(f"{stage}W{microbatch}", self._weight_grad_s[stage], None, sent=False)

    def pair(self, forward: Action, backward: Action, received: Any, gradient: Any) -> tuple[Any, Any]:
        """Sleep as long as the pair takes, once both inputs are there; what is sent onward and back."""
        text = str(OverlappedPair(forward, backward))
        backward_s = self._backward_s if backward.kind is ActionKind.B else self._input_grad_s
        forward_s, gradient_s = self._forward_s[forward.stage], backward_s[backward.stage]
        hidden = hidden_s(
            forward_s, self._exchange_s[0][forward.stage], gradient_s, self._exchange_s[1][backward.stage]
        )
        inputs = [value for value in (received, gradient) if value is not None]
        last = max(inputs, key=lambda value: float(value[0]), default=None)
        result = self._act(text, forward_s + gradient_s - hidden, last, sent=True)
        # Times are kept for each action.
        self.start_s.append(self.start_s[-1])
        self.end_s.append(self.end_s[-1])
        is_last, is_first = forward.stage == self._last, backward.stage == 0
        return None if is_last else result, None if is_first else result.clone()

    def _act(self, text: str, duration_s: float, received: Any, *, sent: bool) -> Any:
        self._show(text)
        arrived_s = 0.0 if received is None else float(received[0])
        start_s = max(self._free_s, arrived_s)
        self._free_s = start_s + duration_s
        self.start_s.append(start_s - self._begin_s)
        self.end_s.append(self._free_s - self._begin_s)
        sleep_until(self._free_s)
        return torch.full((1,), self._free_s, dtype=torch.float64) if sent else None


class DelayedTransport(PairTransport):
    """The real transport; a tensor arrives no earlier than its producer's end plus the costs' delay."""

    def __init__(
        self, channels: Channels, costs: StageCosts, *, show: Callable[[str], None], scale: float = 1.0
    ) -> None:
        """`show` gets the transfer's text before every wait."""
        super().__init__(channels, BOUNDARY)
        self._show = show
        self._forward_s: Sequence[float] = (costs.forward_transfer_s * scale).tolist()
        self._backward_s: Sequence[float] = (costs.backward_transfer_s * scale).tolist()

    def wait(self, transfer: Transfer) -> torch.Tensor | None:
        """Block until the transfer is over, and for a receive until the network would have brought it."""
        self._show(f"waiting for {transfer} from device {transfer.peer}")
        tensor = super().wait(transfer)
        if tensor is None or transfer.side is Side.SEND:
            return None
        source = transfer.message.source_stage
        delay_s = self._forward_s[source] if transfer.message.is_forward else self._backward_s[source]
        due_s = float(tensor[0]) + delay_s
        # Later than the network only where the real transport has taken longer.
        arrived_s = max(due_s, time.monotonic())
        sleep_until(due_s)
        return torch.full((1,), arrived_s, dtype=torch.float64)
