"""Runs one device's instruction list: any compute, any transport, no state from one run to the next.

Compute and transport are protocols, so the same loop trains Megatron's stages, drives a test on plain
tensors, and rehearses a cluster with compute that sleeps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from quartet_plugin.errors import InfrastructureError, PlanError, first_line
from quartet_plugin.model.custom_schedule import PAIRS_ONLY_SIMULATED
from quartet_plugin.rank.failure import is_device_failure
from quartet_plugin.runtime.records import Recorder
from quartet_plugin.schedule.action import Action, ActionKind, OverlappedPair
from quartet_plugin.schedule.instruction import (
    Compute,
    Instruction,
    Message,
    Post,
    Program,
    Side,
    Transfer,
    Wait,
    consumes,
    produces,
)

Tensor = Any
# A result on its way: the stage that reads it, forward or backward, the microbatch.
_Value = tuple[int, bool, int]


class StageCompute(Protocol):
    """The work of the stages of one device.

    `received` is the tensor of the neighbouring stage: None on the first stage's forward and on the last
    stage's backward. It belongs to the callee. The results of `forward`, `backward` and `input_grad` go to
    the next, or the previous, stage: None only where there is none. The runtime keeps a result until it has
    left, so the callee must not write to it, but may drop its reference at once.
    """

    def forward(self, stage: int, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run F; returns the activation for stage + 1."""

    def backward(self, stage: int, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run B, the full backward; returns the gradient for stage - 1."""

    def input_grad(self, stage: int, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run I; returns the gradient for stage - 1."""

    def weight_grad(self, stage: int, microbatch: int) -> None:
        """Run W, after the I of the same stage and microbatch."""


@runtime_checkable
class PairCompute(StageCompute, Protocol):
    """Work that can run a forward and a backward beside each other."""

    def pair(
        self, forward: Action, backward: Action, received: Tensor | None, gradient: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run both; returns what the forward sends to the next stage and the backward to the one before."""


class Transport(Protocol):
    """Moves boundary tensors between devices. Nothing is pending when a run has ended."""

    def post(self, transfers: Sequence[tuple[Transfer, Tensor | None]]) -> None:
        """Start transfers without blocking, in this order; the tensor is the one to send, None for a RECV."""

    def wait(self, transfer: Transfer) -> Tensor | None:
        """Block until a posted transfer is over; returns the tensor of a RECV, None for a SEND.

        On a GPU the current stream waits, not the host.
        """

    def end(self) -> None:
        """Wait for the sends whose wait was put off: the run has ended, and nothing may be pending."""

    def abort(self) -> None:
        """Drop the pending transfers after an error; may be called at any time and does not raise."""


@dataclass(frozen=True, slots=True)
class _ActionStep:
    """A Compute instruction, with where its input comes from and where its result goes."""

    action: Action
    reads: _Value | None
    writes: _Value | None


@dataclass(frozen=True, slots=True)
class _PairStep:
    """A Compute instruction of two actions that run beside each other."""

    forward: _ActionStep
    backward: _ActionStep

    @property
    def action(self) -> OverlappedPair:
        """Both actions."""
        return OverlappedPair(self.forward.action, self.backward.action)


_Step = _ActionStep | _PairStep | Post | Wait


class Executor:
    """One device's instructions, prepared to be run any number of times."""

    def __init__(self, program: Program, *, device: int) -> None:
        """`device` is the index in `program.instructions`."""
        self.program = program
        self.device = device
        num_stages = len(program.placement)
        self._steps = [_prepare(instruction, num_stages) for instruction in program.instructions[device]]
        self._computed = [each for each in program.instructions[device] if isinstance(each, Compute)]
        self.num_runs = 0
        # Those of the last run.
        self.executed: list[Action] = []

    @property
    def actions(self) -> list[Action]:
        """The device's actions in order: those that a recorder's entries belong to."""
        return [action for instruction in self._computed for action in instruction.parts]

    def run(self, compute: StageCompute, transport: Transport, recorder: Recorder) -> None:
        """Execute every instruction once; `num_runs` and `executed` tell of it afterwards.

        An exception gets a note that names the action. Raises InfrastructureError, naming the message, when a
        transfer fails, unless this device has failed: its exception is raised unchanged.
        """
        calls: dict[ActionKind, Callable[[int, int, Tensor | None], Tensor | None]] = {
            ActionKind.F: compute.forward,
            ActionKind.B: compute.backward,
            ActionKind.I: compute.input_grad,
            ActionKind.W: lambda stage, microbatch, _: compute.weight_grad(stage, microbatch),
        }
        values: dict[_Value, Tensor] = {}
        self.executed = executed = []
        recorder.begin()
        try:
            for step in self._steps:
                if isinstance(step, _ActionStep):
                    received = None if step.reads is None else values.pop(step.reads)
                    stage, kind, microbatch = step.action
                    recorder.starts()
                    result = calls[kind](stage, microbatch, received)
                    recorder.ends()
                    executed.append(step.action)
                    if step.writes is not None:
                        values[step.writes] = result
                    del received, result
                elif isinstance(step, _PairStep):
                    _run_pair(step, compute, recorder, values)
                    executed += step.action
                elif isinstance(step, Post):
                    transport.post([(t, _outgoing(t, values)) for t in step.transfers])
                else:
                    self._wait(step.transfer, transport, recorder, values)
            self._end(transport)
        except BaseException as error:
            transport.abort()
            instruction = step.action if isinstance(step, _ActionStep | _PairStep) else step
            error.add_note(f"quartet: device {self.device} was at {instruction}")
            raise
        assert not values, f"results that no action read: {list(values)[:8]}"
        self.num_runs += 1

    def _end(self, transport: Transport) -> None:
        try:
            transport.end()
        except RuntimeError as error:
            if is_device_failure(error):
                raise
            raise InfrastructureError(
                f"device {self.device}: the last sends of a step failed: {first_line(error)}"
            ) from error

    def _wait(
        self, transfer: Transfer, transport: Transport, recorder: Recorder, values: dict[_Value, Tensor]
    ) -> None:
        if transfer.side is Side.RECV:
            recorder.waits()
        try:
            tensor = transport.wait(transfer)
        except RuntimeError as error:
            if is_device_failure(error):
                raise
            raise InfrastructureError(
                f"device {self.device}: {transfer} with device {transfer.peer} failed: {first_line(error)}"
            ) from error
        if transfer.side is Side.RECV:
            values[_value_of(transfer.message)] = tensor


def _prepare(instruction: Instruction, num_stages: int) -> _Step:
    if not isinstance(instruction, Compute):
        return instruction
    if instruction.beside is None:
        return _prepare_action(instruction.action, num_stages)
    return _PairStep(*(_prepare_action(action, num_stages) for action in instruction.parts))


def _prepare_action(action: Action, num_stages: int) -> _ActionStep:
    forward = action.kind is ActionKind.F
    source, target = consumes(action, num_stages), produces(action, num_stages)
    return _ActionStep(
        action=action,
        reads=None if source is None else (action.stage, forward, action.microbatch),
        writes=None if target is None else (target, forward, action.microbatch),
    )


def _run_pair(
    step: _PairStep, compute: StageCompute, recorder: Recorder, values: dict[_Value, Tensor]
) -> None:
    """Run both actions of a pair; both have its times. Raises PlanError for work that cannot run them so."""
    if not isinstance(compute, PairCompute):
        raise PlanError(f"{step.action}: {PAIRS_ONLY_SIMULATED}")
    parts = (step.forward, step.backward)
    received = [None if part.reads is None else values.pop(part.reads) for part in parts]
    recorder.starts()
    results = compute.pair(step.forward.action, step.backward.action, *received)
    recorder.ends()
    recorder.ends_beside()
    for part, result in zip(parts, results, strict=True):
        if part.writes is not None:
            values[part.writes] = result


def _value_of(message: Message) -> _Value:
    return message.target_stage, message.is_forward, message.microbatch


def _outgoing(transfer: Transfer, values: dict[_Value, Tensor]) -> Tensor | None:
    return values.pop(_value_of(transfer.message)) if transfer.side is Side.SEND else None
