"""Plans of a model with multi-token prediction train as one process does: real Megatron on gloo."""

import functools
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.trial.as_planned import difference_from
from tests.megatron.entry_launch import MEGATRON_FLAGS, SHAPE, make_plan
from tests.megatron.same_training import Alone, assert_same_training, reports_as_planned, train_alone
from tests.megatron.test_parity import train

# Megatron refuses learned positions beside multi-token prediction.
FLAGS = shlex.split("--position-embedding-type rope --untie-embeddings-and-output-weights --mtp-num-layers")
COMMANDS = {layers: [*MEGATRON_FLAGS, *FLAGS, str(layers)] for layers in (1, 2)}
MODEL = replace(SHAPE, position_embedding="rope", tied_embeddings=False)


def plan_of(mtp_layers: int, *, split: Sequence[int], is_before_last: bool = False, **sizes: Any) -> Plan:
    usual = split
    if is_before_last:
        # The plan is made first, with stages that it may have without multi-token prediction.
        inner = len(split) - 2
        usual = (MODEL.num_layers - inner, *[1] * inner, 0)
    plan = make_plan(split=usual, shape=MODEL, made_for_shape=MODEL, **sizes)
    made = Split(transformer_layers_per_stage=tuple(split), mtp_before_last=is_before_last or None)
    return replace(plan, split=made, made_for=replace(plan.made_for, mtp_layers=mtp_layers))


PLANS: dict[str, dict[str, Any]] = {
    "pp2 uneven": {"split": (4, 2), "pipeline": 2},
    "pp2 no layer beside it": {"split": (6, 0), "pipeline": 2},
    "pp2 interleaved": {"split": (1, 2, 2, 1), "pipeline": 2, "chunks": 2, "group": 4},
    "pp4 permuted": {"split": (2, 2, 1, 1), "pipeline": 4, "order": (0, 2, 3, 1)},
    "pp2 dp2": {"split": (4, 2), "pipeline": 2, "data": 2, "micro_batch": 1, "order": (1, 0, 3, 2)},
    "pp2 tp2": {"split": (4, 2), "pipeline": 2, "tensor": 2},
}
# Those with the head alone on the last stage, which take a script that gives the stage before it tokens.
BEFORE_LAST: dict[str, dict[str, Any]] = {
    "pp4": {"split": (2, 2, 2, 0), "pipeline": 4},
    "pp4 no layer beside it": {"split": (3, 3, 0, 0), "pipeline": 4},
    "pp4 interleaved": {"split": (1,) * 6 + (0, 0), "pipeline": 4, "chunks": 2, "group": 4},
    "pp2 with the embedding": {"split": (6, 0), "pipeline": 2},
    "pp2 tp2": {"split": (6, 0), "pipeline": 2, "tensor": 2},
}
INNER_SCRIPT = Path(__file__).with_name("inner_mtp_pretrain.py")
# Of the others the processes' degrees are tried elsewhere without these layers, too: they run nightly.
FIRST = {"pp2 interleaved", "pp4 permuted"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Alone]:
    """By the number of layers what one process makes of them, trained when it is first asked for."""

    @functools.cache
    def alone(mtp_layers: int) -> Alone:
        folder = tmp_path_factory.mktemp("one")
        return train_alone(plan_of(mtp_layers, split=(6,)), folder=folder, command=COMMANDS[mtp_layers])

    return alone


@pytest.mark.parametrize("mtp_layers", COMMANDS)
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(FIRST)),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in sorted(PLANS.keys() - FIRST)),
    ],
)
def test_plan_trains_as_one_process_does(
    name: str, mtp_layers: int, trained: Callable[[int], Alone], tmp_path: Path
) -> None:
    alone = trained(mtp_layers)
    plan = plan_of(mtp_layers, **PLANS[name])
    done = train(plan, folder=tmp_path, weights=alone.weights, command=COMMANDS[mtp_layers])
    assert_same_training(plan, done, alone.launch)
    reports = reports_as_planned(plan, tmp_path)
    counts = list(plan.split.transformer_layers_per_stage)
    moved = [counts[0] - 1, *counts[1:-1], counts[-1] + 1]
    others = {
        "split: layers": replace(plan, split=Split(transformer_layers_per_stage=tuple(moved))),
        "layers of multi-token prediction were built": replace(
            plan, made_for=replace(plan.made_for, mtp_layers=None)
        ),
    }
    for words, other in others.items():
        assert words in (difference_from(other, reports) or "")


@pytest.mark.parametrize("mtp_layers", COMMANDS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("pp4 no layer beside it", marks=pytest.mark.slow),
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in sorted(BEFORE_LAST.keys() - {"pp4 no layer beside it"})
        ),
    ],
)
def test_it_trains_before_a_head_alone_as_one_process_does(
    name: str, mtp_layers: int, trained: Callable[[int], Alone], tmp_path: Path
) -> None:
    alone = trained(mtp_layers)
    plan = plan_of(mtp_layers, is_before_last=True, **BEFORE_LAST[name])
    done = train(
        plan, folder=tmp_path, weights=alone.weights, command=COMMANDS[mtp_layers], script=INNER_SCRIPT
    )
    assert_same_training(plan, done, alone.launch)
    reports_as_planned(plan, tmp_path)
