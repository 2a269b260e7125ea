"""The devices of the stages of this process's pipeline, and the stage whose action is running."""

from collections.abc import Iterator
from contextlib import contextmanager

from quartet_plugin.schedule.placement import check, loop, stages_of_device


class StagePlacement:
    """The devices of stages: `device_of_stage[s]` is the pipeline rank of stage s."""

    def __init__(self, device_of_stage: tuple[int, ...]) -> None:
        """Raises ConfigError for a placement that is not legal."""
        self.num_devices = max(device_of_stage) + 1
        self.device_of_stage = check(device_of_stage, num_devices=self.num_devices)
        self._stages = stages_of_device(self.device_of_stage, self.num_devices)
        self.running: int | None = None

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.device_of_stage)

    @property
    def num_chunks(self) -> int:
        """The number of stages on each device."""
        return self.num_stages // self.num_devices

    @property
    def last_device(self) -> int:
        """The pipeline rank of the last stage."""
        return self.device_of_stage[-1]

    @property
    def is_megatrons(self) -> bool:
        """Whether the stages go round the devices, as Megatron's own do."""
        return self.device_of_stage == loop(self.num_devices, self.num_chunks)

    def stage(self, device: int, chunk: int) -> int:
        """The stage that is chunk `chunk` of pipeline rank `device`."""
        return self._stages[device][chunk]

    def stages(self, device: int) -> list[int]:
        """The stages of pipeline rank `device`, by chunk."""
        return self._stages[device]

    @contextmanager
    def running_stage(self, stage: int) -> Iterator[None]:
        """A block in which Megatron's questions for the first and last stage are answered for `stage`."""
        before, self.running = self.running, stage
        try:
            yield
        finally:
            self.running = before
