"""`quartet profile`: what embedding, layers, head and optimizer take, measured inside a training command."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quartet_plugin.cli.command import DeviceName, check_folder, check_range, check_seconds, user_command
from quartet_plugin.cli.output import show
from quartet_plugin.errors import ConfigError, InfrastructureError, UsageError
from quartet_plugin.protocol.environment import PROFILE

if TYPE_CHECKING:
    from quartet_plugin.calibration.profile import Profile, SimulatedRankRecord
    from quartet_plugin.launchers.command import Command
    from quartet_plugin.model.costs import Costs
    from quartet_plugin.protocol.rank_files import RankProfile
    from quartet_plugin.trial.request import TrialResult

# What the ranks read; see quartet_plugin.megatron.profiling.
_MAX_ITERATIONS = 1_000


def profile_command(
    ctx: typer.Context,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="PROFILE.json", help="The file to write.")
    ] = Path("profile.json"),
    costs: Annotated[
        Path | None,
        typer.Option(metavar="COSTS.json", help="Also write a cost table for `quartet schedule`."),
    ] = None,
    iterations: Annotated[
        int, typer.Option(help="Number of iterations to measure, after two of warm-up.")
    ] = 6,
    stage: Annotated[
        int | None,
        typer.Option(metavar="K", help="Run only pipeline rank K, without communication."),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(metavar="N", help="With --stage: the number of ranks of the whole job.")
    ] = None,
    device: DeviceName = "auto",
    deadline: Annotated[float, typer.Option(help="Time limit of the run, in seconds.")] = 600.0,
) -> None:
    """Measure the forward and backward of one microbatch for every part of the model, in the command's ranks.

    With --stage and --world-size one process measures one rank of a job larger than this machine.
    """
    from quartet_plugin.calibration.profile import make_profile
    from quartet_plugin.cli.signals import ended_as_by_ctrl_c
    from quartet_plugin.launchers.command import parse_command
    from quartet_plugin.launchers.local import check_start
    from quartet_plugin.trial.request import Timeouts, TrialRequest
    from quartet_plugin.trial.runner import run_trial

    check_range("--iterations", iterations, least=2, most=_MAX_ITERATIONS)
    check_seconds("--deadline", deadline)
    for path in (output, costs):
        if path is not None:
            check_folder(path)
    words = user_command(ctx)
    simulated = simulated_rank_of(words, stage=stage, world_size=world_size)
    command = parse_command(words)
    check_start(command, cwd=Path.cwd(), environment=os.environ)
    _check_processes(command, simulated=simulated)
    folder = Path(tempfile.mkdtemp(prefix="quartet-"))
    try:
        request = TrialRequest(
            folder=folder / "profile",
            command=command,
            warmup=2,
            measure=iterations,
            device=device,
            deadline_s=deadline,
            timeouts=Timeouts.within(deadline),
            max_attempts=1,
            # Every second iteration defers its weight gradients: they are not alike, and need not be.
            max_spread=10.0,
        )
        with _profiling(simulated), ended_as_by_ctrl_c():
            result = run_trial(request, is_subreaper=True)
        ranks = rank_profiles(result, is_simulated=simulated is not None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    measured = make_profile(ranks, costs=table(ranks), simulated=simulated, iteration_s=result.iteration_s)
    write(measured, output=output, costs=costs)
    show(*lines(measured))


def simulated_rank_of(
    words: Sequence[str], *, stage: int | None, world_size: int | None
) -> "SimulatedRankRecord | None":
    """The first rank of pipeline rank `stage` in Megatron's order of ranks, which represents it.

    Raises UsageError for options that do not go together or do not fit the command's own flags.
    """
    from quartet_plugin.calibration.profile import SimulatedRankRecord

    if stage is None and world_size is None:
        return None
    if stage is None or world_size is None:
        raise UsageError("--stage and --world-size: give both, or neither")
    pipeline = _flag(words, "--pipeline-model-parallel-size")
    inner = _flag(words, "--tensor-model-parallel-size") * _flag(words, "--context-parallel-size")
    if world_size < 1 or world_size % (pipeline * inner) or world_size > 65_536:
        raise UsageError(
            f"--world-size {world_size}: must be a multiple of the command's tensor x context x pipeline "
            f"parallel sizes ({pipeline * inner}), at most 65536"
        )
    if not 0 <= stage < pipeline:
        raise UsageError(f"--stage {stage}: must be from 0 to {pipeline - 1}, a pipeline rank of the command")
    step = inner if "--use-tp-pp-dp-mapping" in words else world_size // pipeline
    return SimulatedRankRecord(stage=stage, rank=stage * step, world_size=world_size)


def _flag(words: Sequence[str], name: str) -> int:
    """The last value of a flag that counts ranks; 1 if the flag is missing."""
    value = "1"
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word.startswith(f"{name}="):
            value = word.partition("=")[2]
        elif word == name and following is not None:
            value = following
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= 65_536):
        raise UsageError(f"{name} {value[:40]}: must be a number from 1 to 65536")
    return int(value)


def _check_processes(command: "Command", *, simulated: "SimulatedRankRecord | None") -> None:
    from quartet_plugin.launchers.command import ENTRY_MODULE

    if command.entry != ENTRY_MODULE:
        raise ConfigError(f"command {command.target!r}: only Megatron's training commands can be profiled")
    if simulated is not None and command.num_processes != 1:
        raise UsageError(
            f"--stage: the command starts {command.num_processes or 'several'} processes; one rank is run "
            "alone: write python SCRIPT ..., or torchrun --nproc-per-node 1"
        )


@contextmanager
def _profiling(simulated: "SimulatedRankRecord | None") -> Iterator[None]:
    """The environment in which ranks measure their layers."""
    os.environ[PROFILE] = "1" if simulated is None else f"{simulated.rank}/{simulated.world_size}"
    try:
        yield
    finally:
        del os.environ[PROFILE]


def rank_profiles(result: "TrialResult", *, is_simulated: bool) -> "list[RankProfile]":
    """The profiles that the ranks of a trial wrote; without any, InfrastructureError with the trial's reason.

    A rank that runs alone computes with whatever lay in memory, so that its loss may be none.
    """
    from quartet_plugin.protocol.attempt_files import read_shared
    from quartet_plugin.protocol.rank_files import RankProfile, rank_files_of

    paths = rank_files_of(RankProfile, result.folder)
    if not paths or not (result.is_measured or is_simulated):
        last = f": {result.last_lines[-1][:200]}" if result.last_lines else ""
        raise InfrastructureError(f"the command was not profiled: {result.reason}{last}")
    return [read_shared(RankProfile, path) for path in paths]


def table(ranks: "Sequence[RankProfile]") -> "Costs":
    """The cost table of the job that the ranks ran."""
    from quartet_plugin.calibration.profile import costs_of
    from quartet_plugin.model.training_job import parse_training_job

    job = parse_training_job(ranks[0].job)
    return costs_of(
        ranks,
        num_layers=job.shape.num_layers,
        num_devices=job.layout.pipeline_parallel,
        num_microbatches=job.layout.num_microbatches(job.global_batch_size),
        num_dense_layers=None if job.experts is None else job.experts.num_dense_layers,
        pattern=job.shape.pattern or "",
    )


def write(measured: "Profile", *, output: Path, costs: Path | None) -> None:
    """Write the profile, and the cost table if it is requested."""
    from quartet_plugin.calibration.profile import write_profile
    from quartet_plugin.model.files import write_json_atomic

    write_profile(measured, path=output)
    show(f"{output}: {len(measured.ranks)} ranks, {len(measured.parts)} parts of the model")
    if costs is not None:
        write_json_atomic(costs, dict(measured.costs))
        show(f"{costs}: what quartet schedule takes")


def lines(measured: "Profile") -> list[str]:
    """The measured times and memory, a line for each part of the model and each rank."""
    from quartet_plugin.calibration.profile import typical_parts
    from quartet_plugin.model.training_job import parse_training_job

    rows = []
    job = parse_training_job(measured.job)
    num_dense = None if job.experts is None else job.experts.num_dense_layers
    typical = typical_parts(measured.ranks, num_dense_layers=num_dense, pattern=job.shape.pattern or "")
    width = max([12, *map(len, typical)]) + 1
    for name, part in typical.items():
        times = [
            f"{label} {1e3 * seconds:.3f} ms"
            for label, seconds in (
                ("forward", part.forward_s),
                ("backward", part.backward_s),
                ("input gradient", part.input_grad_s),
                ("weight gradient", part.weight_grad_s),
            )
            if seconds is not None
        ]
        held = f"{part.activation_bytes / 2**20:.1f} MiB of activations"
        rows.append(f"{name.replace('_', ' '):{width}}{', '.join(times)}; {held}")
    for rank in measured.ranks:
        steps = [f"{name} {1e3 * seconds:.1f} ms" for name, seconds in rank.steps.items() if seconds]
        rows.append(
            f"rank {rank.rank:<8}{', '.join(steps)}; peak memory {rank.peak_memory_bytes / 2**20:.0f} MiB"
        )
    return rows
