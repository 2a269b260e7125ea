"""Plans of a model with multi-token prediction train as one process does: real Megatron on gloo."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.trial.as_planned import difference_from
from tests.megatron.entry_launch import MEGATRON_FLAGS, SHAPE, Launch, make_plan
from tests.megatron.same_training import assert_same_training, kept_weights, reports_as_planned
from tests.megatron.test_parity import train

# Megatron refuses learned positions beside multi-token prediction.
FLAGS = shlex.split("--position-embedding-type rope --untie-embeddings-and-output-weights --mtp-num-layers")
COMMANDS = {layers: [*MEGATRON_FLAGS, *FLAGS, str(layers)] for layers in (1, 2)}
MODEL = replace(SHAPE, position_embedding="rope", tied_embeddings=False)


def plan_of(mtp_layers: int, *, split: Sequence[int], **sizes: Any) -> Plan:
    plan = make_plan(split=split, shape=MODEL, made_for_shape=MODEL, **sizes)
    return replace(plan, made_for=replace(plan.made_for, mtp_layers=mtp_layers))


PLANS: dict[str, dict[str, Any]] = {
    "pp2 uneven": {"split": (4, 2), "pipeline": 2},
    "pp2 no layer beside it": {"split": (6, 0), "pipeline": 2},
    "pp2 interleaved": {"split": (1, 2, 2, 1), "pipeline": 2, "chunks": 2, "group": 4},
    "pp4 permuted": {"split": (2, 2, 1, 1), "pipeline": 4, "order": (0, 2, 3, 1)},
    "pp2 dp2": {"split": (4, 2), "pipeline": 2, "data": 2, "micro_batch": 1, "order": (1, 0, 3, 2)},
    "pp2 tp2": {"split": (4, 2), "pipeline": 2, "tensor": 2},
}
# Of the others the processes' degrees are tried elsewhere without these layers, too: they run nightly.
FIRST = {"pp2 interleaved", "pp4 permuted"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, Launch]]:
    """By the number of layers the weights, and what one process makes of them."""
    made = {}
    for mtp_layers, flags in COMMANDS.items():
        folder = tmp_path_factory.mktemp("mtp") / "weights"
        kept_weights(folder, flags)
        alone = train(
            plan_of(mtp_layers, split=(6,)),
            folder=tmp_path_factory.mktemp("one"),
            weights=folder,
            command=flags,
        )
        made[mtp_layers] = (folder, alone)
    return made


@pytest.mark.parametrize("mtp_layers", COMMANDS)
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(FIRST)),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in sorted(PLANS.keys() - FIRST)),
    ],
)
def test_plan_trains_as_one_process_does(
    name: str, mtp_layers: int, trained: dict[int, tuple[Path, Launch]], tmp_path: Path
) -> None:
    weights, alone = trained[mtp_layers]
    plan = plan_of(mtp_layers, **PLANS[name])
    done = train(plan, folder=tmp_path, weights=weights, command=COMMANDS[mtp_layers])
    assert_same_training(plan, done, alone)
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
