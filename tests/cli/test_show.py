"""`quartet show`: a plan for reading, with the class of what it changes."""

from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.model.measurement import Comparison, Interval, Measurement
from quartet_plugin.model.plan import Mapping, Plan, Slot, Split, write_plan
from quartet_plugin.report.tables import changes, plan_lines
from tests.model.plans import PLAN
from tests.space.jobs import make_layout, make_shape

STOCK = Mapping(slots=(Slot(node=0, local=0), Slot(node=0, local=1)))
BASELINE = replace(PLAN, split=PLAN.made_for.baseline.split, mapping=STOCK)


def measured(median: float) -> Measurement:
    return Measurement(
        iteration_s=Interval(median=median, low=median * 0.9, high=median * 1.1),
        tokens_per_s=8192 / median,
        model_flops_per_s_per_device=1e10 / median,
        peak_memory_bytes=1 << 30,
        num_launches=5,
        num_iterations=50,
    )


def with_gain(plan: Plan) -> Plan:
    comparison = Comparison(
        objective="tokens_per_s",
        plan=measured(0.5),
        baseline=measured(0.65),
        speedup=Interval(median=1.3, low=1.24, high=1.37),
    )
    return replace(plan, measurement=comparison)


def test_a_plan_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    write_plan(with_gain(PLAN), path=path)
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    for words in ("6+2", "1f1b", "1,0", "made for", "1.30x (1.24x to 1.37x)", "class A"):
        assert words in shown


def test_every_change_has_its_class() -> None:
    found = {change.part: change.change_class for change in changes(PLAN)}
    assert found == {"split": "A", "mapping": "A"}
    assert changes(BASELINE) == ()
    smaller = replace(BASELINE, layout=make_layout(micro_batch_size=2))
    assert [c.change_class for c in changes(smaller)] == ["B"]
    deeper = replace(
        BASELINE, shape=make_shape(num_layers=10), split=Split(transformer_layers_per_stage=(5, 5))
    )
    assert {c.part: c.change_class for c in changes(deeper)} == {
        "shape": "D",
        "split": "A",
    }
    assert any("class D" in line for line in plan_lines(deeper))
    assert not any("class D" in line for line in plan_lines(PLAN))


def test_a_plan_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    for content in ("", "[]", "{}", '{"digest": 1}', "\x00"):
        path.write_text(content)
        assert main(["show", str(path)]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert main(["show", str(tmp_path / "none.json")]) == 2
    assert main(["show", str(path), "--", "torchrun", "x.py"]) == 2
