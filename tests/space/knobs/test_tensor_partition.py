"""The knob of tensor partitions: how q.yaml says it, where it is legal, and what keeps stock."""

from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import STOCK
from quartet_plugin.model.tensor_partition import partition_from_label
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.space.config import SearchConfig
from quartet_plugin.space.knob_table import knob_rows
from quartet_plugin.space.knobs.tensor_partition import (
    REFUSED_FEATURES,
    TENSOR_PARTITION,
    grids_for,
    partition_fault,
)
from quartet_plugin.space.partition_limits import stock_partition_reason
from quartet_plugin.space.plan_label import plan_label
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape
from tests.space.knobs.test_knobs import sample

SHAPE = make_shape(num_attention_heads=16, num_query_groups=16)
LAYOUT = make_layout(tensor_parallel=4, pipeline_parallel=1, sequence_parallel=True, micro_batch_size=1)
NOT_HERE = "nothing executes it here"


def asked(value: Any) -> tuple[str, ...] | None:
    config: SearchConfig = parse_config({"search": {"tensor_partition": value}}, where="q.yaml").search
    return config.requested("tensor_partition")


def space_of(value: Any, *, nodes: tuple[int, ...] = (4,), **job: Any) -> Space:
    changes = {name: job.pop(name) for name in ("no_tensor_partition",) if name in job}
    search, joined = job.pop("search", {}), job.pop("scale_up_devices", None)
    layout = job.pop("layout", make_layout(pipeline_parallel=1, data_parallel=sum(nodes)))
    described: TrainingJob = replace(make_job(layout=layout, shape=SHAPE, **job), **changes)
    return build_space(
        described,
        nodes=make_nodes(*nodes),
        search=parse_config({"search": {"tensor_partition": value, **search}}, where="q.yaml").search,
        run="r",
        seed=0,
        scale_up_devices=joined,
    )


def labels_of(space: Space) -> set[tuple[int, str]]:
    return {
        (layout.tensor_parallel, str(TENSOR_PARTITION.in_layout(layout))) for layout in space.layouts[SHAPE]
    }


@pytest.mark.parametrize(
    ("value", "labels"),
    [
        ("stock", ("stock",)),
        ("auto", None),
        ("grid", ("grid",)),
        ({"outer": 2, "inner": "grid"}, ("grid outer 2",)),
        (
            ["stock", {"attention": "rings", "mlp": {"outer": 2, "inner": "grid"}}],
            ("stock", "attention rings, mlp grid outer 2"),
        ),
        ({"attention": "grid", "mlp": "grid"}, ("grid",)),
        ("attention stock, mlp stock", ("stock",)),
    ],
)
def test_the_forms_of_q_yaml(value: Any, labels: tuple[str, ...] | None) -> None:
    assert asked(value) == labels


@pytest.mark.parametrize(
    "value",
    ["torus", {"outer": 1, "inner": "grid"}, {"outer": 2, "inner": "rings"}, {"mlp": "grid"}, 4, True, []],
)
def test_other_forms_are_refused_in_one_line(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"search\.tensor_partition") as caught:
        asked(value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("feature", REFUSED_FEATURES)
def test_features_keep_stock_by_name(feature: str) -> None:
    partition = partition_from_label("grid")
    assert partition is not None
    fault = partition_fault(partition, layout=LAYOUT, shape=SHAPE, features=(feature,))
    assert fault is not None
    assert fault.startswith(f"stock stays with {feature}: ")


@pytest.mark.parametrize(
    ("label", "shape", "layout", "words"),
    [
        ("grid", {}, {"context_parallel": 2}, "stock stays with CP 2"),
        ("grid", {}, {"expert_parallel": 2}, "stock stays with EP 2"),
        ("grid", {"num_attention_heads": 6, "num_query_groups": 6}, {}, "TP 4 must divide the 6 heads"),
        ("rings", {"num_query_groups": 2}, {}, "TP 4 must divide the 2 query groups"),
        ("grid", {"seq_length": 1022}, {}, "TP 4 must divide sequences of 1022"),
        (
            "attention stock, mlp grid",
            {"hidden_size": 257},
            {},
            "home2x2-in: N is 257; must be a multiple of 2",
        ),
        ("attention stock, mlp grid", {"ffn_hidden_size": 1023}, {}, "K is 1023; must be a multiple of 2"),
        ("grid", {}, {"tensor_parallel": 8}, "grid on 8 devices: must be 4, 9, 16"),
    ],
)
def test_sizes_that_do_not_divide_are_named(
    label: str, shape: dict[str, Any], layout: dict[str, Any], words: str
) -> None:
    partition = partition_from_label(label)
    assert partition is not None
    fault = partition_fault(
        partition, layout=replace(LAYOUT, **layout), shape=replace(SHAPE, **shape), features=()
    )
    assert fault is not None
    assert words in fault


def test_the_grids_of_so_many_devices() -> None:
    assert [grid.label for grid in grids_for(4)] == ["grid"]
    assert [grid.label for grid in grids_for(8)] == ["grid outer 2"]
    assert [grid.label for grid in grids_for(16)] == ["grid", "grid outer 4"]
    assert grids_for(2) == grids_for(1) == []


def test_it_is_kept_unless_it_is_asked_for() -> None:
    assert labels_of(space_of("stock")) == {(1, STOCK), (2, STOCK), (4, STOCK)}
    row = next(row for row in knob_rows(space_of("stock")) if row.knob is TENSOR_PARTITION)
    assert (row.value, row.state) == (STOCK, "kept unless search asks for it")


def test_auto_offers_what_is_legal_and_turns_sequence_parallelism_on() -> None:
    space = space_of("auto", search={"pipeline_parallel": 1})
    assert labels_of(space) == {
        (1, STOCK), (2, STOCK), (2, "rings"), (4, STOCK), (4, "rings"), (4, "grid"),
    }  # fmt: skip
    layouts: tuple[Layout, ...] = space.layouts[SHAPE]
    assert all(layout.sequence_parallel == (layout.tensor_partition is not None) for layout in layouts)
    plans = sample(space, num=40)
    cut = next(plan for plan in plans if plan.layout.tensor_partition is not None)
    assert f"partition {cut.layout.tensor_partition.label}" in plan_label(cut)  # type: ignore[union-attr]
    assert cut.layout.reductions != replace(cut.layout, tensor_partition=None).reductions
    assert not any("partition" in plan_label(x) for x in plans if x.layout.tensor_partition is None)
    for plan in plans[:10]:
        assert space.params_of(plan) is not None
    assert stock_partition_reason(space) is None


def test_what_cannot_be_executed_stays_stock_with_the_reason() -> None:
    for value in ("auto", ["stock", "grid"]):
        space = space_of(value, no_tensor_partition=NOT_HERE)
        assert labels_of(space) == {(1, STOCK), (2, STOCK), (4, STOCK)}
        assert stock_partition_reason(space) == f"tensor_partition: {NOT_HERE}"
    with pytest.raises(ConfigError, match=f"search.tensor_partition: grid; {NOT_HERE}"):
        space_of("grid", no_tensor_partition=NOT_HERE)


@pytest.mark.parametrize(
    "feature", ["moe", "multi_latent_attention", "fp8", "cuda_graphs", "tp_comm_overlap"]
)
def test_a_job_with_a_refused_feature_keeps_stock(feature: str) -> None:
    layout = make_layout(pipeline_parallel=1, tensor_parallel=4, sequence_parallel=True)
    space = space_of(["stock", "grid"], features=(feature,), layout=layout)
    assert {label for _, label in labels_of(space)} == {STOCK}
    reason = stock_partition_reason(space)
    assert reason is not None
    assert feature in reason


def test_groups_stay_inside_fast_links() -> None:
    layout = make_layout(pipeline_parallel=1, tensor_parallel=4, sequence_parallel=True)
    apart = space_of(["stock", "grid"], nodes=(1, 1, 1, 1), layout=layout)
    assert "leaves the 1 devices that fast links join" in str(stock_partition_reason(apart))
    joined = space_of(["stock", "grid"], nodes=(1, 1, 1, 1), layout=layout, scale_up_devices=4)
    assert (4, "grid") in labels_of(joined)


def test_a_search_that_keeps_sequence_parallelism_off_has_none() -> None:
    with pytest.raises(ConfigError, match="needs sequence_parallel, which the search keeps off"):
        space_of("grid", search={"sequence_parallel": False})
