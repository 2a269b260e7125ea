"""The doctor's rows: an axis whose flags the Megatron here lacks is kept, with the flag."""

from collections.abc import Iterable

import pytest

from quartet_plugin.megatron import doctor
from quartet_plugin.space.knobs.registry import SETTINGS
from quartet_plugin.space.needed_flags import NEEDED_FLAGS
from tests.space.knobs.made_up import ROPE_FUSION

EVERY_FLAG = {name for names in NEEDED_FLAGS.values() for name in names} | {
    knob.destination for knob in SETTINGS
}


def rows(monkeypatch: pytest.MonkeyPatch, known: Iterable[str]) -> dict[str, tuple[str, str]]:
    """State and reason of each axis, where the parser of the Megatron here has the arguments `known`."""
    monkeypatch.setattr(doctor, "parser_destinations", lambda: set(known))
    return {row["axis"]: (row["state"], row["reason"]) for row in doctor.report()["axes"]}


def test_every_axis_works_with_the_installed_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {state for state, _ in rows(monkeypatch, EVERY_FLAG).values()} == {doctor.WORKS}


def test_a_missing_flag_keeps_the_axes_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SETTINGS", (*SETTINGS, ROPE_FUSION))
    axes = rows(monkeypatch, EVERY_FLAG - {"pipeline_model_parallel_layout", "ddp_bucket_size"})
    reason = "this Megatron has no --pipeline-model-parallel-layout"
    kept = {axis: why for axis, (state, why) in axes.items() if state == doctor.KEPT}
    assert kept == {"split": reason, "schedule": reason, "degrees": reason}
    assert axes["options"] == (doctor.WORKS, "native flags, without --ddp-bucket-size, --no-rope-fusion")
