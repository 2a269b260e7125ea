"""The record of the actions that an executor ran, for the tuner to compare with the plan's."""

from typing import Any

from quartet_plugin.protocol.execution import ExecutedActions, digest_of_actions
from quartet_plugin.runtime.deferred import DeferredGradients
from quartet_plugin.runtime.executor import Executor
from quartet_plugin.schedule.action import ActionKind


def executed_actions(executor: Executor, gradients: DeferredGradients[Any]) -> ExecutedActions | None:
    """What ran in the training steps of one executor; None where none has ended."""
    if not executor.num_runs:
        return None
    num_full = sum(action.kind is ActionKind.B for action in executor.executed)
    return ExecutedActions(
        digest=digest_of_actions(executor.executed),
        num_steps=executor.num_runs,
        num_full_backwards=num_full * executor.num_runs,
        num_split_backwards=gradients.num_split,
    )
