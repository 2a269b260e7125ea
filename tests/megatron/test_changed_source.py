"""Functions of Megatron with a changed source, and which of them a user accepts."""

import re
from argparse import Namespace
from dataclasses import replace

import pytest

from quartet_plugin.errors import SeamError
from quartet_plugin.megatron import support
from quartet_plugin.megatron.seams import Seam
from quartet_plugin.megatron.seams.declared import GPT_MODEL_INIT, SCHEDULES, TRAIN_STEP
from quartet_plugin.protocol.accepted_sources import accepted_text
from quartet_plugin.protocol.environment import ACCEPT_CHANGED_SOURCE
from quartet_plugin.rank.source_tree import KnownFunction

KNOWN = {
    seam: next(known for known in seam.known.values() if known is not None and known.is_tried)
    for seam in (TRAIN_STEP, SCHEDULES[0], GPT_MODEL_INIT)
}


def here(changes: dict[Seam, str]) -> dict[Seam, KnownFunction]:
    """The functions here, of which some have another source."""
    return {seam: replace(known, source=changes.get(seam, known.source)) for seam, known in KNOWN.items()}


def test_only_the_sources_that_were_accepted_are_accepted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = here({TRAIN_STEP: "aaaaaaaaaaaaaaaa"})
    monkeypatch.setattr(support, "known_function", lambda seam: functions[seam])
    seams = tuple(KNOWN)
    monkeypatch.delenv(ACCEPT_CHANGED_SOURCE, raising=False)
    refusal = re.escape(TRAIN_STEP.path) + r": source differs .* --accept-changed-source allows"
    with pytest.raises(SeamError, match=refusal):
        support.require_known_sources(seams)
    monkeypatch.setenv(ACCEPT_CHANGED_SOURCE, "1")
    support.require_known_sources(seams)
    accepted = support.texts_of(lambda seam: functions[seam], (TRAIN_STEP,))
    monkeypatch.setenv(ACCEPT_CHANGED_SOURCE, accepted_text(accepted.values()))
    support.require_known_sources(iter(seams))
    assert support.changed_source_reason(accepted) is None
    for changes in (
        {TRAIN_STEP: "bbbbbbbbbbbbbbbb"},
        {TRAIN_STEP: "aaaaaaaaaaaaaaaa", GPT_MODEL_INIT: "aaaaaaaaaaaaaaaa"},
    ):
        functions.update(here(changes))
        with pytest.raises(SeamError, match="--accept-changed-source allows"):
            support.require_known_sources(seams)
        reason = support.changed_source_reason(support.texts_of(lambda seam: functions[seam], changes))
        assert reason is not None
        assert "--accept-changed-source" in reason


def test_a_job_names_the_sources_that_were_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {"a.f": "a.f@0123456789abcdef", "a.g": "a.g@0123456789abcdef"}
    monkeypatch.setattr(support, "changed_functions", lambda seams=None: {} if seams else changed)
    monkeypatch.delenv(ACCEPT_CHANGED_SOURCE, raising=False)
    assert support.accepted_functions(Namespace()) == ()
    monkeypatch.setenv(ACCEPT_CHANGED_SOURCE, "1")
    assert support.accepted_functions(Namespace()) == tuple(changed.values())
    monkeypatch.setenv(ACCEPT_CHANGED_SOURCE, changed["a.g"])
    assert support.accepted_functions(Namespace()) == (changed["a.g"],)


def test_a_function_that_cannot_be_read_has_an_empty_source() -> None:
    def read(seam: Seam) -> KnownFunction | None:
        if seam is TRAIN_STEP:
            return None
        raise SyntaxError("bad") if seam is GPT_MODEL_INIT else SeamError("gone")

    texts = support.texts_of(read, KNOWN)
    assert texts == {seam.path: f"{seam.path}@" for seam in KNOWN}
