"""Schedules of files: what cannot be run is refused, and a layout has those whose counts it has."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet_plugin.errors import ConfigError, QuartetError
from quartet_plugin.model.files import read_json, write_json_atomic
from quartet_plugin.runtime.programs import make_schedule, schedule_spec_of
from quartet_plugin.schedule.files import read_schedule, write_schedule
from quartet_plugin.schedule.named import named
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.space.config import SearchConfig
from quartet_plugin.space.param_sources import FixedParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.space.written_schedules import WrittenSchedule, read_written_schedule, written_order
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape

NAME = "mine.json"


def by_hand(layers: tuple[int, ...] = (4, 1, 2, 3), name: str = "zb-v") -> Schedule:
    """A named schedule on two devices and four microbatches with a split, ends counted."""
    schedule = named(name, num_devices=2, num_microbatches=4)
    return replace(schedule, layers_per_stage=layers)


def edited(schedule: Schedule) -> Schedule:
    """The same actions with microbatches 2 and 3 exchanged, which leaves it legal."""
    exchange = {2: 3, 3: 2}
    orders = [
        [action._replace(microbatch=exchange.get(action.microbatch, action.microbatch)) for action in row]
        for row in (schedule.actions(device) for device in range(schedule.num_devices))
    ]
    return Schedule.of_actions(
        orders,
        num_microbatches=schedule.num_microbatches,
        placement=schedule.placement,
        layers_per_stage=schedule.layers_per_stage,
        origin=schedule.origin,
    )


def saved(folder: Path, schedule: Schedule | None = None, **changes: Any) -> Path:
    """The file, with some keys replaced."""
    path = folder / NAME
    write_schedule(path, schedule or by_hand())
    write_json_atomic(path, {**read_json(path), **changes})
    return path


def space_of(written: WrittenSchedule, *, features: tuple[str, ...] = (), **search: Any) -> Space:
    return build_space(
        make_job(layout=make_layout(micro_batch_size=8), features=features),
        nodes=make_nodes(2),
        search=SearchConfig(**{"schedule": ["1f1b", f"folder/{NAME}"], **search}),
        run="r",
        seed=0,
        written={NAME: written},
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers_per_stage": [4, 0, 3, 3]}, "layers_per_stage[1]: 0; a schedule with an empty stage"),
        (
            {"routes": [[0, 1, 1, 0], [0, 1, 1, 0]], "route_of_microbatch": [0, 1, 0, 1]},
            "routes: two copies of the model",
        ),
        (
            {"orders": [["(0F1;0B0)OVERLAP_F_B"], ["1F0"]]},
            "orders: overlapped pairs can only be simulated",
        ),
        ({"orders": [["0F0"], ["1F0"]]}, "0F1 of device 0: missing"),
        (
            {
                "num_devices": 1,
                "placement": [0],
                "layers_per_stage": [8],
                "num_microbatches": 1,
                "orders": [["0F0", "0B0"]],
            },
            "num_devices: 1",
        ),
    ],
)
def test_what_the_runtime_cannot_execute_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = saved(tmp_path, **changes)
    with pytest.raises(QuartetError) as caught:
        read_written_schedule(path)
    assert caught.value.exit_code == 2
    assert str(path) in str(caught.value)
    assert words in caught.value.lines[0]


def test_a_difference_names_field_value_and_the_other_count(tmp_path: Path) -> None:
    written = read_written_schedule(saved(tmp_path))
    same = {"num_layers": 8, "pipeline_parallel": 2, "virtual_stages": 2, "num_microbatches": 4}
    assert written.faults(**same, whose="the command") == []
    assert written.faults(whose="the command") == []
    for name, value, words in (
        ("pipeline_parallel", 4, "num_devices: 2; must be the pipeline parallel size of the command, 4"),
        (
            "virtual_stages",
            1,
            "placement: 4 stages, 2 a device; must be the stages a device of the command, 1",
        ),
        ("num_layers", 9, "layers_per_stage: sums to 10; must be the 9 layers of the command, or 11 with"),
        (
            "num_microbatches",
            8,
            "num_microbatches: 4; must be the microbatches per iteration of the command, 8",
        ),
    ):
        (line,) = written.faults(**{**same, name: value}, whose="the command")
        assert line.startswith(words)


def test_counts_are_read_with_the_ends_and_without(tmp_path: Path) -> None:
    written = read_written_schedule(saved(tmp_path))
    assert written.split(8) == (3, 1, 2, 2)
    assert written.split(10) == (4, 1, 2, 3)
    assert written.split(9) is None


def test_a_name_is_kept_only_where_it_makes_the_files_order(tmp_path: Path) -> None:
    shape = make_shape()
    kept = written_order(read_written_schedule(saved(tmp_path)), shape=shape)
    assert (kept.custom.named, kept.custom.orders) == ("zb-v", None)
    written = read_written_schedule(saved(tmp_path, edited(by_hand())))
    order = written_order(written, shape=shape)
    assert order.custom.named is None
    spec = schedule_spec_of(order.custom, num_microbatches=4)
    made = make_schedule(spec, 4)
    expected = read_schedule(tmp_path / NAME)
    assert all(np.array_equal(a, b) for a, b in zip(made.orders, expected.orders, strict=True))
    # Another number of microbatches, as in an evaluation, has the plain order on the same placement.
    assert make_schedule(spec, 3).placement == expected.placement


def test_parameters_that_are_not_the_familys_are_left_out(tmp_path: Path) -> None:
    path = saved(tmp_path, origin={"family": {"start": "zb-v", "inserted": True}})
    order = written_order(read_written_schedule(path), shape=make_shape())
    assert order.custom.family is None
    assert order.custom.orders is not None


def test_a_file_is_a_choice_of_the_layouts_that_have_its_counts(tmp_path: Path) -> None:
    space = space_of(read_written_schedule(saved(tmp_path, edited(by_hand()))))
    shape = space.job.shape
    offered = [layout for layout in space.layouts[shape] if NAME in space.schedules_of(layout, shape=shape)]
    assert [(one.pipeline_parallel, one.virtual_stages, one.micro_batch_size) for one in offered] == [
        (2, 2, 8)
    ]
    assert any(layout.num_stages != 4 for layout in space.layouts[shape])


def test_a_plan_of_a_file_is_decoded_and_encoded(tmp_path: Path) -> None:
    written = read_written_schedule(saved(tmp_path, edited(by_hand())))
    space = space_of(written, schedule=NAME, mapping="stock")
    plan = space.decode(FixedParams({}), trial=1)
    assert plan.split.transformer_layers_per_stage == (3, 1, 2, 2)
    assert plan.schedule.custom is not None
    assert plan.schedule.custom.placement == (0, 1, 1, 0)
    params = space.params_of(plan)
    assert params == {}
    assert space.params_of(space.baseline) is None


@pytest.mark.parametrize(
    ("layers", "search", "features", "words"),
    [
        ((4, 1, 2, 4), {}, (), "layers_per_stage: sums to 11; must be the 8 layers of"),
        (
            (4, 1, 2, 3),
            {"pipeline_parallel": 1},
            (),
            "num_devices: 2; must be the pipeline parallel size of",
        ),
        ((4, 1, 2, 3), {"micro_batch_size": 1}, (), "num_microbatches: 4; must be the microbatches"),
        ((4, 1, 2, 3), {"split": "even"}, (), "ruled out by the other keys of search"),
        ((4, 1, 2, 3), {}, ("fsdp",), "custom schedules cannot run, because of fsdp"),
    ],
)
def test_a_file_that_fits_no_layout_is_refused(
    tmp_path: Path, layers: tuple[int, ...], search: dict[str, Any], features: tuple[str, ...], words: str
) -> None:
    written = read_written_schedule(saved(tmp_path, by_hand(layers)))
    with pytest.raises(ConfigError) as caught:
        space_of(written, features=features, **search)
    assert str(caught.value).startswith(f"search.schedule: {NAME}: ")
    assert words in str(caught.value)
