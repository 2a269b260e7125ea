"""What needs no processes: sections, layer lists, batch sizes, forms of values, deferred weight gradients."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.deepspeed.config import batch_sizes, clips_by_first_stage, planned_config
from quartet_plugin.deepspeed.layers import layer_list
from quartet_plugin.deepspeed.neutralise import neutralise
from quartet_plugin.deepspeed.place import place_of
from quartet_plugin.deepspeed.settings import Settings, config_file_of, parse_settings
from quartet_plugin.deepspeed.split_backward import WeightGradients, install
from quartet_plugin.deepspeed.transport import Form
from quartet_plugin.errors import ConfigError, PlanError
from tests.deepspeed.support import layout


class Block(torch.nn.Module):  # type: ignore[misc]
    """A like layer."""


class Other(torch.nn.Module):  # type: ignore[misc]
    """Another one."""


def test_the_section() -> None:
    assert parse_settings({}).is_empty
    assert parse_settings({"quartet": {"plan": "a.json"}}) == Settings(plan=Path("a.json"))
    assert parse_settings({"quartet": {"plan": "auto"}}).is_auto
    for wrong in ({"plan": 3}, {"plan": ""}, {}, "a.json", {"plans": "a"}, {"schedule": None, "plan": None}):
        with pytest.raises(ConfigError):
            parse_settings({"quartet": wrong})


def test_the_config_among_the_words() -> None:
    assert config_file_of(["--x", "--deepspeed_config", "a.json"]) == Path("a.json")
    assert config_file_of(["--deepspeed-config=b.json", "--deepspeed_config=c.json"]) == Path("c.json")
    assert config_file_of(["--deepspeed"]) is None
    assert config_file_of(["--deepspeed_config"]) is None


@settings(deadline=None, max_examples=60)
@given(
    before=st.integers(0, 2),
    blocks=st.integers(2, 12),
    after=st.integers(0, 2),
    cuts=st.lists(st.integers(1, 11), max_size=4, unique=True),
)
def test_bounds_and_counts_are_inverse(before: int, blocks: int, after: int, cuts: list[int]) -> None:
    layers = layer_list([Other() for _ in range(before)] + [Block() for _ in range(blocks)] + [print] * after)
    if before >= blocks or after >= blocks:
        return
    edges = [0, *sorted(cut for cut in cuts if cut < blocks), blocks]
    counts = [high - low for low, high in pairwise(edges)]
    bounds = layers.bounds(counts)
    assert list(layers.counts(bounds)) == counts
    assert bounds[0] == 0
    assert bounds[-1] == before + blocks + after
    entries = list(counts)
    entries[0] += before > 0
    entries[-1] += after > 0
    assert list(layers.counts_of_entries(entries)) == counts


def test_splits_that_do_not_fit() -> None:
    layers = layer_list([Other(), *(Block() for _ in range(4))])
    for counts in ((2, 1), (4, 0), (1, 1, 1, 1, 1)):
        with pytest.raises(PlanError, match="split"):
            layers.bounds(counts)
    assert layers.bounds((0, 4)) == (0, 1, 5)


@settings(deadline=None, max_examples=60)
@given(
    micro=st.integers(1, 8), steps=st.integers(1, 8), data=st.integers(1, 8), known=st.sets(st.integers(0, 2))
)
def test_batch_sizes_complete_each_other(micro: int, steps: int, data: int, known: set[int]) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    values = (micro * steps * data, micro, steps)
    config = {names[at]: values[at] for at in known}
    if len(known) < 2:
        return
    sizes = batch_sizes(config, data_parallel=data)
    assert (sizes.global_batch_size, sizes.micro_batch_size, sizes.num_microbatches) == values


def test_batch_sizes_that_contradict() -> None:
    with pytest.raises(ConfigError, match="train_batch_size: 7"):
        batch_sizes({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, data_parallel=1)


def test_clipping_by_the_first_stage_is_known() -> None:
    assert clips_by_first_stage({}, pipeline_parallel=2), "DeepSpeed clips at 1.0 unless told otherwise"
    assert not clips_by_first_stage({}, pipeline_parallel=1)
    for config in (
        {"gradient_clipping": 0},
        {"zero_optimization": {"stage": 1}},
        {"bf16": {"enabled": True}},
        {"fp16": {"enabled": True}},
    ):
        assert not clips_by_first_stage(config, pipeline_parallel=2)


def test_a_plan_as_a_plain_ds_config() -> None:
    config = {
        "train_batch_size": 16,
        "quartet": {"plan": "x"},
        "zero_optimization": {"reduce_bucket_size": 5},
    }
    planned = planned_config(
        config, layout=layout(1, world=2, micro_batch=4, is_sharded=True), global_batch_size=16
    )
    assert planned == {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"reduce_bucket_size": 5, "stage": 1},
    }


def test_a_trial_leaves_services_out() -> None:
    config, names = neutralise(
        {"wandb": {"enabled": True}, "wall_clock_breakdown": True, "train_batch_size": 4}
    )
    assert names == ["wandb", "wall_clock_breakdown"]
    assert config == {"train_batch_size": 4, "steps_per_print": 10**9}
    with pytest.raises(ConfigError, match="autotuning"):
        neutralise({"autotuning": {"enabled": True}})


_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])


@settings(deadline=None, max_examples=60)
@given(tensors=st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=4), _DTYPES), min_size=1, max_size=6))
def test_forms_are_encoded_and_decoded(tensors: list[tuple[list[int], torch.dtype]]) -> None:
    value: Any = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in tensors)
    form = Form.of(value)
    assert Form.decode(form.encode().tolist()) == form
    assert len(form.gradients.shapes) == sum(dtype.is_floating_point for _, dtype in tensors)
    assert Form.of(value[0]).is_tuple is False


def test_weight_gradients_come_later_and_are_the_same() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3, bias=False)
    ).double()
    inputs = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    model(inputs).square().sum().backward()
    expected = [inputs.grad, *(parameter.grad for parameter in model.parameters())]
    inputs.grad = None
    model.zero_grad()
    gradients = WeightGradients()
    assert install(model, gradients) == 2
    for _ in range(2):
        gradients.begin()
        model(inputs).square().sum().backward()
        gradients.end(0, 0)
        gradients.run(0, 0)
    assert gradients.open is None
    found = [inputs.grad, *(parameter.grad for parameter in model.parameters())]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, 2 * other)
    # Outside of an input-gradient action a backward is whole.
    model.zero_grad()
    model(inputs.detach()).square().sum().backward()
    torch.testing.assert_close(model[2].weight.grad, expected[3])


def test_the_deepspeed_launcher_names_places_otherwise() -> None:
    where = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "1"}
    place = place_of(where)
    assert (place.launch_rank, place.local_rank, place.local_world_size, place.group_rank) == (3, 1, 2, 1)
    place = place_of({"RANK": "0", "LOCAL_WORLD_SIZE": "4", "LOCAL_SIZE": "2"})
    assert place.local_world_size == 4
