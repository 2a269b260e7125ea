"""The drop-in entry: runs a pretrain script as python would, with a plan, as a trial, or unchanged.

    torchrun ... -m quartet_plugin.megatron [-m MODULE | SCRIPT] ARGS... [--quartet-plan FILE]

Without a plan and a trial only an argument group is added. With them Megatron's version and every seam are
checked before anything is changed.
"""

import argparse
import faulthandler
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from quartet_plugin.errors import QuartetError
from quartet_plugin.megatron import cpu_device
from quartet_plugin.megatron.cpu_device.startup import after_import
from quartet_plugin.model.accelerator import shows_accelerator
from quartet_plugin.protocol.environment import CONVERSION_FILE, PROFILE
from quartet_plugin.protocol.terminal import terminal_line
from quartet_plugin.rank.entry_options import USAGE, EntryOptions, add_group, read_command, run_program
from quartet_plugin.rank.failure import show_script_error
from quartet_plugin.rank.rendezvous import RankEnv, Rendezvous, agree_on_plan
from quartet_plugin.rank.session import Session, print_notes

if TYPE_CHECKING:
    from quartet_plugin.megatron.arguments import Flags
    from quartet_plugin.megatron.runtime.install import Prepared
    from quartet_plugin.megatron.seams import Seam, Wrapper
    from quartet_plugin.model.plan import Plan


def main() -> None:
    """Run the command line of this process; ends as the script ends."""
    try:
        command = read_command(sys.argv[1:])
    except QuartetError as error:
        print(f"quartet: {terminal_line(str(error))}", file=sys.stderr)
        raise SystemExit(int(error.exit_code)) from None
    if command is None:
        parser = argparse.ArgumentParser(prog="quartet_plugin.megatron", usage=USAGE, add_help=False)
        add_group(parser, EntryOptions())
        parser.print_help()
        return
    faulthandler.enable()
    sys.excepthook = show_script_error
    run(Session(command=command, rank_env=RankEnv.of(os.environ)))


def run(session: Session) -> None:
    """Prepare, run the script, and leave a record of how it ended where a trial asks for one."""

    def work() -> None:
        arguments = prepare(session)
        if session.files is not None:
            session.files.move("init", 0)
        run_program(session.command, arguments)

    session.run(work, on_end=lambda: _end_well(session), on_refusal=_refuse)


def _refuse(exit_code: int) -> NoReturn:
    raise SystemExit(exit_code) from None


def prepare(session: Session) -> list[str]:
    """Everything before the script runs; returns the script's arguments.

    Raises QuartetError for a bad plan or trial, an unsupported Megatron, or ranks that disagree.
    """
    options = session.options
    on_cpu = use_cpu(options)
    if on_cpu:
        cpu_device.ensure_environment()
    session.open_trial()
    is_passive = options.plan is None and options.trial is None and CONVERSION_FILE not in os.environ
    if not is_passive:
        from quartet_plugin.megatron.seams import check_version

        check_version()
    if on_cpu:
        cpu_device.install()
    if is_passive:
        from quartet_plugin.megatron.seams import ARGUMENTS

        group = {ARGUMENTS: partial(_with_group, options, on_cpu=on_cpu)}
        after_import(
            "megatron.training.arguments", lambda _: _install_if_possible(group, lacking="quartet flags")
        )
        after_import(
            "megatron.training.checkpointing",
            lambda _: _install_if_possible(_guard(None), lacking="checkpoint guard"),
        )
        return list(session.command.arguments)
    arguments = _change(session)
    return _with_cpu_flags(arguments) if on_cpu else arguments


def use_cpu(options: EntryOptions) -> bool:
    """Whether to train on the CPU device; looks at device nodes, since torch must not be imported yet."""
    if options.device != "auto":
        return options.device == "cpu"
    if importlib.util.find_spec("megatron") is None:
        return False
    return not shows_accelerator(os.environ)


def _change(session: Session) -> list[str]:
    """Apply the plan to the arguments and the environment, and put the seams in place."""
    from quartet_plugin.megatron import seams

    options, words = session.options, list(session.command.arguments)
    wrappers: dict[seams.Seam, seams.Wrapper] = {seams.ARGUMENTS: partial(_with_group, options)}
    plan, rendezvous = None, None
    version = seams.check_version()
    if options.plan is not None:
        rendezvous = Rendezvous.open(session.rank_env)
        plan = agree_on_plan(options.plan, rendezvous=rendezvous)
        if session.files is not None:
            session.files.plan_key = plan.key
    from quartet_plugin.megatron.arguments import Flags

    _, add_megatron_arguments = seams.resolve(seams.ARGUMENTS)
    flags = Flags(add_megatron_arguments)
    if plan is not None and rendezvous is not None:
        from quartet_plugin.megatron.apply import apply_plan

        words, check_tokenizer = apply_plan(
            plan,
            flags=flags,
            words=words,
            version=version,
            rendezvous=rendezvous,
            rank_env=session.rank_env,
        )
        wrappers[seams.TOKENIZER] = check_tokenizer
    if session.files is not None:
        words = _measured(session, flags, wrappers, words)
    elif CONVERSION_FILE in os.environ:
        from quartet_plugin.megatron.side_effects import conversion_words
        from quartet_plugin.model.conversion import Conversion
        from quartet_plugin.model.schema import read_record

        conversion = read_record(Conversion, Path(os.environ[CONVERSION_FILE]))
        words = conversion_words(conversion, flags=flags, words=words)
    # With the flags of the run: on a CPU its layers are other than the command's.
    as_run = _with_cpu_flags(words) if use_cpu(options) else words
    prepared = _runtime(session, plan, flags.values(as_run))
    if prepared is not None:
        from quartet_plugin.megatron.runtime.refusals import without_alignment

        off = flags.words_for(without_alignment(flags.values(words)))
        words, _ = flags.edit(words, remove=set(), append=off)
    if session.files is None:
        wrappers |= _guard(plan, is_custom=prepared is not None)
    for seam, wrapper in (prepared.wrappers if prepared is not None else {}).items():
        wrappers[seam] = seams.chain(wrappers.get(seam), wrapper)
    seams.install(wrappers)
    return words


def _measured(
    session: Session, flags: "Flags", wrappers: "dict[Seam, Wrapper]", words: list[str]
) -> list[str]:
    """The arguments of a trial, whose steps are measured, and compared or profiled on request."""
    from quartet_plugin.megatron import seams
    from quartet_plugin.megatron.measure import MegatronMeter
    from quartet_plugin.megatron.parity import ParityMeter
    from quartet_plugin.megatron.side_effects import parity_words, strip_side_effects

    words, left_out = strip_side_effects(flags, words)
    spec = session.files.spec
    if spec.is_compared:
        words = parity_words(flags, words, weights=spec.weights, save_weights=spec.save_weights)
    session.meter = MegatronMeter(session.files, neutralised=left_out, started_at=time.time())
    meter = session.meter
    if spec.is_compared:
        wrappers[seams.TRAIN_STEP] = seams.chain(meter.wrap, ParityMeter(session.files).wrap)
    else:
        wrappers[seams.TRAIN_STEP] = meter.wrap
    if PROFILE in os.environ:
        words = _profiled(session, wrappers, words)
    return words


def _profiled(session: Session, wrappers: "dict[Seam, Wrapper]", words: list[str]) -> list[str]:
    """Let the ranks of a trial measure their layers too; the arguments, extended for a simulated rank."""
    from quartet_plugin.megatron import seams
    from quartet_plugin.megatron.profiling import LayerProfiler, SimulatedRank

    profiler = LayerProfiler(session.files)
    profiler.prepare()
    wrappers[seams.TRAIN_STEP] = seams.chain(session.meter.wrap, profiler.wrap)
    simulated = SimulatedRank.of(os.environ[PROFILE])
    if simulated is None:
        return words
    simulated.simulate()
    wrappers[seams.ARGUMENTS] = seams.chain(wrappers[seams.ARGUMENTS], simulated.wrap_arguments)
    return [*words, "--fake-process-group"]


def _runtime(session: Session, plan: "Plan | None", args: argparse.Namespace) -> "Prepared | None":
    """The runtime for a plan with a custom schedule; None where a feature of the command refuses it."""
    if plan is None or plan.schedule.custom is None:
        return None
    from quartet_plugin.megatron.runtime.install import prepare_plan

    prepared, notes = prepare_plan(plan, args, on_cpu=use_cpu(session.options))
    print_notes(notes, rank_env=session.rank_env)
    if session.meter is not None and prepared is not None:
        from quartet_plugin.runtime.activation_tracker import ActivationTracker

        session.meter.runtime = prepared.runtime
        prepared.runtime.tracker = ActivationTracker()
    return prepared


def _guard(plan: "Plan | None", *, is_custom: bool = False) -> "dict[Seam, Wrapper]":
    """The guard that keeps the plan's stages with checkpoints and refuses to load them onto other stages.

    `is_custom`: the stages have the placement of the plan's custom schedule, not stock's.
    """
    from quartet_plugin.megatron.checkpoints import CheckpointGuard

    if plan is None:
        return CheckpointGuard().wrappers
    mapping = plan.mapping
    return CheckpointGuard(
        placement=plan.schedule.placement if is_custom else None,
        slots=None if mapping.is_stock else [(slot.node, slot.local) for slot in mapping.slots],
        has_plan=True,
    ).wrappers


def _with_group(
    options: EntryOptions, add_megatron_arguments: Callable[..., Any], *, on_cpu: bool = False
) -> Callable[..., Any]:
    def add_arguments_and_group(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_megatron_arguments(parser)
        add_group(parser, options)
        if on_cpu:
            # The parser is about to read sys.argv: only now it is certain that a Megatron script runs.
            sys.argv[1:] = _with_cpu_flags(sys.argv[1:])
        return parser

    return add_arguments_and_group


def _install_if_possible(wrappers: "Mapping[Seam, Wrapper]", *, lacking: str) -> None:
    """Install the conveniences of a start without a plan: any Megatron then runs, without them if need be."""
    from quartet_plugin.errors import SeamError
    from quartet_plugin.megatron import seams

    try:
        seams.install(wrappers)
    except SeamError as error:
        print(
            f"quartet: {terminal_line(str(error))}; running without the {lacking}",
            file=sys.stderr,
            flush=True,
        )


def _with_cpu_flags(words: list[str]) -> list[str]:
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], *cpu_device.required_flags(set(words[:end])), *words[end:]]


def _end_well(session: Session) -> None:
    """The script ended without an error; on the CPU device the process ends here too."""
    session.end_trial()
    if cpu_device.is_installed():
        cpu_device.exit_now()
