"""A HybridModel's plans train as one process does, and a study tunes it: real Megatron on gloo.

Its layers are attention and MLPs; `test_hybrid_kinds` has the others.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.model.receipt import read_receipt
from quartet_plugin.model.shape import LayerKinds
from quartet_plugin.trial.as_planned import difference_from
from quartet_plugin.trial.request import Outcome
from quartet_plugin.tuner.history import read_history
from tests.megatron.entry_launch import MEGATRON_FLAGS, SHAPE, make_plan
from tests.megatron.same_training import Alone, assert_same_training, reports_as_planned, train_alone
from tests.megatron.test_parity import train
from tests.short_rounds import short_rounds as short_rounds
from tests.tuner.live_studies import launch_settings as launch_settings
from tests.tuner.live_studies import tune

SCRIPT = Path(__file__).with_name("hybrid_pretrain.py")
# Without --num-layers: the pattern says it.
FLAGS = MEGATRON_FLAGS[2:]
MODEL = replace(SHAPE, layer_kinds=LayerKinds(attention=3, mlp=3, experts=0, state_space=0))


def command_of(pattern: str = "*-*-*-", *, pipeline: int = 1) -> list[str]:
    return [*FLAGS, "--hybrid-layer-pattern", pattern, "--pipeline-model-parallel-size", str(pipeline)]


def plan_of(*, split: Sequence[int] = (6,), **sizes: Any) -> Plan:
    return make_plan(split=split, shape=MODEL, made_for_shape=MODEL, **sizes)


PLANS: dict[str, tuple[Plan, list[str]]] = {
    "dp2": (plan_of(data=2), command_of()),
    "tp2": (plan_of(tensor=2), command_of()),
    "pp2 dp2": (
        plan_of(split=(4, 2), pipeline=2, data=2, micro_batch=1, order=(2, 0, 3, 1)),
        command_of("*-*-|*-", pipeline=2),
    ),
    "pp2 interleaved": (
        plan_of(split=(1, 2, 2, 1), pipeline=2, chunks=2, group=2),
        command_of("*|-*|-*|-", pipeline=2),
    ),
}
# Stages that the command does not have: the plan writes the pipes, or takes them away.
PLANS |= {
    "pp2, cut by the plan": (plan_of(split=(2, 4), pipeline=2), command_of()),
    "pp2 dp2, other stages": (
        plan_of(split=(1, 5), pipeline=2, data=2, micro_batch=1, order=(2, 0, 3, 1)),
        command_of("*-*-|*-", pipeline=2),
    ),
    "pp2 interleaved, cut by the plan": (
        plan_of(split=(1, 2, 2, 1), pipeline=2, chunks=2, group=2),
        command_of("*-*-|*-", pipeline=2),
    ),
    "dp2, pipes taken away": (plan_of(data=2), command_of("*-*-|*-", pipeline=2)),
}
FIRST = ("dp2", "tp2", "pp2 dp2", "pp2, cut by the plan", "pp2 interleaved, cut by the plan")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder = tmp_path_factory.mktemp("one")
    return train_alone(plan_of(), folder=folder, command=command_of(), script=SCRIPT)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in FIRST),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in sorted(PLANS.keys() - set(FIRST))),
    ],
)
def test_plan_trains_as_one_process_does(name: str, alone: Alone, tmp_path: Path) -> None:
    plan, command = PLANS[name]
    done = train(plan, folder=tmp_path, weights=alone.weights, command=command, script=SCRIPT)
    assert_same_training(plan, done, alone.launch)
    reports = reports_as_planned(plan, tmp_path)
    job = next(content["job"] for content in done.ranks.values() if content["rank"] == 0)
    assert tuple(job["split"]["transformer_layers_per_stage"]) == plan.split.transformer_layers_per_stage
    if plan.layout.num_stages > 1:
        first, second, *rest = plan.split.transformer_layers_per_stage
        other = replace(plan, split=Split(transformer_layers_per_stage=(first + 1, second - 1, *rest)))
        assert "split: layers" in (difference_from(other, reports) or "")


CONFIG = """\
run: own
search: {tensor_parallel: 1, pipeline_parallel: [1, 2], mapping: stock}
trial: {warmup: 1, measure: 3, deadline_s: 240}
study: {trials: 3, top_k: 1, rounds: 3, control: 0}
device: cpu
"""


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("short_rounds", "launch_settings")
def test_a_study_tunes_the_stages_with_the_rest(tmp_path: Path) -> None:
    command = ["torchrun", "--nproc-per-node", "2", str(SCRIPT), *command_of()]
    run = tune(tmp_path, CONFIG, command)

    trials = [trial for trial in read_history(run).trials if trial.number > 0]
    assert len(trials) == 3
    assert {trial.outcome for trial in trials} <= {Outcome.OK, Outcome.UNSTABLE}
    plans = [trial.plan for trial in trials if trial.plan is not None]
    assert {plan.layout.pipeline_parallel for plan in plans} >= {2}
    assert len({plan.key for plan in plans}) == 3
    for plan in plans:
        assert plan.shape == MODEL
        receipt = read_receipt(run / "parity" / f"plan-{plan.key[:12]}" / "plan.parity.json")
        assert receipt.verdict == "passed"
