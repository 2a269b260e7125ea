"""Megatron's flags are read from a command's words as Megatron's own parser reads them."""

import argparse
import dataclasses
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quartet_plugin.launchers.command import parse_command
from quartet_plugin.launchers.megatron_flags import (
    MegatronFlags,
    StatedCounts,
    flags_of,
    num_stages_of,
    read_megatron_flags,
)

FIELDS = {field.name: field for field in dataclasses.fields(MegatronFlags)}
GPT = "--num-layers 8 --hidden-size 64 --micro-batch-size 2 --global-batch-size 16"


def counts(text: str, *, num_processes: int | None = 4) -> StatedCounts:
    return read_megatron_flags(text.split()).counts(num_processes=num_processes)


@cache
def megatron_actions() -> dict[str, argparse.Action]:
    """Megatron's own options, by flag."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return {flag: action for action in parser._actions for flag in action.option_strings}


def test_every_field_is_a_flag_of_megatron_with_its_kind() -> None:
    for name, field in FIELDS.items():
        action = megatron_actions()[f"--{name.replace('_', '-')}"]
        assert action.option_strings == [f"--{name.replace('_', '-')}"], "another spelling would be missed"
        expected: Any = bool if action.nargs == 0 else (int | None if action.type is int else str | None)
        assert action.nargs in (0, None), name
        assert field.type == expected, name


def occurrence(name: str) -> st.SearchStrategy[list[str]]:
    flag, kind = f"--{name.replace('_', '-')}", FIELDS[name].type
    if kind is bool:
        return st.just([flag])
    if kind == int | None:
        values = st.integers(-3, 200).map(str) | st.sampled_from(["1_0", " 7 ", "+4", "007"])
    elif name == "recompute_granularity":
        values = st.sampled_from(["full", "selective"])
    else:
        values = st.sampled_from(["Ettt|tL", "a b", "-a b", "x=y", "", "-", "-1.5"])
    return values.flatmap(lambda value: st.sampled_from([[flag, value], [f"{flag}={value}"]]))


WORDS = st.lists(
    st.one_of(
        st.sampled_from(sorted(FIELDS)).flatmap(occurrence),
        # Flags of the script, abbreviations and values that only look like flags of Megatron.
        st.sampled_from([["--num-layer", "3"], ["--mine"], ["--mine=--num-layers=9"], ["num-layers"]]),
        st.just(["--recompute-modules", "core_attn", "mlp"]),
    ),
    max_size=10,
).map(lambda items: [word for item in items for word in item])


@settings(deadline=None, max_examples=300)
@example(words=["--recompute-modules", "core_attn", "--context-parallel-size= 7 "], tail=[])
@given(words=WORDS, tail=st.sampled_from([[], ["--", "--num-layers", "5"]]))
def test_values_are_those_of_megatrons_parser(words: list[str], tail: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in FIELDS:
        action = megatron_actions()[f"--{name.replace('_', '-')}"]
        parser._add_action(action)
    read = read_megatron_flags([*words, *tail])
    parsed = vars(parser.parse_known_args([*words, *tail])[0])
    for name, field in FIELDS.items():
        flag = f"--{name.replace('_', '-')}"
        is_given = any(word == flag or word.startswith(f"{flag}=") for word in words)
        expected = (
            parsed[megatron_actions()[flag].dest] if is_given else (False if field.type is bool else None)
        )
        assert getattr(read, name) == expected, name


@pytest.mark.parametrize(
    "words", [["--num-layers"], ["--num-layers", "many"], ["--num-layers="], ["--num-layers", "--bf16"]]
)
def test_a_value_that_the_framework_refuses_is_none(words: list[str]) -> None:
    assert read_megatron_flags(words).num_layers is None


def test_counts_of_a_whole_command() -> None:
    text = f"{GPT} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    assert counts(text) == StatedCounts(
        num_layers=8,
        tensor_parallel=1,
        context_parallel=1,
        pipeline_parallel=2,
        virtual_stages=2,
        data_parallel=2,
        micro_batch_size=2,
        global_batch_size=16,
        num_microbatches=4,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 1),
        ("--num-layers-per-virtual-pipeline-stage 2", 2),
        ("--num-layers-per-virtual-pipeline-stage 3", None),  # Megatron refuses it
        ("--pipeline-model-parallel-layout Ettt|t|ttt|tL", 2),
        ("--pipeline-model-parallel-layout E|(t|)*6tt|L", None),  # nine stages on two ranks
        ("--hybrid-layer-pattern M*M*", None),
    ],
)
def test_virtual_stages(text: str, expected: int | None) -> None:
    assert counts(f"{GPT} --pipeline-model-parallel-size 2 {text}").virtual_stages == expected


def test_defaults_hold_only_where_the_flags_state_the_model() -> None:
    assert counts(GPT).pipeline_parallel == 1
    assert counts("--micro-batch-size 2").pipeline_parallel is None
    assert counts(f"{GPT} --yaml-cfg model.yaml") == StatedCounts()
    kept = counts(f"{GPT} --use-checkpoint-args --use-mp-args-from-checkpoint-args")
    assert (kept.num_layers, kept.pipeline_parallel, kept.num_microbatches) == (8, None, None)


def test_microbatches_need_the_number_of_processes() -> None:
    assert counts(GPT, num_processes=None).num_microbatches is None
    assert counts("--num-layers 8 --micro-batch-size 2").num_microbatches == 1


@settings(deadline=None, max_examples=200)
@given(text=st.text(alphabet="ELtm|(),*0123", max_size=24))
def test_layouts_have_megatrons_number_of_stages(text: str) -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    try:
        expected = PipelineParallelLayerLayout.get_num_stages_from_str(text)
    except AssertionError:
        expected = None
    assert num_stages_of(text) in ((expected, None) if text == "" else (expected,))


def test_a_layout_that_grows_beyond_all_bounds_is_refused() -> None:
    assert num_stages_of("((t|*999999)*999999)*999999") is None
    assert num_stages_of("Ettt|(tt|)*29,m|L") == 32


@pytest.mark.parametrize(
    "text",
    [
        "",
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|t|ttt|tL",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 --recompute-activations",
        "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
        "--context-parallel-size 2 --recompute-granularity full --recompute-method block",
        "--sequence-parallel --expert-model-parallel-size 2 --num-experts 4",
        "--num-experts 4 --moe-layer-recompute",
    ],
)
def test_the_layout_is_the_one_that_a_rank_reads(text: str) -> None:
    from megatron.training.arguments import add_megatron_arguments

    from quartet_plugin.megatron.arguments import Flags
    from quartet_plugin.model.megatron_arguments import layout_of

    words = f"{GPT} {text}".split()
    expected = layout_of(Flags(add_megatron_arguments).values(words), world_size=4)
    assert read_megatron_flags(words).layout(num_processes=4) == expected


@pytest.mark.parametrize(
    "text",
    [
        "--yaml-cfg m.yaml",
        "--use-mp-args-from-checkpoint-args",
        # Megatron refuses them.
        "--micro-batch-size -1",
        "--expert-model-parallel-size -2",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank -1",
    ],
)
def test_a_layout_that_the_flags_leave_open_or_megatron_refuses_is_none(text: str) -> None:
    assert read_megatron_flags(f"{GPT} {text}".split()).layout(num_processes=4) is None
    assert read_megatron_flags(GPT.split()).layout(num_processes=None) is None


def test_another_frameworks_flags_are_none() -> None:
    words = ["deepspeed", "--num_gpus", "2", "train.py", "--num-layers", "8"]
    assert flags_of(parse_command(words)) == MegatronFlags()
    assert flags_of(parse_command(["torchrun", "train.py", "--num-layers", "8"])).num_layers == 8
