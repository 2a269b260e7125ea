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

from quartet_plugin.errors import ConfigError
from quartet_plugin.megatron import cpu_device
from quartet_plugin.megatron.cpu_device.startup import after_import
from quartet_plugin.model.accelerator import shows_accelerator
from quartet_plugin.protocol.environment import CONVERSION_FILE, PROFILE
from quartet_plugin.protocol.program_words import end_of_options, with_flags
from quartet_plugin.protocol.terminal import terminal_line
from quartet_plugin.rank.entry_options import (
    USAGE,
    EntryOptions,
    add_group,
    command_of_process,
    place_on_path,
    run_program,
)
from quartet_plugin.rank.failure import show_script_error
from quartet_plugin.rank.rendezvous import AgreedRefusalError, RankEnv, Rendezvous, agree_on_plan
from quartet_plugin.rank.session import Session, print_notes

if TYPE_CHECKING:
    from quartet_plugin.megatron.arguments import Flags
    from quartet_plugin.megatron.runtime.install import Prepared
    from quartet_plugin.megatron.seams import Seam, Wrapper
    from quartet_plugin.model.plan import Plan


def main() -> None:
    """Run the command line of this process; ends as the script ends."""
    command = command_of_process(sys.argv[1:])
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
        # Before Megatron is looked for: a tree beside the script is the one that it trains with.
        place_on_path(session.command)
        arguments = prepare(session)
        if session.files is not None:
            session.files.move("init", 0)
        run_program(session.command, arguments)

    session.run(work, on_end=lambda: end_well(session), on_refusal=refuse)


def refuse(exit_code: int) -> NoReturn:
    """End the process of a start that is refused."""
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
        from quartet_plugin.megatron.seams import installed_version

        installed_version()
    if on_cpu:
        cpu_device.install()
    if is_passive:
        from quartet_plugin.megatron.seams.declared import ARGUMENTS

        group = {ARGUMENTS: partial(_with_group, options, on_cpu=on_cpu)}
        after_import(
            "megatron.training.arguments", lambda _: _install_if_possible(group, lacking="quartet flags")
        )
        after_import("megatron.training.checkpointing", lambda _: _install_passive_guard())
        return list(session.command.arguments)
    arguments = _change(session)
    return _with_cpu_flags(arguments) if on_cpu else arguments


def use_cpu(options: EntryOptions) -> bool:
    """Whether to train on the CPU device.

    `auto` means it where no accelerator is visible, in starts that train nothing for good: trials, profiles
    and conversions. In training it would hide a missing driver behind a run a thousand times too slow.
    """
    if options.device != "auto":
        return options.device == "cpu"
    return not _is_training(options) and lacks_accelerator()


def _is_training(options: EntryOptions) -> bool:
    return options.trial is None and CONVERSION_FILE not in os.environ


def lacks_accelerator() -> bool:
    """Whether Megatron is here without an accelerator; by device files, as torch must not be imported yet."""
    return importlib.util.find_spec("megatron") is not None and not shows_accelerator(os.environ)


def no_accelerator(options: EntryOptions) -> ConfigError | None:
    """Why a training start cannot go on as it is on this rank; None where it can."""
    if options.device != "auto" or not _is_training(options) or not lacks_accelerator():
        return None
    return ConfigError(
        "no accelerator is visible here; --quartet-device cpu (quartet train --device cpu) trains on the CPU"
    )


def _change(session: Session) -> list[str]:
    """Apply the plan to the arguments and the environment, and put the seams in place."""
    from quartet_plugin.megatron import optimizer_state, seams
    from quartet_plugin.megatron.seams import declared
    from quartet_plugin.megatron.support import has_known_parameters

    options, words = session.options, list(session.command.arguments)
    wrappers: dict[seams.Seam, seams.Wrapper] = {declared.ARGUMENTS: partial(_with_group, options)}
    plan, rendezvous = None, None
    version = seams.installed_version()
    if options.plan is not None:
        rendezvous = Rendezvous.open(session.rank_env)
        rendezvous.agree_or_raise("device", no_accelerator(options))
        plan = agree_on_plan(options.plan, rendezvous=rendezvous)
        if session.files is not None:
            session.files.plan_key = plan.key
    from quartet_plugin.megatron.arguments import Flags

    _, add_megatron_arguments = seams.locate(declared.ARGUMENTS)
    flags = Flags(add_megatron_arguments)
    if session.files is not None and (divisor := session.files.spec.batch_divisor) is not None:
        from quartet_plugin.megatron.fewer_nodes import on_fewer_nodes

        smaller = on_fewer_nodes(flags, words, divisor=divisor, num_processes=session.rank_env.world_size)
        words, session.stage_divisor = smaller.words, smaller.stage_divisor
    if plan is not None and rendezvous is not None:
        from quartet_plugin.megatron.apply import apply_plan

        words, check_tokenizer = apply_plan(
            plan,
            flags=flags,
            words=words,
            version=version,
            rendezvous=rendezvous,
            rank_env=session.rank_env,
            on_cpu=use_cpu(options),
        )
        if has_known_parameters(declared.TOKENIZER):
            wrappers[declared.TOKENIZER] = check_tokenizer
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
    wrappers |= _partition(plan, prepared)
    if prepared is not None:
        from quartet_plugin.megatron.runtime.refusals import without_alignment

        off = flags.words_for(without_alignment(flags.values(words)))
        words, _ = flags.edit(words, remove=set(), append=off)
    if session.files is None:
        wrappers |= _guard(plan, is_custom=prepared is not None, values=flags.values(words))
        wrappers |= optimizer_state.wrappers()
    for seam, wrapper in (prepared.wrappers if prepared is not None else {}).items():
        wrappers[seam] = seams.chain(wrappers.get(seam), wrapper)
    seams.install(wrappers)
    return words


def _measured(
    session: Session, flags: "Flags", wrappers: "dict[Seam, Wrapper]", words: list[str]
) -> list[str]:
    """The arguments of a trial, whose steps are measured, and compared or profiled on request."""
    from quartet_plugin.megatron import seams
    from quartet_plugin.megatron.compared_iterations import ComparedIterations
    from quartet_plugin.megatron.log_lines import LogLineMeter
    from quartet_plugin.megatron.measure import MegatronMeter
    from quartet_plugin.megatron.parity import ParityMeter
    from quartet_plugin.megatron.seams.declared import TRAIN_STEP
    from quartet_plugin.megatron.side_effects import parity_words, strip_side_effects, words_to_start_from

    # A plan leaves these flags alone: they are as the user wrote them.
    as_written = flags.values(words)
    words, left_out = strip_side_effects(flags, words)
    spec = session.files.spec
    if spec.is_compared:
        words = parity_words(flags, words, weights=spec.weights, save_weights=spec.save_weights)
    has_step = seams.known_function(TRAIN_STEP) is not None
    make_meter = MegatronMeter if has_step else LogLineMeter
    session.meter = make_meter(
        session.files,
        neutralised=left_out,
        as_written=as_written,
        started_at=time.time(),
        stage_divisor=session.stage_divisor,
    )
    if not has_step:
        return _logged(session, flags, wrappers, words)
    meter = session.meter
    if spec.is_compared:
        wrappers[TRAIN_STEP] = seams.chain(meter.wrap, ParityMeter(session.files).wrap)
    elif spec.num_compared is not None:
        start = ComparedIterations(session.files)
        wrappers[TRAIN_STEP] = seams.chain(start.wrap_beginning, meter.wrap, start.wrap_steps)
        if spec.weights is not None:
            words = words_to_start_from(spec.weights, flags=flags, words=words)
            wrappers |= start.load_timer()
    else:
        wrappers[TRAIN_STEP] = meter.wrap
    if PROFILE in os.environ:
        words = _profiled(session, flags, wrappers, words)
    return words


def _logged(session: Session, flags: "Flags", wrappers: "dict[Seam, Wrapper]", words: list[str]) -> list[str]:
    """The arguments of a trial whose times come from Megatron's log.

    Raises SeamError where more than times is to be measured.
    """
    from quartet_plugin.errors import SeamError
    from quartet_plugin.megatron.log_lines import logged_words
    from quartet_plugin.megatron.seams.declared import SCHEDULE_CHOICE, TRAIN_STEP

    spec = session.files.spec
    if spec.is_compared or PROFILE in os.environ:
        raise SeamError(f"{TRAIN_STEP.path}: not in this Megatron; only times of iterations can be measured")
    wrappers[SCHEDULE_CHOICE] = session.meter.wrap_choice
    session.meter.watch(Rendezvous.open(session.rank_env))
    return logged_words(flags, words, num_iterations=spec.num_iterations)


def _profiled(
    session: Session, flags: "Flags", wrappers: "dict[Seam, Wrapper]", words: list[str]
) -> list[str]:
    """Let the ranks of a trial measure their layers too; the arguments, extended for a simulated rank."""
    from quartet_plugin.megatron import seams
    from quartet_plugin.megatron.profiling import LayerProfiler, SimulatedRank
    from quartet_plugin.megatron.runtime.refusals import delays_engine_layers
    from quartet_plugin.megatron.seams.declared import ARGUMENTS, TRAIN_STEP

    profiler = LayerProfiler(session.files)
    as_run = _with_cpu_flags(words) if use_cpu(session.options) else words
    profiler.prepare(delays_te=delays_engine_layers(flags.values(as_run)))
    wrappers[TRAIN_STEP] = seams.chain(session.meter.wrap, profiler.wrap)
    simulated = SimulatedRank.of(os.environ[PROFILE])
    if simulated is None:
        return words
    simulated.simulate()
    wrappers[ARGUMENTS] = seams.chain(wrappers[ARGUMENTS], simulated.wrap_arguments)
    return with_flags(words, ["--fake-process-group"])


def _runtime(session: Session, plan: "Plan | None", args: argparse.Namespace) -> "Prepared | None":
    """The runtime for a plan with a custom schedule; None where a feature of the command refuses it.

    Raises AgreedRefusalError for ranks that are to profile their layers: both would defer weight gradients.
    """
    if plan is None or plan.schedule.custom is None:
        return None
    from quartet_plugin.megatron.runtime.install import prepare_plan

    if session.files is not None and PROFILE in os.environ:
        raise AgreedRefusalError(
            f"{PROFILE}: the plan's schedule is {plan.schedule.custom.label}; layers are profiled under "
            "Megatron's own schedules: omit --quartet-plan"
        )
    prepared, notes = prepare_plan(plan, args, on_cpu=use_cpu(session.options))
    print_notes(notes, rank_env=session.rank_env)
    if session.meter is not None and prepared is not None:
        session.meter.runtime = prepared.runtime
        prepared.runtime.measure(on_cpu=use_cpu(session.options))
    return prepared


def _partition(plan: "Plan | None", prepared: "Prepared | None") -> "dict[Seam, Wrapper]":
    """The context in which models are built with a plan's tensor partition; without one it does nothing."""
    if plan is None or plan.layout.tensor_partition is None:
        return {}
    from quartet_plugin.megatron.partition.install import PartitionedModels

    gradients = None if prepared is None else prepared.gradients
    return PartitionedModels(plan.layout.tensor_partition, gradients=gradients).wrappers


def _guard(
    plan: "Plan | None", *, is_custom: bool = False, values: argparse.Namespace | None = None
) -> "dict[Seam, Wrapper]":
    """The guard that keeps the plan's stages with checkpoints and refuses to load them onto other stages.

    `is_custom`: the stages have the placement of the plan's custom schedule, not stock's. Raises SeamError
    where a plan's command loads a checkpoint, by its `values`, and Megatron's functions are not as known.
    """
    from quartet_plugin.errors import SeamError
    from quartet_plugin.megatron.checkpoints import CheckpointGuard
    from quartet_plugin.megatron.seams.declared import CHECKPOINTS, LOAD
    from quartet_plugin.megatron.support import has_known_parameters

    if not has_known_parameters(*CHECKPOINTS):
        if plan is not None and getattr(values, "load", None):
            raise SeamError(
                f"--load: {LOAD.path} has other parameters than in any known release, so loading checkpoints "
                "onto other stages cannot be refused; train without --load"
            )
        return {}
    if plan is None:
        return CheckpointGuard().wrappers
    mapping, partition = plan.mapping, plan.layout.tensor_partition
    return CheckpointGuard(
        placement=plan.schedule.placement if is_custom else None,
        slots=None if mapping.is_stock else [(slot.node, slot.local) for slot in mapping.slots],
        partition=None if partition is None else partition.label,
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
        elif (missing := no_accelerator(options)) is not None:
            print_notes([str(missing)], rank_env=RankEnv.of(os.environ))
        return parser

    return add_arguments_and_group


def _install_passive_guard() -> None:
    wrappers = _guard(None)
    if wrappers:
        _install_if_possible(wrappers, lacking="checkpoint guard")


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
    return with_flags(words, cpu_device.required_flags(set(words[: end_of_options(words)])))


def end_well(session: Session) -> None:
    """Finish the trial of a script that ended without an error; a CPU device's process exits here."""
    meter = session.meter
    if hasattr(meter, "gather"):
        meter.gather()
    session.end_trial()
    if cpu_device.is_installed():
        cpu_device.exit_now()
