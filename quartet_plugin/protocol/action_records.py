"""What the ranks recorded of their actions, read as untrusted input."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.schema import Bounds, Length, record
from quartet_plugin.protocol.attempt_files import AttemptId, Rank, Seconds, Version, read_sheet

MAX_ACTIONS = 5_000_000

_ACTION = re.compile(r"([0-9]{1,5})([FIWB])[0-9]{1,6}", re.ASCII)
_Text = Annotated[str, Length(most=32)]
_Times = Annotated[tuple[Seconds, ...], Length(most=MAX_ACTIONS)]


@record
class ActionsSheet:
    """rank-K.actions.json: one device's actions in the last step, in seconds since `begin_at`."""

    schema_version: Version
    attempt_id: AttemptId
    launch_rank: Rank
    device: Rank
    replica: Rank
    begin_at: Seconds
    actions: Annotated[tuple[_Text, ...], Length(most=MAX_ACTIONS)]
    start_s: _Times
    end_s: _Times
    waiting_s: _Times
    peak_activation_bytes: Annotated[int, Bounds(ge=0)] | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.actions), len(self.start_s), len(self.end_s), len(self.waiting_s)}
        if len(lengths) != 1 or not self.actions:
            raise ConfigError(f"actions: {len(self.actions)}; each needs one start, end and waiting time")


def read_actions(folder: Path) -> list[ActionsSheet]:
    """The sheets of one pipeline (replica 0), by device. Raises ConfigError where one is missing or torn."""
    sheets = [read_sheet(ActionsSheet, path) for path in sorted(folder.glob("rank-*.actions.json"))]
    found = {sheet.device: sheet for sheet in sheets if sheet.replica == 0}
    if not found:
        raise ConfigError(
            f"{folder}: no rank-K.actions.json; only trials of a plan with a schedule of ours have them"
        )
    if sorted(found) != list(range(len(found))) or len({sheet.attempt_id for sheet in found.values()}) != 1:
        raise ConfigError(f"{folder}: actions of devices {sorted(found)}; those of one attempt are needed")
    return [found[device] for device in range(len(found))]


def seconds_by_stage(sheets: Iterable[ActionsSheet]) -> dict[tuple[int, str], list[float]]:
    """How long the actions of each stage and kind (`F`, `I`, `W`, `B`) took, seconds."""
    seconds: dict[tuple[int, str], list[float]] = {}
    for sheet in sheets:
        for text, start, end in zip(sheet.actions, sheet.start_s, sheet.end_s, strict=True):
            if match := _ACTION.fullmatch(text):
                seconds.setdefault((int(match[1]), match[2]), []).append(end - start)
    return seconds
