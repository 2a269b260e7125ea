"""Runs an unedited DeepSpeed script as python would, with a plan, measured, or merely passed through.

    torchrun ... -m quartet_plugin.deepspeed SCRIPT ARGS...
    deepspeed --num_gpus N --module quartet_plugin.deepspeed SCRIPT ARGS...

The plan is named by the `quartet` section of the ds_config, or by `--quartet-plan`. The entry replaces the
constructor of PipelineModule and `deepspeed.initialize`, and in a trial a few methods of engines.
"""

import faulthandler
import inspect
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quartet_plugin.deepspeed.cpu import use_cpu
from quartet_plugin.model.accelerator import shows_accelerator
from quartet_plugin.protocol.ds_config import (
    Settings,
    config_argument,
    config_label,
    load_config,
    parse_settings,
)
from quartet_plugin.rank.entry_options import EntryOptions, command_of_process, run_program
from quartet_plugin.rank.rendezvous import RankEnv
from quartet_plugin.rank.session import Session, exit_now, print_notes

USAGE = "python -m quartet_plugin.deepspeed [-m MODULE | SCRIPT] ARGS... [--quartet-plan FILE]"


@dataclass(slots=True, kw_only=True)
class DeepSpeedSession(Session):
    """A process of a DeepSpeed start, with its ds_config and the settings of the `quartet` section."""

    settings: Settings = field(default_factory=Settings)
    config: dict[str, Any] | None = None


def main() -> None:
    """Run the command line of this process; it ends as the script ends."""
    leading, rest = _launcher_words(sys.argv[1:])
    command = command_of_process(rest, usage=USAGE)
    if command is None:
        print(f"usage: {USAGE}")
        return
    faulthandler.enable()
    command = replace(command, arguments=(*leading, *command.arguments))
    run(DeepSpeedSession(command=command, rank_env=RankEnv.of(os.environ)))


def _launcher_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The script's arguments that the deepspeed launcher puts before the script, and the rest."""
    count = 0
    while count < len(words) and words[count].startswith(("--local_rank=", "--local-rank=")):
        count += 1
    return list(words[:count]), list(words[count:])


def run(session: DeepSpeedSession) -> None:
    """Prepare, run the script, and record how it ended."""

    def work() -> None:
        prepare(session)
        run_program(session.command, list(session.command.arguments))

    # A refusal skips the interpreter's teardown: communicator threads may wait there for other peers.
    session.run(work, on_end=session.end_trial, on_refusal=exit_now)


def prepare(session: DeepSpeedSession) -> None:
    """Everything before the script runs. Raises QuartetError for a wrong section, trial or version."""
    options = session.command.options
    session.open_trial()
    session.refuse_smaller_batch("DeepSpeed")
    _read_config(session)
    session.settings = _effective_settings(session.settings, options, in_trial=session.files is not None)
    _use_device(session)
    _install(session)
    if session.files is not None:
        session.files.move("init", 0)


def _read_config(session: DeepSpeedSession) -> None:
    """Read the ds_config that the command gives, as a file or in base64, with its section."""
    argument = config_argument(session.command.arguments)
    if argument is not None and (config := load_config(argument)) is not None:
        session.config = config
        session.settings = parse_settings(config, where=config_label(argument))


def _effective_settings(settings: Settings, options: EntryOptions, *, in_trial: bool) -> Settings:
    """The settings of the section, with the plan of `--quartet-plan` where there is one."""
    if options.plan is not None:
        return replace(settings, plan=options.plan, is_auto=False)
    if in_trial:
        # Trial 0 measures the user's configuration; a schedule file in it is part of that.
        return replace(settings, plan=None, is_auto=False)
    settings.refuse_auto()
    return settings


def _use_device(session: DeepSpeedSession) -> None:
    """Choose the CPU where there is nothing else, before torch or DeepSpeed is imported.

    DeepSpeed itself takes the CPU then; in training, where nobody asked for it, one line says so.
    """
    device = session.command.options.device
    if device == "cuda" or (device == "auto" and shows_accelerator(os.environ)):
        return
    if device == "auto" and session.files is None and "DS_ACCELERATOR" not in os.environ:
        line = "no accelerator is visible here: this trains on the CPU (--quartet-device cpu hides this line)"
        print_notes([line], rank_env=session.rank_env)
    use_cpu()


def _install(session: DeepSpeedSession) -> None:
    """Check every seam; then replace those of a plan, and in a trial those that are measured or left out."""
    import deepspeed

    from quartet_plugin.deepspeed import api, seams

    seams.check()
    wrappers: dict[seams.Seam, seams.Wrapper] = {
        seams.CONSTRUCTOR: lambda construct: _planned_constructor(session, construct),
        seams.INITIALIZE: lambda initialize: _planned_initialize(session, initialize),
    }
    if session.files is not None:
        from quartet_plugin.deepspeed.measure import BatchMeter

        session.meter = BatchMeter(session.files, started_at=time.time())
        wrappers |= session.meter.wrappers
        if session.files.spec.is_compared:
            from quartet_plugin.deepspeed.parity import switch_dropout_off

            switch_dropout_off()
    seams.install(wrappers)
    api.session_initialize = deepspeed.initialize


def _planned_constructor(session: DeepSpeedSession, constructor: Any) -> Any:
    """`PipelineModule.__init__` with the plan's stages."""
    signature = inspect.signature(constructor)

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        from quartet_plugin.deepspeed import api
        from quartet_plugin.deepspeed.planning import decide

        if session.config is None or session.settings.is_empty:
            constructor(self, *args, **kwargs)
            return
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        del arguments["self"]
        topology = arguments.get("topology")
        arguments["layers"] = list(arguments["layers"])
        agreed = decide(
            session.settings,
            specs=arguments["layers"],
            config=session.config,
            script_stages=arguments.get("num_stages") or 1 if topology is None else topology.get_dim("pipe"),
            topology=topology,
            rank_env=session.rank_env,
        )
        print_notes(agreed.notes, rank_env=session.rank_env)
        api.make_planned_module(self, agreed, constructor, arguments)

    return construct


def _planned_initialize(session: DeepSpeedSession, stock_initialize: Any) -> Any:
    """`deepspeed.initialize` with the plan's engine; in a trial the config loses its side effects."""

    def initialize(*args: Any, **kwargs: Any) -> Any:
        from quartet_plugin.deepspeed import api
        from quartet_plugin.deepspeed.config import strip_side_effects

        call = api.named_arguments(args, kwargs)
        initialized = api.initialize_planned(
            stock_initialize,
            call,
            settings=_settings_of_call(session, api.config_of(call)),
            edit=None if session.files is None else strip_side_effects,
            on_module=_start_of(session),
        )
        if session.meter is not None:
            session.files.plan_key = initialized.plan_key
            session.meter.watch(
                initialized.results[0], config=initialized.config, left_out=initialized.left_out
            )
        return initialized.results

    return initialize


def _settings_of_call(session: DeepSpeedSession, config: Mapping[str, Any] | None) -> Settings:
    """The session's settings; where the command names no file, those of the config that the script gives."""
    if session.config is not None or config is None:
        return session.settings
    in_trial = session.files is not None
    return _effective_settings(parse_settings(config), session.command.options, in_trial=in_trial)


def _start_of(session: DeepSpeedSession) -> Any:
    """The function that loads the weights of a parity trial, and writes them before that where it has to."""
    spec = None if session.files is None else session.files.spec
    if spec is None or not spec.is_compared:
        return None
    from quartet_plugin.deepspeed import parity

    def start(module: Any) -> None:
        if spec.save_weights is not None:
            parity.save_weights(module, Path(spec.save_weights))
            # DeepSpeed shares the named weights of a tied layer alone: its other parameters differ from stage
            # to stage, and those of the first stage are written.
            parity.load_weights(module, Path(spec.save_weights))
        if spec.weights is not None:
            parity.load_weights(module, Path(spec.weights))

    return start
