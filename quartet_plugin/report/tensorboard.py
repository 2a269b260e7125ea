"""A run's trials as TensorBoard scalars, one point a trial, written while it runs.

The event file is a TFRecord file of Event messages; what scalars need of both is a few bytes, encoded here,
so that TensorBoard need not be installed where the run is. Steps are trial numbers. A resumed run tells its
earlier trials again, so that the file begins anew with every session.
"""

import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from quartet_plugin.model.files import write_bytes_atomic
from quartet_plugin.model.launch import LaunchPosition, LaunchRecord, Observer, Phase
from quartet_plugin.model.plan import Plan

FILE_NAME = "events.out.tfevents.0000000000.quartet"
_FILE_VERSION = "brain.Event:2"
_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected
_MASK = 0xA282EAD8


class Scalars:
    """Passes every event on to another observer, and writes the measured values into `folder`."""

    def __init__(self, observer: Observer, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._observer = observer
        self._file = folder / FILE_NAME
        self._clock = clock
        self._best: float | None = None
        self._is_broken = False
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_bytes_atomic(self._file, record(event(self._clock(), version=_FILE_VERSION)))

    def message(self, text: str) -> None:
        """Pass the line on to the observer."""
        self._observer.message(text)

    def plan_started(
        self,
        label: str,
        plan: Plan | None,
        *,
        phase: Phase,
        time_left_s: float | None,
        position: LaunchPosition | None = None,
        measured_share: float | None = None,
    ) -> None:
        """Pass the beginning of a launch on to the observer."""
        self._observer.plan_started(
            label,
            plan,
            phase=phase,
            time_left_s=time_left_s,
            position=position,
            measured_share=measured_share,
        )

    def progressed(self, phase: str, *, iteration: int, num_iterations: int) -> None:
        """Pass the launch's progress on to the observer."""
        self._observer.progressed(phase, iteration=iteration, num_iterations=num_iterations)

    def plan_finished(self, launch: LaunchRecord) -> None:
        """Pass it on and write it down; launches of the final rounds are no trials of their own."""
        self._observer.plan_finished(launch)
        if not launch.label.isdecimal():
            return
        values = {"trial/is_measured": 0.0 if launch.iteration_s is None else 1.0}
        if launch.iteration_s is not None:
            values["trial/iteration_s"] = launch.iteration_s
        if launch.tokens_per_s is not None:
            values["trial/tokens_per_s"] = launch.tokens_per_s
        if launch.versus_baseline is not None:
            self._best = max(self._best or 0.0, launch.versus_baseline)
            values["trial/versus_baseline"] = launch.versus_baseline
            values["best/versus_baseline"] = self._best
        self._append(record(event(self._clock(), step=int(launch.label), scalars=values)))

    def _append(self, content: bytes) -> None:
        if self._is_broken:
            return
        try:
            with self._file.open("ab") as file:
                file.write(content)
        except OSError as error:
            self._is_broken = True
            self._observer.message(f"{self._file}: cannot be written: {error.strerror}; the run continues")


def event(
    time_s: float, *, step: int = 0, version: str | None = None, scalars: Mapping[str, float] | None = None
) -> bytes:
    """An Event message: wall time (1), step (2), file version (3) or a summary (5) of named scalars."""
    parts = [b"\x09", struct.pack("<d", time_s)]
    if step:
        parts += [b"\x10", _varint(step)]
    if version is not None:
        parts += [b"\x1a", _sized(version.encode())]
    if scalars:
        values = b"".join(b"\x0a" + _sized(_value(name, value)) for name, value in scalars.items())
        parts += [b"\x2a", _sized(values)]
    return b"".join(parts)


def record(content: bytes) -> bytes:
    """A TFRecord: length, its checksum, the content, its checksum."""
    length = struct.pack("<Q", len(content))
    return length + _checksum(length) + content + _checksum(content)


def crc32c(content: bytes) -> int:
    """CRC-32C (Castagnoli), as RFC 3720 has it."""
    remainder = 0xFFFFFFFF
    for byte in content:
        remainder ^= byte
        for _ in range(8):
            remainder = (remainder >> 1) ^ (_POLYNOMIAL if remainder & 1 else 0)
    return remainder ^ 0xFFFFFFFF


def _value(name: str, value: float) -> bytes:
    return b"\x0a" + _sized(name.encode()) + b"\x15" + struct.pack("<f", value)


def _checksum(content: bytes) -> bytes:
    checksum = crc32c(content)
    return struct.pack("<I", (((checksum >> 15) | (checksum << 17)) + _MASK) & 0xFFFFFFFF)


def _sized(content: bytes) -> bytes:
    return _varint(len(content)) + content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
