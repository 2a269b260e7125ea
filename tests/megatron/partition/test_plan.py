"""A plan with a tensor partition through the entry: flags, permuted ranks, and what the trial reports."""

from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.errors import PlanError
from quartet_plugin.megatron.apply import check_fit, rewrite
from quartet_plugin.model.plan import Plan, write_plan
from quartet_plugin.model.tensor_partition import partition_from_label
from tests.megatron.entry_launch import MEGATRON_FLAGS, Launch, launch, make_plan, write_trial
from tests.megatron.native import native_flags


def plan_of(label: str) -> Plan:
    """Two tensor-parallel ranks in the other order than the launcher's."""
    plan = make_plan(split=(6,), tensor=2, order=[1, 0])
    layout = replace(plan.layout, sequence_parallel=True, tensor_partition=partition_from_label(label))
    return replace(plan, layout=layout)


def start(plan: Plan, folder: Path, *flags: str) -> Launch:
    """A trial of three iterations."""
    trial = write_trial(folder, plan=plan)
    write_plan(plan, path=folder / "plan.json")
    quartet = ("--quartet-plan", str(folder / "plan.json"), "--quartet-trial", str(trial))
    return launch(2, [*MEGATRON_FLAGS, *flags, "--quartet-device", "cpu", *quartet], folder=folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plan_trains_with_rings_as_with_stock(tmp_path: Path) -> None:
    stock, rings = (start(plan_of(label), tmp_path / label) for label in ("stock", "rings"))
    for done in (stock, rings):
        assert done.code == 0, done.output[-3000:]
    assert rings.losses() == pytest.approx(stock.losses(), rel=1e-6)
    assert rings.grad_norms() == pytest.approx(stock.grad_norms(), rel=1e-5)
    modules = {rank: set(content["execution"]["modules"]) for rank, content in rings.ranks.items()}
    assert all({"RingColumnLinear", "RingRowLinear"} <= names for names in modules.values())


def test_the_plan_turns_sequence_parallelism_on() -> None:
    words, notes = rewrite(plan_of("rings"), flags=native_flags(), words=MEGATRON_FLAGS)
    assert "--sequence-parallel" in words
    assert notes == [
        "the plan adds --tensor-model-parallel-size 2 --sequence-parallel --padded-vocab-size 128"
    ]


def test_a_feature_that_does_not_go_is_refused_by_name() -> None:
    user = native_flags().values([*MEGATRON_FLAGS, "--context-parallel-size", "2"])
    with pytest.raises(PlanError, match=r"^layout.tensor_partition: rings; --context-parallel-size: "):
        check_fit(plan_of("rings"), user, version="0.19.2", world_size=2)
