"""`quartet tune --dry-run`: what a search would launch and choose from; nothing is started."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quartet_plugin.cli.tune_search import TuneRequest
    from quartet_plugin.launchers.command import Command
    from quartet_plugin.launchers.placement import Placement
    from quartet_plugin.tuner.config import TuneConfig


def dry_run_record(request: "TuneRequest") -> dict[str, Any]:
    """What `dry_run_lines` says, as data for other programs; see docs/formats.md."""
    from quartet_plugin.protocol.masking import masked_argv
    from quartet_plugin.tuner.run_folder import RunFolder

    config, command = request.config, request.command
    study, trial = config.study, config.trial
    is_begun = RunFolder(path=request.path).is_begun
    return {
        "schema_version": 1,
        "run": str(request.path),
        "state": "resumed" if request.is_resumed else "exists" if is_begun else "new",
        "command": masked_argv(command.words),
        "baseline": masked_argv(_baseline_words(command)),
        "is_local": request.placement.is_local,
        "num_trials": study.trials,
        "warmup": [trial.least_warmup, trial.most_warmup],
        "measure": [trial.least_measured, trial.most_measured],
        "num_finalists": study.top_k,
        "num_rounds": study.rounds,
        "num_final_launches": study.num_final_launches,
        "max_final_launches": study.max_final_launches,
        "deadline_s": trial.deadline_s,
        "longest_s": _longest_s(config),
        "search": _axes(config, locked=_locked(config, command)[0]),
    }


def _longest_s(config: "TuneConfig") -> float:
    """The seconds of a search in which every launch takes its whole deadline."""
    return config.trial.deadline_s * (1 + config.study.trials + config.study.max_final_launches)


def dry_run_lines(request: "TuneRequest") -> list[str]:
    """The run folder, the baseline's command, the launches, and the space as far as no launch is needed."""
    from quartet_plugin.protocol.masking import masked_argv
    from quartet_plugin.report.formatting import duration
    from quartet_plugin.trial.attempt import PREFIX
    from quartet_plugin.tuner.run_folder import RunFolder

    config, command = request.config, request.command
    study, trial = config.study, config.trial
    folder = RunFolder(path=request.path.resolve())
    state = (
        "would be resumed"
        if request.is_resumed
        else "exists: add --resume"
        if folder.is_begun
        else "would be created"
    )
    return [
        f"run       {request.path} {state}",
        f"command   {shlex.join(masked_argv(command.words))}",
        f"baseline  {shlex.join(masked_argv(_baseline_words(command)))}",
        *_launcher_lines(config, command, request.placement, folder=folder.trial(0) / f"{PREFIX}1"),
        f"trials    your command, then at most {study.trials} plans, each "
        f"{_count(trial.least_warmup, trial.most_warmup)} + "
        f"{_count(trial.least_measured, trial.most_measured)} iterations",
        f"final     {study.num_final_launches} launches: {study.top_k} plans and your command, in "
        f"{study.rounds} rounds; fewer where they decide, at most {study.max_final_launches} launches",
        f"time      at most {duration(_longest_s(config))}, {duration(trial.deadline_s)} a launch",
        *_space_lines(config, command),
        "dry run   nothing was started or written",
    ]


def _launcher_lines(
    config: "TuneConfig", command: "Command", placement: "Placement", *, folder: Path
) -> list[str]:
    """The words by which a launcher starts trial 0 on its nodes, as the attempt whose folder is given."""
    from quartet_plugin.launchers.protocol import ObjectLauncher
    from quartet_plugin.protocol.masking import masked_argv

    if placement.is_local:
        return []
    (device_slice,) = placement.slices(at_once=1, device=config.device)
    launcher = placement.launcher_on(device_slice)
    assert launcher is not None
    words = launcher.words(
        _baseline_words(command), attempt_id="ID", cwd=Path.cwd(), stdout=folder / "stdout.log"
    )
    lines = [f"launcher  {shlex.join(masked_argv(words))}"]
    if isinstance(launcher, ObjectLauncher):
        text = launcher.object_text(attempt_id="ID", stdout=folder / "stdout.log")
        lines += [f"          {line}" for line in text.splitlines()]
    if placement.batch_divisor > 1:
        lines.append(f"full size {config.nodes} nodes; {placement.share_words}")
    return lines


def _count(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


def _axes(config: "TuneConfig", *, locked: Mapping[str, str]) -> list[dict[str, str | None]]:
    """Each axis with its choices in words, and the feature of the command that keeps it where one does."""
    from quartet_plugin.space.knobs.registry import BY_NAME
    from quartet_plugin.space.knobs.shape import SHAPE

    axes = []
    for name, field in type(config.search).model_fields.items():
        value = getattr(config.search, name)
        knob = SHAPE if name == "scaling" else BY_NAME.get(name)
        feature = None if knob is None else locked.get(knob.axis.value)
        if name == "scaling" and value is None:
            feature = None
        axes.append(
            {
                "name": name,
                "choices": _choices(name, value),
                "kept_because": feature,
                "meaning": field.description or "",
            }
        )
    return axes


def _space_lines(config: "TuneConfig", command: "Command") -> list[str]:
    """Each axis with its choices, or what keeps it, and what is known after the first launch alone."""
    locked, is_read = _locked(config, command)
    lines: list[str] = []
    width = 2 + max(map(len, type(config.search).model_fields))
    for axis in _axes(config, locked=locked):
        words = f"{axis['choices']}: {axis['meaning']}"
        if axis["kept_because"] is not None:
            words = f"kept as in your command, because of {axis['kept_because']} (asked: {axis['choices']})"
        lines.append(f"{'search' if not lines else '':<10}{axis['name']:<{width}}{words}")
    if is_read and (reason := _no_custom_schedules(command)) is not None:
        lines.append(f"{'':<10}{'':<{width}}custom schedules cannot run, because of {reason}")
    note = "" if is_read else "what the command's features keep, and "
    lines.append(f"{'':<10}after the first launch: {note}which of these are legal for model and devices")
    return lines


def _no_custom_schedules(command: "Command") -> str | None:
    from quartet_plugin.launchers.megatron_words import arguments_in
    from quartet_plugin.space.runtime_refusals import refusal

    return refusal(arguments_in(command.arguments))


def _choices(name: str, value: Any) -> str:
    if value is None:
        return "as in your command" if name == "scaling" else "auto"
    if name == "forbid":
        return ", ".join(rule.label for rule in value) or "nothing"
    if value == ("auto",):
        return "[auto]"
    if isinstance(value, tuple):
        return ", ".join(str(choice) for choice in value)
    if name == "scaling":
        return f"equal {value.budget}, at most {value.max_shapes} shapes"
    return str(value)


def _baseline_words(command: "Command") -> list[str]:
    """The words that start trial 0; only they are known of a program that is not read."""
    return list(command.words) if command.starter == "other" else command.wrapped()


def _locked(config: "TuneConfig", command: "Command") -> tuple[dict[str, str], bool]:
    """The feature that keeps each axis, by its name, and whether the command's features are in its flags."""
    from quartet_plugin.launchers.command import DEEPSPEED_MODULE
    from quartet_plugin.launchers.megatron_words import arguments_in
    from quartet_plugin.model.megatron_arguments import features_of
    from quartet_plugin.space.features import locked_axes

    is_read = command.entry != DEEPSPEED_MODULE and command.starter != "other"
    features = features_of(arguments_in(command.arguments)) if is_read else []
    locked = locked_axes(features, change_class=config.search.change_class)
    return {axis.value: feature for axis, feature in locked.items()}, is_read
