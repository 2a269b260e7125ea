"""`quartet plan`: the best layouts of a described job, without running anything."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from quartet_plugin.cli.command import (
    CalibrationFile,
    HardwareFolder,
    JsonSwitch,
    check_folder,
    check_range,
    check_seconds,
    constants_of,
    devices_of,
    invocation,
)
from quartet_plugin.cli.output import show, tell
from quartet_plugin.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from quartet_plugin.cost.constants import Constants
    from quartet_plugin.cost.devices import DeviceSpec
    from quartet_plugin.planner.command_job import CommandJob
    from quartet_plugin.planner.job import PlanRequest

Frontier = Literal["memory"]
MAX_COUNTS = 64


def plan_command(
    ctx: typer.Context,
    job: Annotated[
        Path | None,
        typer.Argument(metavar="JOB.yaml", help="Model, cluster and batch.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="The file to write the best plan to.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The name of a known model, such as llama3-8b, or a HuggingFace config.json."
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A cluster file, or a device's name, such as H100."),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Numbers of devices, such as 32,64; shows the best plan for each."),
    ] = None,
    frontier: Annotated[
        Frontier | None,
        typer.Option(help="List the plans that no other plan beats in both time and memory."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--global-batch", help="Sequences in each iteration.", metavar="N")
    ] = None,
    seq_length: Annotated[
        int | None,
        typer.Option(help="Tokens in each sequence. Default: the model's own.", metavar="N"),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Tokens in the vocabulary, if a command's tokenizer determines it.", metavar="N"),
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(metavar="N", help="Tokens that the whole job trains on, such as 15e12.")
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Price of one device for an hour; the output then shows the job's cost."
        ),
    ] = None,
    top: Annotated[
        int,
        typer.Option(
            help="Number of plans to write: the best, then PLAN.2.json to PLAN.K.json.", metavar="K"
        ),
    ] = 1,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Predict every layout; exclude none by lower bounds.")
    ] = False,
    named_only: Annotated[
        bool,
        typer.Option(
            "--named-only", help="Use named schedules only; search no orders for the ten best layouts."
        ),
    ] = False,
    time_limit: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Time limit of all schedule searches together, in seconds; the best schedule of each so far "
            "is kept.",
            show_default=False,
        ),
    ] = None,
    refused: Annotated[
        bool, typer.Option("--refused", help="List how many layouts each constraint refused.")
    ] = False,
    megatron: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="The release of Megatron to plan for. Default: the command's, otherwise the installed one.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonSwitch = False,
    hardware: HardwareFolder = None,
    calibration: CalibrationFile = None,
) -> None:
    """Rank every legal layout of a job by predicted iteration time, under the memory limit.

    The job is a JOB.yaml, a model's name, or the training command that follows `--`.
    """
    from quartet_plugin.planner.frontier import with_devices

    ranges = (
        ("--global-batch", batch, 2**31),
        ("--seq-length", seq_length, 2**31),
        ("--vocab-size", vocab_size, 2**28),
    )
    for option, value, most in ranges:
        if value is not None:
            check_range(option, value, most=most)
    check_range("--top", top, most=100)
    counts = _counts(devices)
    if time_limit is not None:
        check_seconds("--time-limit", time_limit, least=0.1)
        if named_only or len(counts) > 1 or frontier is not None:
            raise UsageError(
                f"--time-limit {time_limit:g}: limits schedule searches, which do not run with --named-only, "
                "--frontier or several --devices; omit --time-limit"
            )
    if seq_length is not None and model is None:
        raise UsageError(
            "--seq-length: works only with --model; a JOB.yaml has model.seq_length, a command its own flag"
        )
    sections = _sections(
        job, model=model, seq_length=seq_length, cluster=cluster, batch=batch, tokens=tokens, price=price
    )
    library = devices_of(hardware)
    words = invocation(ctx).user_command
    user: CommandJob | None = None
    if vocab_size is not None and words is None:
        raise UsageError("--vocab-size: works only with a command; a JOB.yaml has vocab_size")
    release = _release(megatron, words)
    if words is None:
        request = replace(_request(job, sections, counts=counts, devices=library), release=release)
    else:
        user = _command_job(
            words,
            sections,
            vocab_size=vocab_size,
            devices=library,
            job=job,
            release=release,
        )
        request = user.request
    if time_limit is not None:
        _check_searched(request, time_limit)
    if price is not None and request.cost.tokens is None:
        raise UsageError("--price: the cost of a job needs its length; add --tokens N")
    constants = constants_of(calibration)
    if len(counts) > 1 or frontier is not None:
        if output is not None or top > 1 or refused or exhaustive:
            raise UsageError(
                "--devices and --frontier: print a table; -o, --top, --refused and --exhaustive are for "
                "one plan"
            )
        if len(counts) == 1:
            request = with_devices(request, counts[0])
        _show_frontier(request, () if len(counts) == 1 else counts, frontier, constants, as_json=as_json)
        return
    if counts and counts[0] != request.machines.num_devices:
        # The command's own layout is for its own devices.
        request, user = with_devices(request, counts[0]), None
    if output is not None:
        check_folder(output)
    name = job.stem if job is not None else "command" if words is not None else "plan"
    _show_ranking(
        request,
        user,
        output=output,
        name=name,
        top=top,
        exhaustive=exhaustive,
        has_search=not named_only,
        time_limit_s=time_limit,
        refused=refused,
        as_json=as_json,
        constants=constants,
    )


def _check_searched(request: "PlanRequest", time_limit_s: float) -> None:
    """Raises UsageError for a job without schedule searches: a time limit limits nothing."""
    from quartet_plugin.planner.table_schedules import is_searched

    if not is_searched(request):
        raise UsageError(
            f"--time-limit {time_limit_s:g}: limits schedule searches; search.schedule has no searched: "
            "add it, or omit --time-limit"
        )


def _show_ranking(
    request: "PlanRequest",
    user: "CommandJob | None",
    *,
    output: Path | None,
    name: str,
    top: int,
    exhaustive: bool,
    has_search: bool,
    time_limit_s: float | None,
    refused: bool,
    as_json: bool,
    constants: "Constants | None",
) -> None:
    """Rank, write the plan files, and print the plans."""
    from quartet_plugin.model.plan import write_plan
    from quartet_plugin.planner.order_search import planned_ranking
    from quartet_plugin.planner.plans import plain_layout, plan_of, users_layout
    from quartet_plugin.planner.ranking import refusals
    from quartet_plugin.report import planned
    from quartet_plugin.schedule.compilation import compilation_notice
    from quartet_plugin.space.features import lock_lines

    with compilation_notice(tell):
        ranking = planned_ranking(
            request,
            top=top,
            exhaustive=exhaustive,
            has_search=has_search,
            time_limit_s=time_limit_s,
            constants=constants,
        )
    best = ranking.best[0]
    if user is None:
        plain = plain_layout(request, best=best, constants=constants)
    else:
        plain = users_layout(
            request, layout=user.layout, split=user.split, schedule=user.schedule, constants=constants
        )
    unread, locked = ((), {}) if user is None else (user.unread, user.locked)
    rules = refusals(request, ranking) if refused else None
    files: list[str | None] = []
    for place, ranked in enumerate(ranking.best, start=1):
        path = None
        if output is not None:
            path = output if place == 1 else output.with_name(f"{output.stem}.{place}{output.suffix}")
            plan = plan_of(
                request,
                ranked,
                plain=plain,
                name=name,
                place=place,
                constants=constants,
            )
            write_plan(plan, path=path)
        files.append(None if path is None else str(path))
    if as_json:
        data = planned.ranking_data(
            request, ranking, plain=plain, files=files, unread=unread, locked=locked, refusals=rules
        )
        typer.echo(json.dumps(data, indent=1, allow_nan=False))
        return
    show(planned.job_line(request))
    for place, (file, ranked) in enumerate(zip(files, ranking.best, strict=True), start=1):
        show(f"{place}. {'' if file is None else f'{file}: '}{planned.plan_line(ranked)}")
        show(f"   {planned.term_words(ranked) if place == 1 else planned.reason_words(ranked, best)}")
        show(*(f"   {line}" for line in planned.rate_lines(request, ranked)))
        if ranked.slots is not None:
            show(f"   {planned.mapping_words(ranked)}")
        if ranked.gap is not None:
            show(f"   {planned.gap_words(ranked)}")
        headroom = planned.headroom_line(ranked)
        if headroom is not None:
            show(f"   {headroom}")
    show(planned.plain_line(plain, best))
    show(
        f"{ranking.num_considered} layouts: {ranking.num_predicted} predicted, "
        f"{ranking.num_too_large} do not fit in memory, {ranking.num_pruned} cannot be faster"
    )
    show(*ranking.limits)
    show(*lock_lines(locked, change_class=request.search.change_class))
    if unread:
        show(planned.unread_line(unread))
    if rules is not None:
        show(*planned.refusal_lines(rules))


def _show_frontier(
    request: "PlanRequest",
    counts: tuple[int, ...],
    frontier: Frontier | None,
    constants: "Constants | None",
    *,
    as_json: bool,
) -> None:
    """Print the best plan for each number of devices, or the plans of time against memory, or both."""
    from quartet_plugin.planner.frontier import devices_frontier, memory_frontier, with_devices
    from quartet_plugin.report import planned

    data: dict[str, Any] = {"schema_version": 1, "devices_frontier": None, "memory_frontier": None}
    lines: list[str] = []
    if counts:
        points = devices_frontier(request, counts, constants=constants)
        data["devices_frontier"] = planned.devices_data(points)
        lines += planned.devices_lines(points)
    if frontier is not None:
        data["memory_frontier"] = []
        for sized in [with_devices(request, count) for count in counts] or [request]:
            plans = memory_frontier(sized, constants=constants)
            data["memory_frontier"] += [planned.ranked_data(sized, plan) for plan in plans]
            lines += [""] if lines else []
            lines += [f"{sized.machines.num_devices} devices"] if counts else []
            lines += planned.memory_lines(plans)
    if as_json:
        typer.echo(json.dumps(data, indent=1, allow_nan=False))
    else:
        show(*lines)


def _release(asked: str | None, words: "Sequence[str] | None") -> str:
    """The release of Megatron that plans are for. Raises UsageError if the text is not a version."""
    from packaging.version import InvalidVersion, Version

    from quartet_plugin.cli.plan_checks import megatron_here
    from quartet_plugin.launchers.command import parse_command
    from quartet_plugin.planner.job import DEFAULT_RELEASE

    if asked is None:
        return megatron_here(None if words is None else parse_command(words)) or DEFAULT_RELEASE
    try:
        return str(Version(asked))
    except InvalidVersion as error:
        raise UsageError(f"--megatron {asked[:60]!r}: must be a version, such as 0.19.2") from error


def _counts(text: str | None) -> tuple[int, ...]:
    """The numbers of `--devices`. Raises UsageError if the text is not a list of numbers in range."""
    from quartet_plugin.model.plan import MAX_RANKS

    if text is None:
        return ()
    parts = text.split(",")
    if len(parts) > MAX_COUNTS or not all(
        part.isascii() and part.isdigit() and len(part) < 8 for part in parts
    ):
        raise UsageError(f"--devices {text[:60]}: must be numbers of devices, such as 64,128,256")
    counts = tuple(dict.fromkeys(map(int, parts)))
    for count in counts:
        check_range("--devices", count, most=MAX_RANKS)
    return counts


def _sections(
    job: Path | None,
    *,
    model: str | None,
    seq_length: int | None,
    cluster: str | None,
    batch: int | None,
    tokens: float | None,
    price: float | None,
) -> dict[str, Any]:
    """The sections of the JOB.yaml, with the sections that options replace."""
    from quartet_plugin.model.files import shown
    from quartet_plugin.model.sections import load_yaml

    content: Any = {} if job is None else load_yaml(job)
    if not isinstance(content, dict):
        raise ConfigError(
            f"{job}: a job is a mapping with model, cluster and batch; this is {shown(content)}"
        )
    sections = dict(content)
    if model is not None:
        if "model" in sections:
            raise ConfigError(
                f"{job}: model: --model {model} names a model, too; remove the section, or the option"
            )
        length = {} if seq_length is None else {"seq_length": seq_length}
        sections["model"] = {**model_section_of(model), **length}
    if cluster is not None:
        sections["cluster"] = _cluster_section(cluster)
    if batch is not None:
        sections["batch"] = {"global_batch_size": batch}
    cost = {"tokens": tokens, "price_per_device_hour": price}
    said = {name: value for name, value in cost.items() if value is not None}
    if said:
        stated = sections.get("cost")
        sections["cost"] = {**(stated if isinstance(stated, dict) else {}), **said}
    return sections


def model_section_of(text: str) -> dict[str, Any]:
    """The `model` section of `--model`: a HuggingFace config.json or its folder from here, else a name."""
    from quartet_plugin.model.huggingface import is_config

    return {"hf": str(Path(text).absolute())} if is_config(text) else {"name": text}


def _cluster_section(text: str) -> Any:
    """A cluster file in this folder, or the name of a device."""
    path = Path(text)
    if path.suffix == ".json" or path.is_file():
        return {"file": str(path.absolute())}
    return text


def _request(
    job: Path | None,
    sections: dict[str, Any],
    *,
    counts: tuple[int, ...],
    devices: "Mapping[str, DeviceSpec] | None",
) -> "PlanRequest":
    from quartet_plugin.cost.devices import device_named
    from quartet_plugin.planner.job import parse_job

    if job is None and "model" not in sections:
        raise UsageError(
            "quartet plan: no job is given; name a JOB.yaml, add --model, or write a command after --, "
            "as in: -- torchrun ..."
        )
    named = sections.get("cluster")
    if isinstance(named, str):
        if not counts:
            raise UsageError(f"--cluster {named}: the number of devices is missing; add --devices N")
        per_node = min(device_named(named, extra=devices).devices_per_node, max(counts))
        sections["cluster"] = {
            "device": named,
            "num_nodes": max(counts) // per_node,
            "devices_per_node": per_node,
        }
    where = "options" if job is None else str(job)
    return parse_job(sections, where=where, devices=devices, folder=None if job is None else job.parent)


def _command_job(
    words: tuple[str, ...],
    sections: Mapping[str, Any],
    *,
    vocab_size: int | None,
    devices: "Mapping[str, DeviceSpec] | None",
    job: Path | None,
    release: str,
) -> "CommandJob":
    from quartet_plugin.launchers.command import parse_command
    from quartet_plugin.model.files import field_path, shown
    from quartet_plugin.model.schema import unknown_key
    from quartet_plugin.planner.command_job import job_of_command
    from quartet_plugin.planner.job import JOB_SECTIONS
    from quartet_plugin.tuner.config import TuneConfig

    known = [*JOB_SECTIONS, *TuneConfig.model_fields]
    for key, value in sections.items():
        if key not in known:
            raise ConfigError(f"{job}: {field_path([key])}: {shown(value)}: {unknown_key(key, known=known)}")
    return job_of_command(
        parse_command(words),
        sections=sections,
        vocab_size=vocab_size,
        devices=devices,
        folder=None if job is None else job.parent,
        release=release,
    )
