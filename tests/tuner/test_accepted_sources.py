"""A run keeps which changed functions of the framework its sessions accepted."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.cli.tune_search import _accept_known_sources as accept_known_sources
from quartet_plugin.protocol.environment import ACCEPT_CHANGED_SOURCE
from quartet_plugin.tuner.accepted_sources import EVENT, accepted_before
from quartet_plugin.tuner.history_rows import read_events
from tests.space.jobs import make_job
from tests.tuner.fakes import FakeMachine, resume, tune
from tests.tuner.fakes import begin_with_journal as begin

ACCEPTED = ("a.f@0123456789abcdef", "a.g@fedcba9876543210")


def without_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is not set now, nor is it after the test."""
    monkeypatch.setenv(ACCEPT_CHANGED_SOURCE, "")
    monkeypatch.delenv(ACCEPT_CHANGED_SOURCE)


def test_what_was_accepted_is_accepted_by_a_session_without_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(tmp_path / "r", study={"trials": 1, "rounds": 3, "top_k": 1})
    tune(run, FakeMachine(job=replace(make_job(), accepted_sources=ACCEPTED)))
    events = [event for event in read_events(run.folder.events_file) if event["kind"] == EVENT]
    assert [(event["trial"], event["functions"]) for event in events] == [(0, [*ACCEPTED])]
    assert accepted_before(run.folder) == ACCEPTED
    without_option(monkeypatch)
    accept_known_sources(resume(tmp_path / "r"))
    assert os.environ[ACCEPT_CHANGED_SOURCE] == ",".join(ACCEPTED)
    assert "changed source (a.f and 1 more) is accepted as in an earlier session" in capsys.readouterr().out
    monkeypatch.setenv(ACCEPT_CHANGED_SOURCE, "1")
    accept_known_sources(resume(tmp_path / "r"))
    assert os.environ[ACCEPT_CHANGED_SOURCE] == "1"


def test_a_run_that_accepted_nothing_accepts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begin(tmp_path / "r", study={"trials": 1, "rounds": 3, "top_k": 1})
    run.folder.events_file.write_text('{"time": 1, "kind": "accepted-source", "functions": {"a": 1}}\n')
    tune(run, FakeMachine())
    without_option(monkeypatch)
    accept_known_sources(resume(tmp_path / "r"))
    assert ACCEPT_CHANGED_SOURCE not in os.environ
