"""What needs no processes: sections, layer lists, batch sizes, forms of values, deferred weight gradients."""

import base64
import json
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.deepspeed import seams, transport
from quartet_plugin.deepspeed.api import named_arguments
from quartet_plugin.deepspeed.checkpoints import KEY, DeviceStages, stages_kept
from quartet_plugin.deepspeed.config import (
    as_config,
    batch_sizes,
    check_precision,
    check_zero,
    clips_by_first_stage,
    planned_config,
    strip_side_effects,
    zero_stage,
)
from quartet_plugin.deepspeed.describe import shape_of
from quartet_plugin.deepspeed.entry import DeepSpeedSession, _read_config, _settings_of_call, _start_of
from quartet_plugin.deepspeed.layers import layer_list
from quartet_plugin.deepspeed.parity import part_name
from quartet_plugin.deepspeed.planning import AgreedPlan, _of_schedule
from quartet_plugin.deepspeed.stages import WeightGradients, defer_weight_gradients
from quartet_plugin.deepspeed.transport import ValueSpec
from quartet_plugin.errors import ConfigError, PlanError
from quartet_plugin.protocol.attempt_files import TrialSpec
from quartet_plugin.protocol.ds_config import Settings
from quartet_plugin.rank.entry_options import EntryCommand, EntryOptions
from quartet_plugin.rank.rendezvous import RankEnv
from quartet_plugin.runtime.process_groups import Channels
from quartet_plugin.schedule.instruction import Message, Side, Transfer
from tests.deepspeed.support import environment, layout, schedule, schedule_file


class Block(torch.nn.Module):  # type: ignore[misc]
    """A like layer."""


class Other(torch.nn.Module):  # type: ignore[misc]
    """Another one."""


@st.composite
def layer_lists(draw: st.DrawFn) -> tuple[int, list[int], int]:
    """Entries before, like layers a stage, entries behind: the like layers are the most frequent."""
    blocks = draw(st.integers(2, 12))
    ends = st.integers(0, min(2, blocks - 1))
    cuts = draw(st.lists(st.integers(1, blocks - 1), max_size=4, unique=True))
    edges = [0, *sorted(cuts), blocks]
    return draw(ends), [high - low for low, high in pairwise(edges)], draw(ends)


@settings(deadline=None, max_examples=60)
@given(drawn=layer_lists())
def test_bounds_and_counts_are_inverse(drawn: tuple[int, list[int], int]) -> None:
    before, counts, after = drawn
    blocks = sum(counts)
    layers = layer_list([Other() for _ in range(before)] + [Block() for _ in range(blocks)] + [print] * after)
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
    micro=st.integers(1, 8),
    steps=st.integers(1, 8),
    data=st.integers(1, 8),
    known=st.sets(st.integers(0, 2), min_size=2),
)
def test_batch_sizes_complete_each_other(micro: int, steps: int, data: int, known: set[int]) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    values = (micro * steps * data, micro, steps)
    config = {names[at]: values[at] for at in known}
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


def test_bucket_sizes_of_a_plan_go_into_the_ds_config() -> None:
    sharded = layout(1, world=2, is_sharded=True)
    config = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 5, "round_robin_gradients": True}}
    kept = planned_config(config, layout=sharded, global_batch_size=8)
    assert kept["zero_optimization"] == config["zero_optimization"]
    sized = replace(sharded, reduce_bucket_size=2000, allgather_bucket_size=1000)
    assert planned_config(config, layout=sized, global_batch_size=8)["zero_optimization"] == {
        "stage": 1,
        "reduce_bucket_size": 2000,
        "allgather_bucket_size": 1000,
        "round_robin_gradients": True,
    }


def test_zero_that_is_merely_true_is_stage_1() -> None:
    """As DeepSpeed's `read_zero_config_deprecated` has it, with the size of one more key."""
    config = {"zero_optimization": True, "allgather_size": 3000}
    assert zero_stage(config) == 1
    assert zero_stage({"zero_optimization": False}) == 0
    assert not clips_by_first_stage(config, pipeline_parallel=2)
    sharded = layout(1, world=2, is_sharded=True)
    assert planned_config(config, layout=sharded, global_batch_size=8)["zero_optimization"] is True
    sized = replace(sharded, reduce_bucket_size=2000)
    assert planned_config(config, layout=sized, global_batch_size=8)["zero_optimization"] == {
        "stage": 1,
        "reduce_bucket_size": 2000,
        "allgather_bucket_size": 3000,
    }
    unsharded = planned_config(config, layout=layout(1, world=2), global_batch_size=8)
    assert unsharded["zero_optimization"]["stage"] == 0


def in_base64(config: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(config).encode()).decode()


def test_a_ds_config_may_be_given_in_base64() -> None:
    """As DeepSpeed takes it; the plan that it named was dropped without a word."""
    config = {"train_batch_size": 4, "quartet": {"plan": "section.json"}, "note": "long" * 2000}
    assert as_config(in_base64(config)) == config
    assert as_config("e30" * 2000) is None


def test_every_argument_by_position_has_its_name() -> None:
    names = seams.INITIALIZE_ARGUMENTS.split()
    call = named_arguments(tuple(range(12)), {"config_params": 12})
    assert call == {name: number for number, name in enumerate(names)}
    assert (call["distributed_port"], call["config"]) == (6, 10)
    with pytest.raises(TypeError, match="13 positional arguments; 14 were given"):
        named_arguments(tuple(range(14)), {})


def test_layers_without_matrices_have_a_size_by_their_parameters() -> None:
    """A list as in DeepSpeed's own example of a pipeline: convolutions, activations, pooling, functions."""
    layers = [
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(8, 16, 3),
        lambda x: x.flatten(1),
        torch.nn.Linear(64, 10),
    ]
    shape = shape_of(layers, seq_length=1)
    listed = layer_list(layers)
    assert shape.num_layers == len(listed.blocks)
    assert (listed.has_first, listed.has_last) == (False, True)
    num_parameters = (3 * 8 * 9 + 8) + (8 * 16 * 9 + 16) + (64 * 10 + 10)
    total = shape.num_layers * shape.matrix_parameters_per_layer
    assert total == pytest.approx(num_parameters, rel=0.1)
    assert shape_of([torch.nn.ReLU(), torch.nn.ReLU()], seq_length=1).num_layers == 2


def test_what_the_device_or_a_pipeline_cannot_do() -> None:
    fp16 = {"fp16": {"enabled": True}}
    check_precision(fp16, has_fp16=True)
    check_precision({"fp16": {"enabled": False}}, has_fp16=False)
    with pytest.raises(PlanError, match=r"fp16\.enabled"):
        check_precision(fp16, has_fp16=False)
    for stage in (0, 1):
        check_zero({"zero_optimization": {"stage": stage}})
    for stage in (2, 3):
        with pytest.raises(PlanError, match=f"stage: {stage}"):
            check_zero({"zero_optimization": {"stage": stage}})


def test_parts_are_named_as_a_plan_names_them() -> None:
    layers = layer_list([Other(), Other(), *(Block() for _ in range(3)), Other(), Block(), print])
    names = [part_name(layers, at) for at in range(layers.num_entries)]
    assert names == ["embedding"] * 2 + ["layer.0", "layer.1", "layer.2", "layer.2", "layer.3", "head"]


def test_dropout_is_off_in_a_comparison() -> None:
    """In a process of its own: it stays off."""
    code = """
import torch
from torch.nn import functional
from quartet_plugin.deepspeed.parity import switch_dropout_off
switch_dropout_off()
ones = torch.ones(4, 8)
for module in (torch.nn.Dropout(0.5), torch.nn.Dropout1d(0.5), torch.nn.AlphaDropout(0.5)):
    assert torch.equal(module.train()(ones), ones), module
heads = torch.randn(1, 2, 4, 8)
plain = functional.scaled_dot_product_attention(heads, heads, heads)
for given in ({"dropout_p": 0.9}, {"dropout_p": 0.9, "is_causal": False}):
    assert torch.equal(functional.scaled_dot_product_attention(heads, heads, heads, **given), plain)
assert torch.equal(functional.scaled_dot_product_attention(heads, heads, heads, None, 0.9, False), plain)
attention = torch.nn.MultiheadAttention(8, 2, dropout=0.9).train()
assert torch.equal(attention(ones, ones, ones)[0], attention(ones, ones, ones)[0])
"""
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)


def test_a_trial_leaves_services_out() -> None:
    config, names = strip_side_effects(
        {"wandb": {"enabled": True}, "wall_clock_breakdown": True, "train_batch_size": 4}
    )
    assert names == ["wandb", "wall_clock_breakdown"]
    assert config == {"train_batch_size": 4, "steps_per_print": 10**9}
    with pytest.raises(ConfigError, match="autotuning"):
        strip_side_effects({"autotuning": {"enabled": True}})


_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])


@settings(deadline=None, max_examples=60)
@given(tensors=st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=4), _DTYPES), min_size=1, max_size=6))
def test_forms_are_encoded_and_decoded(tensors: list[tuple[list[int], torch.dtype]]) -> None:
    value: Any = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in tensors)
    spec = ValueSpec.of(value)
    assert ValueSpec.decode(spec.encode().tolist()) == spec
    assert len(spec.gradients.shapes) == sum(dtype.is_floating_point for _, dtype in tensors)
    assert ValueSpec.of(value[0]).is_tuple is False


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
    assert defer_weight_gradients(model, gradients) == 2
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


def test_a_weight_made_in_every_forward_is_not_deferred() -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        normed = torch.nn.utils.weight_norm(torch.nn.Linear(4, 8))
    model = torch.nn.Sequential(normed, torch.nn.Linear(8, 3))
    inputs = torch.randn(2, 4)
    model(inputs).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    gradients = WeightGradients()
    assert defer_weight_gradients(model, gradients) == 1
    gradients.begin()
    model(inputs).square().sum().backward()
    gradients.end(0, 0)
    gradients.run(0, 0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_stages_of_a_checkpoint() -> None:
    stages = DeviceStages(bounds=(0, 2, 3, 5, 6), placement=(0, 1, 1, 0))
    assert stages.entries == ((0, 1, 5), (2, 3, 4))
    assert stages.text == "PP2 entries 2+1+2+1 placed on 0,1,1,0"
    assert stages_kept(json.loads(json.dumps({KEY: stages.to_json()}))) == stages
    for unread in ({}, {KEY: 3}, {KEY: {**stages.to_json(), "schema_version": 2}}, {KEY: {"bounds": [0]}}):
        assert stages_kept(unread) is None


def test_the_deepspeed_launcher_names_places_otherwise() -> None:
    where = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "1"}
    place = RankEnv.of(where)
    assert (place.launch_rank, place.local_rank, place.local_world_size, place.group_rank) == (3, 1, 2, 1)
    place = RankEnv.of({"RANK": "0", "LOCAL_WORLD_SIZE": "4", "LOCAL_SIZE": "2"})
    assert place.local_world_size == 4


class Sent:
    """A send that ends when `is_over` is set."""

    is_over = False

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self.is_over

    def wait(self) -> None:
        """End it."""
        self.is_over = True


def test_a_described_run_lets_go_of_what_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    works: list[Sent] = []

    def start(*_args: Any, **_kwargs: Any) -> Sent:
        works.append(Sent())
        return works[-1]

    monkeypatch.setattr("quartet_plugin.deepspeed.transport.dist.isend", start)
    channels = Channels(groups=(None,), ranks=(0, 1))
    described = transport.ValueTransport(channels, device=torch.device("cpu"), is_dynamic=False)

    def kept() -> list[int]:
        tensors = [tensor for _, sent in described._leaving._sends for tensor in sent]
        places = {tensor.data_ptr() for tensor in tensors}
        return [number for number, value in enumerate(values) if value.data_ptr() in places]

    values = [torch.ones(4) for _ in range(3)]
    for microbatch, value in enumerate(values):
        message = Message(0, 1, microbatch, source_device=0, target_device=1, group=0)
        send = Transfer(Side.SEND, message, buffer=0)
        described.post([(send, value)])
        if microbatch == 1:
            # The first message has left, with its description.
            works[0].is_over = works[1].is_over = True
        described.wait(send)
    assert kept() == [1, 2]
    described.end()
    assert kept() == []


@pytest.mark.parametrize("batch", [{}, {"train_batch_size": "auto"}, {"train_batch_size": 4}])
def test_a_schedule_leaves_the_global_batch_as_it_is(tmp_path: Path, batch: dict[str, Any]) -> None:
    """Four stages on four processes, where the script has two copies of two."""
    made = Settings(schedule=Path(schedule_file(tmp_path, schedule("gpipe", 4, 4, (2, 1, 1, 2)))))
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, **batch}
    here = RankEnv(launch_rank=0, world_size=4, local_rank=0, local_world_size=4, group_rank=0, host="here")
    layers = [Other(), *(Block() for _ in range(4)), Other()]

    def agreed(own_copies: int) -> AgreedPlan:
        return _of_schedule(made, specs=layers, config=config, rank_env=here, own_copies=own_copies)

    assert agreed(1).plan is None
    if batch == {"train_batch_size": 4}:
        assert agreed(2).plan is None
        return
    with pytest.raises(PlanError, match="the global batch would be 4 and not 8; set train_batch_size"):
        agreed(2)


def a_session(*arguments: str, options: EntryOptions) -> DeepSpeedSession:
    """A process of a start alone."""
    command = EntryCommand(target="train.py", is_module=False, arguments=arguments, options=options)
    here = RankEnv(launch_rank=0, world_size=1, local_rank=0, local_world_size=1, group_rank=0, host="here")
    return DeepSpeedSession(command=command, rank_env=here)


def test_a_ds_config_in_base64_is_that_of_the_command() -> None:
    config = {"train_batch_size": 4, "quartet": {"plan": "section.json"}}
    session = a_session("--deepspeed_config", in_base64(config), options=EntryOptions())
    _read_config(session)
    assert session.config == config
    assert session.settings.plan == Path("section.json")


@pytest.mark.parametrize(
    ("options", "in_trial", "expected"),
    [
        (EntryOptions(), False, Path("section.json")),
        (EntryOptions(plan=Path("flag.json")), False, Path("flag.json")),
        (EntryOptions(), True, None),
    ],
)
def test_a_section_that_only_the_script_gives_counts(
    options: EntryOptions, in_trial: bool, expected: Path | None
) -> None:
    """Without `--deepspeed_config FILE` in the command; the plan was dropped without a word."""
    session = a_session(options=options)
    if in_trial:
        session.files = cast(Any, object())
    config = {"train_batch_size": 4, "quartet": {"plan": "section.json"}}
    assert _settings_of_call(session, config).plan == expected
    session.config = {}
    assert _settings_of_call(session, config) is session.settings


def stage_of_tied_layer(number: int, layer: torch.nn.Module) -> SimpleNamespace:
    """The module of a stage that has one of the two uses of a tied layer, and nothing else."""
    return SimpleNamespace(
        stage_id=number,
        stage_owner=lambda index: index,
        tied_modules={"words": layer},
        forward_funcs=[layer],
        _local_start=number,
        _local_stop=number + 1,
        _layer_specs=[SimpleNamespace(key="words", tied_weight_attr=["weight"])] * 2,
        _grid=SimpleNamespace(get_data_parallel_id=lambda: 0),
    )


def test_the_run_that_writes_the_weights_starts_from_them_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tied layer DeepSpeed shares the weight between stages, and not the bias: the first is stored."""
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    session = a_session(options=EntryOptions())
    spec = TrialSpec(
        attempt_id="a" * 32,
        folder="/trial",
        warmup=0,
        measure=5,
        plan_key=None,
        save_weights=str(tmp_path / "weights"),
    )
    session.files = cast(Any, SimpleNamespace(spec=spec))
    start = _start_of(session)
    layers = [torch.nn.Linear(2, 2) for _ in range(2)]
    for number, layer in enumerate(layers):
        torch.nn.init.constant_(layer.bias, float(number))
        start(stage_of_tied_layer(number, layer))
    assert layers[1].bias.tolist() == layers[0].bias.tolist() == [0.0, 0.0]
    assert torch.equal(layers[1].weight, layers[0].weight)
