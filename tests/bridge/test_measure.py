"""The job that a trial of the Bridge reports."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from quartet_plugin.bridge import measure
from quartet_plugin.bridge.fields import arguments_of
from quartet_plugin.megatron import describe
from quartet_plugin.model.megatron_arguments import features_of
from tests.bridge.configurations import make_config


def test_the_job_has_the_features_that_the_trial_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe_job(args: Namespace, *, as_written: Namespace, **_: Any) -> dict[str, Any]:
        return {"features": features_of(describe.as_user_wrote(args, as_written)), "settings": []}

    monkeypatch.setattr(describe, "describe_job", describe_job)
    monkeypatch.setattr(measure, "_world_size", lambda: 2)
    written = make_config(inprocess_restart=SimpleNamespace(enabled=True))
    files: Any = SimpleNamespace(spec=SimpleNamespace(num_iterations=3))
    meter = measure.BridgeMeter(files, started_at=0.0)
    meter.left_out(["inprocess_restart"], as_written=arguments_of(written))
    meter._context = SimpleNamespace(state=SimpleNamespace(cfg=make_config(inprocess_restart=None)))
    assert meter._job()["features"] == ["inprocess_restart"]
