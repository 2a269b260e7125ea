"""TensorBoard's event files: the bytes are what its readers expect, and a broken disk ends no run."""

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.model.launch import LaunchRecord
from quartet_plugin.report.live import PlainLines
from quartet_plugin.report.tensorboard import FILE_NAME, Scalars, crc32c, event, record


def varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def fields(content: bytes) -> list[tuple[int, object]]:
    """A protobuf message, field by field, by the wire format's rules."""
    at, found = 0, []
    while at < len(content):
        key, at = varint(content, at)
        kind = key & 7
        value: object
        if kind == 0:
            value, at = varint(content, at)
        elif kind == 1:
            value, at = struct.unpack_from("<d", content, at)[0], at + 8
        elif kind == 5:
            value, at = struct.unpack_from("<f", content, at)[0], at + 4
        else:
            assert kind == 2
            size, at = varint(content, at)
            value, at = content[at : at + size], at + size
        found.append((key >> 3, value))
    return found


def records(content: bytes) -> list[bytes]:
    """A TFRecord file, checksums held."""
    at, found = 0, []
    while at < len(content):
        head = content[at : at + 8]
        (size,) = struct.unpack("<Q", head)
        body = content[at + 12 : at + 12 + size]
        for part, stated in (
            (head, content[at + 8 : at + 12]),
            (body, content[at + 12 + size : at + 16 + size]),
        ):
            crc = crc32c(part)
            masked = ((crc >> 15 | (crc << 17 & 0xFFFFFFFF)) + 0xA282EAD8) & 0xFFFFFFFF
            assert struct.unpack("<I", stated)[0] == masked
        found.append(body)
        at += 16 + size
    return found


def scalars(body: bytes) -> tuple[int, dict[str, float]]:
    found = fields(body)
    step = next((value for number, value in found if number == 2), 0)
    assert isinstance(step, int)
    values = {}
    for number, summary in found:
        if number == 5:
            assert isinstance(summary, bytes)
            for _, value in fields(summary):
                assert isinstance(value, bytes)
                (_, name), (_, number_) = fields(value)
                assert isinstance(name, bytes)
                assert isinstance(number_, float)
                values[name.decode()] = number_
    return step, values


@pytest.mark.parametrize(
    ("content", "crc"),
    [(b"123456789", 0xE3069283), (b"", 0), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)],
)
def test_the_checksum_is_the_published_one(content: bytes, crc: int) -> None:
    """The check value of the catalogue, and RFC 3720's test vectors."""
    assert crc32c(content) == crc


@settings(deadline=None)
@given(
    st.integers(0, 2**40),
    st.dictionaries(st.text(min_size=1, max_size=40), st.floats(width=32, allow_nan=False), max_size=5),
)
def test_what_is_written_is_read_back(step: int, values: dict[str, float]) -> None:
    (body,) = records(record(event(1.5, step=step, scalars=values)))
    assert fields(body)[0] == (1, 1.5)
    assert scalars(body) == (step, values)


def launch(label: str, ratio: float | None) -> LaunchRecord:
    time_s = None if ratio is None else 0.5 / ratio
    return LaunchRecord(
        label=label,
        plan=None,
        outcome="OK" if ratio else "INFEASIBLE",
        iteration_s=time_s,
        tokens_per_s=None if time_s is None else 100 / time_s,
        versus_baseline=ratio,
    )


def test_a_point_a_trial_and_the_best_so_far(tmp_path: Path) -> None:
    said: list[str] = []
    watching = Scalars(PlainLines(said.append), tmp_path / "tensorboard", clock=lambda: 7.0)
    for label, ratio in (("0", 1.0), ("1", 1.25), ("2", None), ("3", 0.5), ("1 round 1", 2.0)):
        watching.plan_finished(launch(label, ratio))
    assert len(said) == 5
    first, *rest = records((tmp_path / "tensorboard" / FILE_NAME).read_bytes())
    assert (3, b"brain.Event:2") in fields(first)
    points = dict(scalars(body) for body in rest)
    assert sorted(points) == [0, 1, 2, 3]
    assert points[1] == pytest.approx(
        {
            "trial/is_measured": 1.0,
            "trial/iteration_s": 0.4,
            "trial/tokens_per_s": 250.0,
            "trial/versus_baseline": 1.25,
            "best/versus_baseline": 1.25,
        }
    )
    assert points[2] == {"trial/is_measured": 0.0}
    assert points[3]["best/versus_baseline"] == 1.25


def test_a_new_session_begins_the_file_anew(tmp_path: Path) -> None:
    for _ in range(2):
        watching = Scalars(PlainLines(lambda text: None), tmp_path)
        watching.plan_finished(launch("0", 1.0))
    assert len(records((tmp_path / FILE_NAME).read_bytes())) == 2


def test_a_disk_that_fails_is_said_once_and_ends_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    watching = Scalars(PlainLines(said.append), tmp_path)
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).mkdir()
    for number in range(3):
        watching.plan_finished(launch(str(number), 1.0))
    assert len([text for text in said if "the run continues" in text]) == 1
