"""What every command can reach through typer's context: the user's own command, and when we started."""

import time
from dataclasses import dataclass, field

import typer

from quartet_plugin.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """One run of `quartet`, as `ctx.obj`.

    `user_command`: what follows `--`, None without it. `started_s`: when the process started, on the
    monotonic clock; limits on the whole command count from there.
    """

    user_command: tuple[str, ...] | None = None
    debug: bool = False
    started_s: float = field(default_factory=time.monotonic)


def invocation(ctx: typer.Context) -> Invocation:
    """The typed `ctx.obj`."""
    found = ctx.find_object(Invocation)
    return Invocation() if found is None else found


def user_command(ctx: typer.Context) -> tuple[str, ...]:
    """The user's command after `--`; raises UsageError where there is none."""
    command = invocation(ctx).user_command
    if not command:
        raise UsageError(
            f"{ctx.command_path}: no training command; write it after --, as in: -- torchrun ..."
        )
    return command


def refuse_user_command(ctx: typer.Context) -> None:
    """Raise UsageError when something follows `--` although this command runs nothing."""
    if invocation(ctx).user_command is not None:
        raise UsageError(f"{ctx.command_path}: runs no training command; drop -- and what follows it")
