"""Losses and gradient norms under our stages, schedules and rank orders equal stock's and one process's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet_plugin.model.costs import Costs, LayerCost
from quartet_plugin.model.plan import Plan, write_plan
from quartet_plugin.schedule.search import search
from tests.deepspeed.support import layout, plan, schedule, schedule_file, train

RELATIVE = 1e-6


def assert_same(found: dict[str, Any], expected: dict[str, Any], relative: float = RELATIVE) -> None:
    assert "error" not in found, found
    assert found["losses"] == pytest.approx(expected["losses"], rel=relative)
    assert found["norms"] == pytest.approx(expected["norms"], rel=relative)


def written(folder: Path, made: Plan) -> dict[str, str]:
    """A `quartet` section that names the plan."""
    path = folder / f"plan-{len(list(folder.iterdir()))}.json"
    write_plan(made, path=path)
    return {"plan": str(path)}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Stock DeepSpeed on one device: 4 layers, then 4 layers tied, then 8 layers, 8 microbatches."""
    folder = tmp_path_factory.mktemp("one")
    return train(
        folder,
        processes=1,
        options=[
            {"stages": 1, "evaluate": True},
            {"stages": 1, "tied": True},
            {"stages": 1, "layers": 8, "microbatches": 8},
        ],
    )


def searched(num_microbatches: int) -> Any:
    """An order out of the schedule search, with a split of its own."""
    layers = [
        LayerCost(name="embedding", forward_s=0.2, input_grad_s=0.0, weight_grad_s=0.2, activation_bytes=1)
    ]
    layers += [
        LayerCost(name=f"layer.{n}", forward_s=1.0, input_grad_s=1.1, weight_grad_s=0.8, activation_bytes=1)
        for n in range(4)
    ]
    layers.append(
        LayerCost(name="head", forward_s=1.5, input_grad_s=1.5, weight_grad_s=1.5, activation_bytes=1)
    )
    costs = Costs(
        num_devices=2,
        num_microbatches=num_microbatches,
        layers=tuple(layers),
        device_slowdown=np.ones(2),
        transfer_s=np.array([[0.0, 0.05], [0.05, 0.0]]),
        memory_limit_bytes=None,
        weight_grad_held_fraction=1.0,
        backward_fused_s=None,
    )
    return search(costs, evaluations=200, seed=3).schedule


def test_schedules_on_two_devices(tmp_path: Path, one_process: list[dict[str, Any]]) -> None:
    orders = [
        schedule("1f1b", 2, 4, (3, 3)),
        schedule("gpipe", 2, 4, (2, 4)),
        schedule("zb-h1", 2, 4, (4, 2)),
        schedule("interleaved", 2, 4, (2, 1, 1, 2)),
        schedule("zb-v", 2, 4, (1, 2, 2, 1)),
        searched(4),
    ]
    files = [{"quartet": {"schedule": schedule_file(tmp_path, made)}} for made in orders]
    stock = {"evaluate": True}
    found = train(tmp_path, processes=2, options=[stock, *({**stock, **file} for file in files)])
    assert found[0]["schedule"] == "TrainSchedule"
    for one, made in zip(found[1:], orders, strict=True):
        assert one["schedule"] == "PlannedSchedule"
        assert np.diff(one["parts"]).tolist() == list(made.layers_per_stage or ())
        for expected in (found[0], one_process[0]):
            assert_same(one, expected)
            assert one["evaluation"] == pytest.approx(expected["evaluation"], rel=RELATIVE)


def test_features_with_our_schedules(tmp_path: Path, one_process: list[dict[str, Any]]) -> None:
    v = {"quartet": {"schedule": schedule_file(tmp_path, schedule("zb-v", 2, 4, (2, 1, 1, 2)))}}
    h1 = {"quartet": {"schedule": schedule_file(tmp_path, schedule("zb-h1", 2, 4, (3, 3)))}}
    tied = {"quartet": {"schedule": schedule_file(tmp_path, schedule("zb-v", 2, 4, (2, 1, 1, 2)))}}
    features: list[tuple[dict[str, Any], dict[str, Any], float]] = [
        ({"zero": 1, "clipping": 0.5}, v, RELATIVE),
        ({"precision": "bf16", "zero": 1, "clipping": 0.5}, h1, 2e-3),
        ({"precision": "bf16"}, v, 2e-3),
        ({"checkpointing": 1, "reentrant": False}, v, RELATIVE),
        ({"pairs": True, "partition": "uniform"}, v, RELATIVE),
        ({"dynamic": True}, h1, RELATIVE),
        ({"tied": True}, tied, RELATIVE),
    ]
    options = [side for base, ours, _ in features for side in (base, {**base, **ours})]
    found = train(tmp_path, processes=2, options=options)
    for (base, _, relative), stock, ours in zip(features, found[::2], found[1::2], strict=True):
        assert ours["schedule"] == "PlannedSchedule", base
        assert_same(ours, stock, relative)
    assert_same(found[-1], one_process[1])


def test_plans_on_two_devices(tmp_path: Path, one_process: list[dict[str, Any]]) -> None:
    own = layout(2, world=2)
    uneven = plan((3, 1), planned=own, own=own, batch=8)
    permuted = plan((1, 3), planned=own, own=own, batch=8, order=(1, 0))
    v = schedule("zb-v", 2, 4, (2, 1, 1, 2))
    custom = plan(
        (1, 1, 1, 1), planned=layout(2, world=2, chunks=2), own=own, batch=8, order=(1, 0), schedule=v
    )
    data = plan((4,), planned=layout(1, world=2, is_sharded=True), own=own, batch=8)
    plans = (uneven, permuted, custom, data)
    found = train(tmp_path, processes=2, options=[{"quartet": written(tmp_path, one)} for one in plans[:3]])
    for one in found:
        assert_same(
            one,
            {**one_process[0], "losses": one_process[0]["losses"][:4], "norms": one_process[0]["norms"][:4]},
        )
    assert [one["parts"] for one in found] == [[0, 4, 6], [0, 2, 6], [0, 2, 3, 4, 6]]
    assert [one["ranks"] for one in found] == [[0, 1], [1, 0], [1, 0]]
    sharded = train(
        tmp_path, processes=2, options=[{"zero": 0, "quartet": written(tmp_path, data), "steps": 4}]
    )
    assert sharded[0]["zero"] == 1
    assert sharded[0]["losses"] == pytest.approx(one_process[0]["losses"][:4], rel=1e-6)


def test_four_devices(tmp_path: Path, one_process: list[dict[str, Any]]) -> None:
    sizes = {"stages": 4, "layers": 8, "microbatches": 8}
    own = layout(4, world=4)
    v = schedule("zb-v", 4, 8, (1, 2, 1, 1, 2, 1, 1, 1))
    permuted = plan((3, 1, 2, 2), planned=own, own=own, batch=16, order=(2, 0, 3, 1))
    found = train(
        tmp_path,
        processes=4,
        options=[
            sizes,
            {**sizes, "quartet": {"schedule": schedule_file(tmp_path, v)}},
            {**sizes, "quartet": written(tmp_path, permuted)},
            {},
            {"quartet": {"schedule": schedule_file(tmp_path, schedule("zb-v", 2, 4, (2, 1, 1, 2)))}},
        ],
    )
    for one in found[:3]:
        assert_same(one, one_process[2])
    assert found[2]["ranks"] == [2, 0, 3, 1]
    # Two pipelines of two devices each.
    assert_same(found[4], found[3])
