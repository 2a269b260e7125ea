"""`quartet tune`: search with short live trials of the user's command."""

import json
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quartet_plugin.cli.command import (
    RUNS,
    AcceptChangedSource,
    RunsFolder,
    find_run,
    invocation,
    pass_on_changed_source,
    user_command,
)
from quartet_plugin.cli.output import show
from quartet_plugin.errors import SeamError, UsageError

if TYPE_CHECKING:
    from quartet_plugin.cli.tune_search import TuneRequest

DISTRIBUTION = "quartet-plugin"

# Libraries whose declared versions hold; those of the frameworks are checked by the ranks.
CHECKED_LIBRARIES = frozenset({"numba", "numpy", "optuna", "psutil", "pydantic", "scipy", "torch"})


def tune_command(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(help="The q.yaml with the search's settings. Default: all settings at their defaults."),
    ] = None,
    run_dir: RunsFolder = RUNS,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The run's name, which overrides `run` of the q.yaml.")
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Number of plans to try, which overrides `study.trials` of the q.yaml."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was stopped.")] = False,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Take over a run whose tuner on another host was lost.")
    ] = False,
    max_minutes: Annotated[
        float | None,
        typer.Option(help="Approximate time limit of the search and its final rounds, in minutes."),
    ] = None,
    earlier_run: Annotated[
        str | None,
        typer.Option("--from", metavar="RUN", help="Start with the measurements of another run."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Number of trials to run at once, each on its own part of this host's devices."),
    ] = None,
    joined: Annotated[
        str | None,
        typer.Option("--join", metavar="RUN", help="Run trials on this host for the tuner of that run."),
    ] = None,
    oversubscribe: Annotated[
        bool, typer.Option("--oversubscribe", help="Let the workers of a CPU run share all cores.")
    ] = False,
    launcher: Annotated[
        str | None,
        typer.Option(
            help="Start trials on nodes: slurm (this allocation), slurm-batch, ssh, ray, kubernetes, "
            "nemo-run, or a launcher that another package adds."
        ),
    ] = None,
    trial_nodes: Annotated[
        int | None, typer.Option(help="Number of nodes of each trial; needs --launcher.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(help="Number of nodes of the later training, if trials run on fewer."),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The site.yaml, which has the cluster's settings for every job."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be launched and searched; start nothing.")
    ] = False,
    accept_changed_source: AcceptChangedSource = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print one JSON object.")] = False,
) -> None:
    """Find a faster plan for the training command after `--`, with short trials."""
    pass_on_changed_source(is_accepted=accept_changed_source)
    if as_json and not dry_run:
        raise UsageError("quartet tune --json: needs --dry-run; `quartet status --json` reports on a run")
    if max_minutes is not None and not 0.1 <= max_minutes <= 1e6:
        raise UsageError(f"--max-minutes {max_minutes:g}: must be from 0.1 to {1e6:g} minutes")
    if joined is not None:
        others = (config, max_minutes, earlier_run, name, trials, launcher, trial_nodes, nodes, site)
        if resume or takeover or dry_run or any(other is not None for other in others):
            raise UsageError(
                "quartet tune --join: takes no option except --workers; the run's tuner sets the others"
            )
        _join(ctx, find_run(joined, run_dir=run_dir), num_workers=workers or 1, oversubscribe=oversubscribe)
        return
    from quartet_plugin.cli.tune_search import TuneOptions, checked_request, search_and_show

    words = user_command(ctx)
    check_versions()
    options = TuneOptions(
        config=config,
        run_dir=run_dir,
        name=name,
        trials=trials,
        is_resumed=resume,
        is_taken_over=takeover,
        max_minutes=max_minutes,
        earlier_run=earlier_run,
        num_workers=workers,
        oversubscribe=oversubscribe,
        launcher=launcher,
        trial_nodes=trial_nodes,
        nodes=nodes,
        site=site,
    )
    request = checked_request(words, options)
    if dry_run:
        _show_dry_run(request, as_json=as_json)
    else:
        search_and_show(request)


def _join(ctx: typer.Context, run: Path, *, num_workers: int, oversubscribe: bool) -> None:
    """Run trials on this host for the tuner of a run."""
    from quartet_plugin.cli.workers import join

    join(run, words=invocation(ctx).user_command, num_workers=num_workers, oversubscribe=oversubscribe)


def _show_dry_run(request: "TuneRequest", *, as_json: bool) -> None:
    from quartet_plugin.cli.dry_run import dry_run_lines, dry_run_record

    if as_json:
        typer.echo(json.dumps(dry_run_record(request), indent=1))
    else:
        show(*dry_run_lines(request))


def check_versions() -> None:
    """Raise SeamError where a library is installed in a version outside of the declared range.

    One that is not installed is another matter: whatever needs it says so.
    """
    from packaging.requirements import Requirement

    try:
        declared = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return  # run from a source tree that was never installed: nothing is declared
    for requirement in map(Requirement, declared):
        name = requirement.name.lower()
        if name not in CHECKED_LIBRARIES:
            continue
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            raise SeamError(
                f"{name} {installed}: not supported, must be {requirement.specifier}; "
                f"pip install '{name}{requirement.specifier}'"
            )
