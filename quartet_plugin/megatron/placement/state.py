"""The placement of this process's pipeline, and the stage whose action is running."""

from collections.abc import Iterator
from contextlib import contextmanager

from quartet_plugin.schedule.placement import check, stages_of_device


class Placed:
    """Where stages lie: `placement[s]` is the pipeline rank of stage s."""

    def __init__(self, placement: tuple[int, ...]) -> None:
        """Raises ConfigError for a placement that is not legal."""
        self.num_devices = max(placement) + 1
        self.placement = check(placement, num_devices=self.num_devices)
        self._stages = stages_of_device(self.placement, self.num_devices)
        self.running: int | None = None

    @property
    def num_stages(self) -> int:
        """All stages."""
        return len(self.placement)

    @property
    def num_chunks(self) -> int:
        """Stages a device."""
        return self.num_stages // self.num_devices

    @property
    def last_device(self) -> int:
        """The pipeline rank of the last stage."""
        return self.placement[-1]

    def stage(self, device: int, chunk: int) -> int:
        """The stage that is chunk `chunk` of pipeline rank `device`."""
        return self._stages[device][chunk]

    def stages(self, device: int) -> list[int]:
        """The stages of pipeline rank `device`, by chunk."""
        return self._stages[device]

    @property
    def has_both_ends_on_one_device(self) -> bool:
        """Whether embedding and head are on one device."""
        return self.last_device == 0

    @property
    def is_loop(self) -> bool:
        """Whether this is Megatron's own order."""
        return self.placement == tuple(range(self.num_devices)) * self.num_chunks

    @contextmanager
    def running_stage(self, stage: int) -> Iterator[None]:
        """While this is open, "am I the first or last stage" is answered for `stage`."""
        before, self.running = self.running, stage
        try:
            yield
        finally:
            self.running = before
