"""Runs an unedited DeepSpeed script as python would, with a plan, measured, or merely passed through.

    torchrun ... -m quartet_plugin.deepspeed SCRIPT ARGS...
    deepspeed --num_gpus N --module quartet_plugin.deepspeed SCRIPT ARGS...

The plan is named by the `quartet` section of the ds_config, or by `--quartet-plan`. What is replaced are the
constructor of PipelineModule and `deepspeed.initialize`, both called by whatever the script does.
"""

import faulthandler
import inspect
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quartet_plugin.deepspeed.failure import leave_error
from quartet_plugin.deepspeed.place import place_of
from quartet_plugin.deepspeed.settings import (
    AUTO,
    SECTION,
    Settings,
    config_file_of,
    parse_settings,
    read_config,
)
from quartet_plugin.errors import ConfigError, QuartetError, SeamError
from quartet_plugin.megatron.entry import run_program
from quartet_plugin.megatron.failure import describe_failure
from quartet_plugin.megatron.options import Command, Options, read_command
from quartet_plugin.megatron.ranks import AgreedRefusalError, Place

USAGE = "python -m quartet_plugin.deepspeed [-m MODULE | SCRIPT] ARGS... [--quartet-plan FILE]"
SUPPORTED = ((0, 19),)
_GRACE_S = 1.0
_DEVICE_NODES = ("nvidia0", "nvidiactl", "dxg", "kfd")


@dataclass(slots=True)
class Session:
    """One process of one start."""

    command: Command
    place: Place
    settings: Settings
    config: dict[str, Any] | None = None
    files: Any = None
    meter: Any = None

    @property
    def num_steps(self) -> int:
        """Training steps done so far."""
        return 0 if self.meter is None else int(self.meter.num_steps)


def main() -> None:
    """Run the command line of this process; ends as the script ends."""
    leading, rest = _launcher_words(sys.argv[1:])
    try:
        command = read_command(rest)
    except QuartetError as error:
        print(f"quartet: {error}", file=sys.stderr)
        raise SystemExit(int(error.exit_code)) from None
    if command is None:
        print(f"usage: {USAGE}")
        return
    faulthandler.enable()
    command = replace(command, arguments=(*leading, *command.arguments))
    run(Session(command=command, place=place_of(), settings=Settings()))


def _launcher_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What the deepspeed launcher puts before the script, which is for the script."""
    at = 0
    while at < len(words) and words[at].startswith(("--local_rank=", "--local-rank=")):
        at += 1
    return list(words[:at]), list(words[at:])


def run(session: Session) -> None:
    """Prepare, run the script, and leave a record of how it ended."""
    try:
        prepare(session)
        run_program(session.command, list(session.command.arguments))
        _end_of_script(session)
    except QuartetError as error:
        _record(session, error)
        _tell(session, error)
        # Not through the interpreter's end: communicator threads may wait there for peers that refused too.
        _leave(int(error.exit_code))
    except SystemExit as error:
        if error.code in (None, 0):
            _end_of_script(session)
        else:
            _record(session, error)
        raise
    except BaseException as error:
        _record(session, error)
        raise


def prepare(session: Session) -> None:
    """Everything before the script runs. Raises QuartetError for a wrong section, trial or version."""
    options = session.command.options
    if options.trial is not None:
        from quartet_plugin.megatron.records import RankFiles, read_order

        session.files = RankFiles(read_order(options.trial), session.place)
        session.files.start()
    file = config_file_of(session.command.arguments)
    if file is not None and file.exists():
        session.config = read_config(file)
        session.settings = parse_settings(session.config, where=str(file))
    session.settings = _settled(session.settings, options, in_trial=session.files is not None)
    _use_device(options)
    check_version()
    _install(session)
    if session.files is not None:
        from quartet_plugin.deepspeed.measure import BatchMeter

        session.meter = BatchMeter(session.files, started_at=time.time())
        session.files.move("init", 0)


def _settled(settings: Settings, options: Options, *, in_trial: bool) -> Settings:
    """The section, with the flag's plan where it says auto or nothing."""
    if options.plan is not None:
        return replace(settings, plan=options.plan, is_auto=False)
    if in_trial:
        # Trial 0 measures the user's own configuration; a schedule of theirs is part of it.
        return replace(settings, plan=None, is_auto=False)
    if settings.is_auto:
        raise ConfigError(
            f"{SECTION}.plan: {AUTO!r} is for trials of `quartet tune`; name a plan file to train with it"
        )
    return settings


def _use_device(options: Options) -> None:
    """Choose the CPU where there is nothing else, before torch or DeepSpeed is imported."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and visible.strip() in ("", "-1")
    on_cpu = options.device == "cpu" or (
        options.device == "auto"
        and (hidden or not any(Path("/dev", name).exists() for name in _DEVICE_NODES))
    )
    if not on_cpu:
        return
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # An all-reduce inside a node that would be compiled for a minute at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def check_version() -> str:
    """The installed DeepSpeed, or SeamError for one that is not known."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("deepspeed").partition("+")[0]
    except PackageNotFoundError as error:
        raise SeamError("deepspeed: not installed; pip install 'quartet-plugin[deepspeed]'") from error
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    if numbers not in SUPPORTED:
        raise SeamError(f"deepspeed {found}: not supported; install 0.19")
    return found


def _install(session: Session) -> None:
    """Put our constructor and our initialize where the script will find them."""
    import deepspeed
    from deepspeed.runtime.pipe.module import PipelineModule

    from quartet_plugin.deepspeed import api
    from quartet_plugin.deepspeed.planning import decide

    constructor = PipelineModule.__init__
    signature = inspect.signature(constructor)
    expected = ("layers", "num_stages", "topology", "loss_fn", "partition_method")
    if any(name not in signature.parameters for name in expected):
        raise SeamError(f"PipelineModule.__init__{signature}: not the known one; use DeepSpeed 0.19")

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        if session.config is None or session.settings.is_empty or hasattr(type(self), "quartet_choice"):
            constructor(self, *args, **kwargs)
            return
        bound = signature.bind(self, *args, **kwargs)
        arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
        topology = arguments.get("topology")
        own_stages = topology.get_dim("pipe") if topology is not None else arguments.get("num_stages") or 1
        arguments["layers"] = list(arguments["layers"])
        planned = decide(
            session.settings,
            specs=arguments["layers"],
            config=session.config,
            own_stages=own_stages,
            place=session.place,
        )
        api.tell(planned)
        api.make_planned(self, planned, constructor, arguments)

    def initialize(*args: Any, **kwargs: Any) -> Any:
        call = api.named_arguments(args, kwargs)
        results = api.initialize_planned(call, settings=session.settings, edit=_edit_of(session))
        if session.meter is not None:
            _watch(session, results[0])
        return results

    PipelineModule.__init__ = construct
    deepspeed.initialize = initialize


def _edit_of(session: Session) -> Any:
    """In a trial the config loses its side effects."""
    if session.files is None:
        return None
    from quartet_plugin.deepspeed.neutralise import neutralise

    return neutralise


def _watch(session: Session, engine: Any) -> None:
    from quartet_plugin.deepspeed.neutralise import silence

    session.files.plan_key = engine.quartet_plan_key
    neutralised = [*getattr(engine, "quartet_neutralised", []), *silence(engine)]
    session.meter.watch(engine, neutralised=neutralised)


def _tell(session: Session, error: QuartetError) -> None:
    """One line for the user: from launch rank 0 at once, from others only if it has not ended the start."""
    rank = session.place.launch_rank
    if rank != 0:
        time.sleep(_GRACE_S)
        if isinstance(error, AgreedRefusalError):
            return
    where = f"rank {rank}: " if rank else ""
    print(f"quartet: {where}{error}", file=sys.stderr, flush=True)


def _end_of_script(session: Session) -> None:
    """The script ended by itself in a trial that had not seen all its iterations."""
    if session.files is None:
        return
    if session.num_steps:
        session.meter.write()
        session.files.move("done", session.num_steps)
        session.files.close()
    else:
        _record(session, RuntimeError("the script ended before its first training step"))


def _record(session: Session, error: BaseException) -> None:
    """Write rank-K.err.json; the error itself matters more than a record that cannot be written."""
    if session.files is None:
        leave_error(error, place=session.place, num_steps=session.num_steps)
        return
    from quartet_plugin.megatron.measure import peak_memory_bytes

    try:
        session.files.write_error(
            describe_failure(error, num_steps=session.num_steps, peak_bytes=peak_memory_bytes())
        )
        session.files.close()
    except (QuartetError, OSError) as unwritten:
        print(f"quartet: the failure could not be recorded: {unwritten}", file=sys.stderr, flush=True)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
