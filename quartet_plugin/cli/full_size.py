"""`quartet tune --nodes`: the nodes of the training where trials have fewer, and what is said of it."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from quartet_plugin.cli.command import path_here, train_words
from quartet_plugin.errors import QuartetError

if TYPE_CHECKING:
    from quartet_plugin.launchers.placement import Placement
    from quartet_plugin.model.full_size import FullSize
    from quartet_plugin.tuner.config import TuneConfig
    from quartet_plugin.tuner.full_size import FullSizeNodes
    from quartet_plugin.tuner.run_folder import TuningRun


def full_size_nodes(
    config: "TuneConfig", *, placement: "Placement", words: Sequence[str]
) -> "FullSizeNodes | str":
    """How a run's launches at full size start, or in words why there are none."""
    from quartet_plugin.launchers.command import parse_command
    from quartet_plugin.tuner.full_size import FullSizeNodes
    from quartet_plugin.tuner.trial_backend import LocalBackend

    if config.nodes is None or config.confirm == "none":
        return "confirm: none"
    full = placement.at_full_size
    try:
        (device_slice,) = full.slices(at_once=1, device=config.device)
    except QuartetError as error:
        return str(error)
    if not device_slice.nodes:
        return f"launcher: {placement.launcher}: a queue would have to give {config.nodes} nodes at once"
    return FullSizeNodes(
        command=full.command(parse_command(words)),
        open_backend=partial(
            LocalBackend, device_slice=device_slice, nodes_launcher=full.launcher_on(device_slice)
        ),
    )


def full_size_lines(result: "FullSize", *, run: "TuningRun") -> list[str]:
    """The winner at full size, and how to train with it."""
    time, gain, confirmed = result.iteration_s, result.speedup, result.confirmation
    lines = [
        f"full size {result.num_nodes} nodes: {time.median:.4g} s per iteration predicted "
        f"({time.low:.4g} to {time.high:.4g}), {gain.median:.2f}x as fast as your command "
        f"({gain.low:.2f}x to {gain.high:.2f}x)"
    ]
    if confirmed is None:
        lines.append(f"          not measured there: {result.unconfirmed}")
    else:
        measured_s = sum(confirmed.iteration_s) / len(confirmed.iteration_s)
        lines.append(
            f"          measured there: {measured_s:.4g} s per iteration, "
            f"{confirmed.speedup:.2f}x as fast as your command"
        )
    return [
        *lines,
        f"full plan {path_here(run.folder.full_plan)}",
        f"train     {train_words(run.folder.full_command)}",
    ]
