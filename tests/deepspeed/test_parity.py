"""Losses and gradient norms under our stages, schedules and rank orders equal stock's and one process's."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet_plugin.model.costs import Costs, LayerCost
from quartet_plugin.model.plan import Plan, write_plan
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.search import search
from tests.deepspeed.support import layout, plan, schedule, schedule_file, train

RELATIVE = 1e-6
# What the parity gate allows in half precision: loss, gradient norm.
HALF = (2e-3, 1e-2)
DEEP = {"layers": 8, "microbatches": 8}

Found = dict[str, Any]


def assert_same(found: Found, expected: Found, relative: tuple[float, float] = (RELATIVE, RELATIVE)) -> None:
    """The steps that both made."""
    assert "error" not in found, found
    steps = min(len(found["losses"]), len(expected["losses"]))
    assert steps >= 3
    assert found["losses"][:steps] == pytest.approx(expected["losses"][:steps], rel=relative[0])
    assert found["norms"][:steps] == pytest.approx(expected["norms"][:steps], rel=relative[1])


def written(folder: Path, made: Plan) -> dict[str, str]:
    """A `quartet` section that names the plan."""
    path = folder / f"plan-{len(list(folder.iterdir()))}.json"
    write_plan(made, path=path)
    return {"plan": str(path)}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """Stock DeepSpeed on one device, nothing to schedule."""
    options: dict[str, dict[str, Any]] = {
        "plain": {"stages": 1, "evaluate": True},
        "tied": {"stages": 1, "tied": True},
        "deep": {"stages": 1, **DEEP},
        "clipped": {"stages": 1, "zero": 1, "clipping": 0.5},
    }
    found = train(tmp_path_factory.mktemp("one"), processes=1, options=list(options.values()))
    return dict(zip(options, found, strict=True))


@cache
def searched(num_devices: int, num_microbatches: int, *, num_layers: int, memory: float) -> Schedule:
    """An order out of the schedule search, improved by insertion, with a split of its own.

    `memory` is how many layers' activations a device holds: where it is tight, no named order is the best.
    """

    def layer(name: str, forward_s: float, input_grad_s: float, weight_grad_s: float) -> LayerCost:
        return LayerCost(
            name=name,
            forward_s=forward_s,
            input_grad_s=input_grad_s,
            weight_grad_s=weight_grad_s,
            activation_bytes=1,
        )

    layers = [layer("embedding", 0.2, 0.0, 0.2)]
    layers += [layer(f"layer.{n}", 1.0, 1.1, 0.8) for n in range(num_layers)]
    layers.append(layer("head", 1.5, 1.5, 1.5))
    costs = Costs(
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        layers=tuple(layers),
        device_slowdown=np.linspace(1.0, 1.4, num_devices),
        transfer_s=np.full((num_devices, num_devices), 0.05) - 0.05 * np.eye(num_devices),
        memory_limit_bytes=np.full(num_devices, memory),
        weight_grad_held_fraction=1.0,
        backward_fused_s=None,
    )
    found = search(costs, placement="v", evaluations=400, seed=3).schedule
    assert found.origin.get("inserted"), (
        "no name and no point of the family makes this order: it is written out"
    )
    return found


@pytest.mark.slow
def test_schedules_on_two_devices(tmp_path: Path, one_process: dict[str, Found]) -> None:
    orders = [
        schedule("1f1b", 2, 4, (3, 3)),
        schedule("gpipe", 2, 4, (2, 4)),
        schedule("zb-h1", 2, 4, (4, 2)),
        schedule("interleaved", 2, 4, (2, 1, 1, 2)),
        schedule("zb-v", 2, 4, (1, 2, 2, 1)),
        schedule("v-half", 2, 4, (1, 3, 1, 1)),
        searched(2, 4, num_layers=4, memory=5.0),
    ]
    files = [{"quartet": {"schedule": schedule_file(tmp_path, made)}} for made in orders]
    stock = {"evaluate": True}
    found = train(tmp_path, processes=2, options=[stock, *({**stock, **file} for file in files)])
    assert found[0]["schedule"] == "TrainSchedule"
    assert found[0]["preloaded"] == {"compiler": True, "seams": True}, "once for all ranks, by their server"
    for one, made in zip(found[1:], orders, strict=True):
        assert one["schedule"] == "PlannedSchedule"
        assert np.diff(one["parts"]).tolist() == list(made.layers_per_stage or ())
        for expected in (found[0], one_process["plain"]):
            assert_same(one, expected)
            assert one["evaluation"] == pytest.approx(expected["evaluation"], rel=RELATIVE)


def files_of(folder: Path) -> tuple[Found, Found, Found]:
    """`quartet` sections: ZB-V, ZB-H1 and interleaved on two devices."""

    def file(name: str, entries: tuple[int, ...]) -> Found:
        return {"quartet": {"schedule": schedule_file(folder, schedule(name, 2, 4, entries))}}

    return file("zb-v", (2, 1, 1, 2)), file("zb-h1", (3, 3)), file("interleaved", (2, 1, 1, 2))


def stock_and_ours(folder: Path, pairs: list[tuple[Found, Found]]) -> list[tuple[Found, Found]]:
    """Each of the options under DeepSpeed's own schedule, and under ours; options that recur train once."""
    bases: list[Found] = []
    for base, _ in pairs:
        if base not in bases:
            bases.append(base)
    found = train(folder, processes=2, options=[*bases, *({**base, **ours} for base, ours in pairs)])
    both = [
        (found[bases.index(base)], ours) for (base, _), ours in zip(pairs, found[len(bases) :], strict=True)
    ]
    for stock, ours in both:
        assert "error" not in ours, ours
        assert (stock["schedule"], ours["schedule"]) == ("TrainSchedule", "PlannedSchedule"), ours
        assert ours["optimizer"] == stock["optimizer"]
    return both


@pytest.mark.slow
def test_features_with_our_schedules(tmp_path: Path, one_process: dict[str, Found]) -> None:
    v, h1, loop = files_of(tmp_path)
    features: list[tuple[Found, Found, str]] = [
        ({"zero": 1, "clipping": 0.5}, v, "clipped"),
        ({"zero": 1, "clipping": 0.5}, loop, "clipped"),
        ({"checkpointing": 1, "reentrant": False}, v, "plain"),
        ({"checkpointing": 2, "reentrant": False}, h1, "plain"),
        ({"pairs": True, "partition": "uniform"}, v, "plain"),
        ({"dynamic": True}, h1, "plain"),
        ({"dynamic": True}, loop, "plain"),
    ]
    found = stock_and_ours(tmp_path, [(base, ours) for base, ours, _ in features])
    for (_, _, expected), (stock, ours) in zip(features, found, strict=True):
        assert_same(ours, stock)
        assert_same(ours, one_process[expected])


@pytest.mark.slow
def test_tied_layers(tmp_path: Path, one_process: dict[str, Found]) -> None:
    """On two devices, and both ends on one."""
    v, h1, loop = files_of(tmp_path)
    pairs = [({"tied": True}, ours) for ours in (h1, v, loop)]
    for stock, ours in stock_and_ours(tmp_path, [*pairs, ({"tied": True, "zero": 1}, v)]):
        assert_same(ours, stock)
        assert_same(ours, one_process["tied"])


@pytest.mark.nightly
def test_bf16(tmp_path: Path) -> None:
    v, h1, _ = files_of(tmp_path)
    pairs: list[tuple[Found, Found]] = [
        ({"precision": "bf16"}, v),
        ({"precision": "bf16", "zero": 1, "clipping": 0.5}, h1),
        ({"precision": "bf16", "zero": 1, "tied": True}, v),
        ({"precision": "bf16", "extra": {"bf16": {"immediate_grad_update": True}}}, h1),
        ({"precision": "bf16", "zero": 1, "extra": {"data_types": {"grad_accum_dtype": "fp32"}}}, h1),
    ]
    found = stock_and_ours(tmp_path, pairs)
    for stock, ours in found:
        assert_same(ours, stock, HALF)
    own, sharded = "BF16_Optimizer", "DeepSpeedZeroOptimizer"
    assert [ours["optimizer"] for _, ours in found] == [own, sharded, sharded, own, own]


@pytest.mark.slow
def test_fp16_and_its_loss_scale(tmp_path: Path) -> None:
    """A scale that is too large skips steps on all stages alike, and comes down."""

    def scaled(power: int) -> dict[str, Any]:
        return {"fp16": {"initial_scale_power": power, "loss_scale_window": 2, "hysteresis": 1}}

    v, h1, _ = files_of(tmp_path)
    high = {**scaled(24), "data_types": {"grad_accum_dtype": "fp32"}}
    half = {"precision": "fp16"}
    pairs: list[tuple[Found, Found]] = [
        ({**half, "extra": scaled(8)}, v),
        ({**half, "extra": scaled(8), "zero": 1, "clipping": 0.5}, h1),
        ({**half, "extra": scaled(24), "zero": 1, "steps": 8}, v),
        ({**half, "extra": high, "zero": 1, "steps": 8}, h1),
    ]
    found = stock_and_ours(tmp_path, pairs)
    for stock, ours in found:
        assert ours["skipped"] == stock["skipped"]
        assert ours["losses"] == pytest.approx(stock["losses"], rel=HALF[0])
    assert [ours["skipped"] > 0 for _, ours in found] == [False, False, True, True]
    assert all(ours["skipped"] < 8 for _, ours in found[2:]), "steps are made once the scale has come down"


@pytest.mark.slow
def test_plans_on_two_devices(tmp_path: Path, one_process: dict[str, Found]) -> None:
    own = layout(2, world=2)
    chunked = layout(2, world=2, chunks=2)

    def custom(made: Schedule) -> Plan:
        assert made.layers_per_stage is not None
        counts = list(made.layers_per_stage)
        counts[0] -= 1
        counts[-1] -= 1
        return plan(
            counts,
            planned=layout(2, world=2, chunks=len(counts) // 2),
            own=own,
            batch=8,
            order=(1, 0),
            schedule=made,
        )

    order = searched(2, 4, num_layers=4, memory=5.0)
    plans = [
        plan((3, 1), planned=own, own=own, batch=8),
        plan((1, 3), planned=own, own=own, batch=8, order=(1, 0)),
        plan((0, 2, 1, 1), planned=chunked, own=own, batch=8, order=(1, 0), group=2),
        custom(schedule("zb-v", 2, 4, (2, 1, 1, 2))),
        custom(schedule("v-half", 2, 4, (1, 1, 3, 1))),
        custom(schedule("gpipe", 2, 4, (2, 4))),
        custom(order),
    ]
    assert plans[-1].schedule.custom is not None
    assert plans[-1].schedule.custom.orders is not None, "written out"
    found = train(tmp_path, processes=2, options=[{"quartet": written(tmp_path, one)} for one in plans])
    for one, made in zip(found, plans, strict=True):
        assert_same(one, one_process["plain"])
        is_stock = made.mapping.is_stock
        assert one["ranks"] == ([0, 1] if is_stock else [1, 0])
    assert [one["parts"] for one in found[:4]] == [[0, 4, 6], [0, 2, 6], [0, 1, 3, 4, 6], [0, 2, 3, 4, 6]]
    assert [one["schedule"] for one in found[:3]] == ["TrainSchedule", "TrainSchedule", "PlannedSchedule"]


@pytest.mark.slow
def test_the_layout_of_a_plan(tmp_path: Path, one_process: dict[str, Found]) -> None:
    """Degrees, micro-batch, ZeRO stage and its bucket sizes come from the plan; the steps stay the same."""
    own, sharded = layout(2, world=2), layout(2, world=2, is_sharded=True)
    data = layout(1, world=2, micro_batch=1, is_sharded=True)
    buckets = replace(data, reduce_bucket_size=2000, allgather_bucket_size=1000)
    plans = [
        plan((4,), planned=data, own=own, batch=8),
        plan((4,), planned=buckets, own=own, batch=8),
        plan((3, 1), planned=sharded, own=own, batch=8),
    ]
    found = train(tmp_path, processes=2, options=[{"quartet": written(tmp_path, one)} for one in plans])
    for one in found:
        assert one["zero"] == 1
        assert_same(one, one_process["plain"])
    assert [one["micro_batch"] for one in found] == [1, 1, 2]
    assert found[1]["buckets"] == [2000, 1000]
    assert found[0]["buckets"] == found[2]["buckets"] != [2000, 1000]


@pytest.mark.slow
def test_four_devices(tmp_path: Path, one_process: dict[str, Found]) -> None:
    """Schedule files in the launcher's order, plans of the others in another order."""
    sizes = {"stages": 4, **DEEP}
    own = layout(4, world=4)
    in_files = [
        schedule("gpipe", 4, 8, (3, 2, 2, 3)),
        schedule("zb-h1", 4, 8, (4, 2, 3, 1)),
        schedule("v-half", 4, 8, (1, 2, 1, 1, 1, 1, 2, 1)),
    ]
    in_plans = [
        schedule("interleaved", 4, 8, (1, 1, 2, 1, 1, 1, 2, 1)),
        schedule("zb-v", 4, 8, (1, 2, 1, 1, 2, 1, 1, 1)),
        searched(4, 8, num_layers=8, memory=8.0),
    ]
    files = [{**sizes, "quartet": {"schedule": schedule_file(tmp_path, made)}} for made in in_files]
    permuted = [
        plan((3, 1, 2, 2), planned=own, own=own, batch=16, order=(2, 0, 3, 1)),
        *(
            plan(
                [count - (at in (0, len(counts) - 1)) for at, count in enumerate(counts)],
                planned=layout(4, world=4, chunks=len(counts) // 4),
                own=own,
                batch=16,
                order=(3, 1, 0, 2),
                schedule=made,
            )
            for made in in_plans
            if (counts := list(made.layers_per_stage or ()))
        ),
    ]
    plans = [{**sizes, "quartet": written(tmp_path, made)} for made in permuted]
    found = train(tmp_path, processes=4, options=[sizes, *files, *plans])
    for one in found:
        assert_same(one, one_process["deep"])
    planned = ["PlannedSchedule"] * 3
    assert [one["schedule"] for one in found] == ["TrainSchedule", *planned, "TrainSchedule", *planned]
    assert [one["ranks"] for one in found[4:]] == [[2, 0, 3, 1], *[[3, 1, 0, 2]] * 3]


@pytest.mark.nightly
def test_two_pipelines_of_two_devices(tmp_path: Path) -> None:
    """The mapping mixes the pipelines; the replicas' gradients are summed as stock's are."""
    own = layout(2, world=4)
    v = schedule("zb-v", 2, 4, (2, 1, 1, 2))
    made = plan(
        (1, 1, 1, 1),
        planned=layout(2, world=4, chunks=2),
        own=own,
        batch=16,
        order=(0, 3, 1, 2),
        schedule=v,
    )
    found = train(
        tmp_path,
        processes=4,
        options=[
            {},
            {"quartet": {"schedule": schedule_file(tmp_path, v)}},
            {"quartet": written(tmp_path, made)},
            {"zero": 1, "quartet": {"schedule": schedule_file(tmp_path, v)}},
        ],
    )
    (wide,) = train(tmp_path, processes=1, options=[{"stages": 1, "microbatches": 8}])
    for one in found:
        assert_same(one, wide)


@pytest.mark.nightly
def test_clipping_by_the_first_stage_is_told_where_deepspeed_does_it(tmp_path: Path) -> None:
    """Stock DeepSpeed alone: two stages train what one does, except where the fault is said to be."""
    features: list[tuple[dict[str, Any], float]] = [
        ({"clipping": 0.1}, RELATIVE),
        ({"clipping": 0.0}, RELATIVE),
        ({"clipping": 0.1, "zero": 1}, RELATIVE),
        ({"clipping": 0.1, "precision": "bf16"}, 2e-3),
        ({"clipping": 0.1, "precision": "bf16", "zero": 1}, 2e-3),
    ]
    options = [base for base, _ in features]
    single = train(tmp_path, processes=1, options=[{**one, "stages": 1} for one in options])
    double = train(tmp_path, processes=2, options=options)
    for (base, relative), one, two in zip(features, single, double, strict=True):
        assert not one["clips_by_first_stage"]
        is_same = two["losses"] == pytest.approx(one["losses"], rel=relative)
        assert two["clips_by_first_stage"] == (not is_same), base
    assert [two["clips_by_first_stage"] for two in double] == [True, False, False, False, False]
