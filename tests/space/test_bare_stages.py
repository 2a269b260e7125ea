"""A model without anything before its first layer or behind its last one leaves no stage empty."""

from dataclasses import replace

import pytest

from quartet_plugin.model.plan import Split
from quartet_plugin.space.plan_space import build_space
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_nodes


@pytest.mark.parametrize(
    ("features", "refused"),
    [
        ((), set()),
        (("bare_first_stage",), {"first"}),
        (("bare_last_stage",), {"last"}),
        (("bare_first_stage", "bare_last_stage"), {"first", "last"}),
    ],
)
def test_an_empty_stage_is_refused_where_it_would_hold_nothing(
    features: tuple[str, ...], refused: set[str]
) -> None:
    job = make_job(features=features)
    config = parse_config({}, where="q.yaml").search
    space = build_space(job, nodes=make_nodes(2), search=config, run="r", seed=0)
    baseline = space.baseline
    num_layers, rest = baseline.shape.num_layers, baseline.layout.num_stages - 1
    assert rest >= 1
    inner = (1,) * (rest - 1)
    splits = {"first": (0, *inner, num_layers - len(inner)), "last": (num_layers - len(inner), *inner, 0)}
    for name, counts in splits.items():
        plan = replace(baseline, split=Split(transformer_layers_per_stage=counts))
        reason = space.refusal_of(plan)
        assert (reason is not None) == (name in refused)
        assert reason is None or f"bare_{name}_stage" in reason
    assert space.refusal_of(baseline) is None
    assert not space.locked
