"""What a schedule of ours recorded in a trial's last step, as a file a rank (docs/formats.md)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.rank.files import RankFileWriter


def write_actions(
    files: RankFileWriter,
    *,
    actions: Sequence[Any],
    recorder: Any,
    device: int,
    replica: int,
    peak_activation_bytes: int | None = None,
) -> None:
    """Write rank-K.actions.json: start, end and waiting of every action, in the device's order.

    `recorder` has the times of the last step, `actions` what they belong to. Ranks that do the same work as
    another (tensor and data parallel) say so by `replica`. `peak_activation_bytes` is a ledger's. Writes
    nothing where the two do not belong together: nothing was recorded, or the last call was an evaluation.
    """
    if recorder.num_steps == 0:
        return
    times = recorder.times()
    if len(times) != len(actions):
        return
    content = {
        "schema_version": 1,
        "attempt_id": files.order.attempt_id,
        "launch_rank": files.place.launch_rank,
        "device": device,
        "replica": replica,
        "begin_at": recorder.begin_at(),
        "actions": [str(action) for action in actions],
        "start_s": [one.start_s for one in times],
        "end_s": [one.end_s for one in times],
        "waiting_s": [one.waiting_s for one in times],
    }
    if peak_activation_bytes is not None:
        content["peak_activation_bytes"] = peak_activation_bytes
    write_json_atomic(Path(files.order.folder, f"rank-{files.place.launch_rank}.actions.json"), content)
