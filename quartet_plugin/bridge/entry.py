"""Runs a script that trains with Megatron-Bridge, with a plan, as a trial, or unchanged.

    torchrun ... -m quartet_plugin.bridge [-m MODULE | SCRIPT] ARGS... [--quartet-plan FILE]

The script's `pretrain` (or `finetune`) is handed a configuration with the plan's values, and one more
callback. No function of Megatron-Core is replaced.
"""

import faulthandler
import functools
import inspect
import os
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from quartet_plugin.errors import ConfigError, SeamError
from quartet_plugin.megatron import cpu_device
from quartet_plugin.megatron.cpu_device.startup import after_import
from quartet_plugin.megatron.entry import end_well, no_accelerator, refuse, use_cpu
from quartet_plugin.protocol.environment import CONVERSION_FILE, PROFILE
from quartet_plugin.rank.entry_options import command_of_process, place_on_path, run_program
from quartet_plugin.rank.failure import show_script_error
from quartet_plugin.rank.rendezvous import RankEnv, Rendezvous, agree_on_plan
from quartet_plugin.rank.session import Session

USAGE = "python -m quartet_plugin.bridge [-m MODULE | SCRIPT] ARGS... [--quartet-plan FILE]"
PRETRAIN = "megatron.bridge.training.pretrain"


def main() -> None:
    """Run the command line of this process; ends as the script ends."""
    command = command_of_process(sys.argv[1:], usage=USAGE)
    if command is None:
        print(f"usage: {USAGE}")
        return
    faulthandler.enable()
    sys.excepthook = show_script_error
    run(Session(command=command, rank_env=RankEnv.of(os.environ)))


def run(session: Session) -> None:
    """Prepare, run the script, and leave a record of how it ended where a trial asks for one."""

    def work() -> None:
        place_on_path(session.command)
        prepare(session)
        run_program(session.command, list(session.command.arguments))

    session.run(work, on_end=lambda: end_well(session), on_refusal=refuse)


def prepare(session: Session) -> None:
    """Everything before the script runs. Raises QuartetError for a bad trial, or one that asks for more."""
    options = session.options
    on_cpu = use_cpu(options)
    if on_cpu:
        cpu_device.ensure_environment()
    session.open_trial()
    session.refuse_smaller_batch("Megatron-Bridge")
    for name in (CONVERSION_FILE, PROFILE):
        if name in os.environ:
            raise ConfigError(f"{name}: not supported with Megatron-Bridge: only training is measured")
    if session.files is not None and session.files.spec.is_compared:
        raise ConfigError("Megatron-Bridge has no parity gate, because it has no custom schedules")
    if on_cpu:
        cpu_device.install(training=False)
    after_import(PRETRAIN, functools.partial(wrap, session, on_cpu=on_cpu))
    if session.files is not None:
        from quartet_plugin.bridge.measure import BridgeMeter

        session.meter = BridgeMeter(session.files, started_at=time.time())
        session.files.move("init", 0)


def wrap(session: Session, module: ModuleType, *, on_cpu: bool) -> None:
    """Let `pretrain` of the module train with the plan and the meter."""
    stock: Callable[..., Any] = module.pretrain
    signature = inspect.signature(stock)
    missing = {"config", "callbacks"} - set(signature.parameters)
    if missing:
        raise SeamError(f"{PRETRAIN}.pretrain: takes no {min(missing)}; megatron-bridge 0.3.1 has it")

    @functools.wraps(stock)
    def pretrain(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        for callback in change_configuration(session, call.arguments["config"], on_cpu=on_cpu):
            call.arguments["callbacks"] = _with_callback(call.arguments.get("callbacks"), callback)
        return stock(*call.args, **call.kwargs)

    module.pretrain = pretrain  # type: ignore[attr-defined]


def change_configuration(session: Session, config: Any, *, on_cpu: bool) -> list[Any]:
    """The plan, a trial's changes and the CPU's, in the user's configuration; the callbacks to add.

    Raises QuartetError.
    """
    from quartet_plugin.bridge.fields import arguments_of
    from quartet_plugin.bridge.side_effects import strip_side_effects

    if on_cpu:
        from quartet_plugin.bridge.cpu import prepare_for_cpu

        prepare_for_cpu(config)
    options, callbacks = session.options, []
    if options.plan is not None:
        rendezvous = Rendezvous.open(session.rank_env)
        rendezvous.agree_or_raise("device", no_accelerator(options))
        plan = agree_on_plan(options.plan, rendezvous=rendezvous)
        if session.files is not None:
            session.files.plan_key = plan.key

        from quartet_plugin.bridge.planned import (
            apply_plan,
            check_checkpoint,
            division_of_experts,
            vocabulary_callback,
        )
        from quartet_plugin.megatron.seams import installed_version

        experts = division_of_experts(config)
        apply_plan(
            plan,
            config,
            version=installed_version(),
            rendezvous=rendezvous,
            rank_env=session.rank_env,
            on_cpu=on_cpu,
        )
        callbacks.append(vocabulary_callback(plan))
        if session.files is None:
            check_checkpoint(plan, config, experts=experts)
    if session.meter is not None:
        as_written = arguments_of(config)
        session.meter.left_out(strip_side_effects(config), as_written=as_written)
        callbacks.append(session.meter.callback())
    return callbacks


def _with_callback(callbacks: Any, callback: Any) -> Any:
    """The user's callbacks, a list of them or a manager, with one more behind them."""
    if callbacks is None:
        return [callback]
    if isinstance(callbacks, list):
        return [*callbacks, callback]
    callbacks.add(callback)
    return callbacks
