"""A command's flags, read without Megatron, against Megatron's own parser."""

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.megatron_words import (
    FACTORS,
    FRACTIONS,
    LISTS,
    MAY_BE_ZERO,
    NUMBERS,
    SWITCHES,
    TEXTS,
    UNREADABLE,
    flag_of,
    layer_pattern,
    read_arguments,
)
from tests.megatron.entry_launch import MEGATRON_FLAGS
from tests.megatron.native import native_flags

DEFAULTS = {**NUMBERS, **FACTORS, **TEXTS, **FRACTIONS, **LISTS, **dict.fromkeys(SWITCHES, False)}


def test_the_table_is_megatrons() -> None:
    flags = native_flags()
    for dest, default in DEFAULTS.items():
        action = flags._actions[flag_of(dest)]
        assert action.dest == dest
        assert flags.defaults[dest] == default, dest
        assert action.nargs == (0 if dest in SWITCHES else "+" if dest in LISTS else None), dest
    known = {dest for dest in UNREADABLE if flag_of(dest) in flags._actions}
    assert len(known) > len(UNREADABLE) / 2  # others are of earlier and later releases
    assert all(flags._actions[flag_of(dest)].dest == dest for dest in known)


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--swiglu", "--group-query-attention", "--num-query-groups=2", "--bf16"],
        ["--num-experts", "4", "--moe-layer-freq", "([0]*2+[1]*4)", "--split", "99,1,0"],
        ["--fp8-format", "hybrid", "--micro-batch-size", "1", "--micro-batch-size", "4", "--lr", "1e-3"],
        ["--moe-expert-capacity-factor", "1.5", "--moe-pad-expert-input-to-capacity"],
        ["--moe-expert-rank-capacity-factor", "2", "--moe-paged-stash", "--moe-token-drop-policy", "probs"],
        ["--moe-paged-stash-buffer-size-factor-cuda", "-1.2"],
        ["--microbatch-group-size-per-virtual-pipeline-stage", "4", "--data-path", "a", "b", "--fp16"],
        ["--optimizer-offload-fraction", "0.25", "--offload-modules", "core_attn", "moe_act"],
        ["--moe-expert-capacity-factor", ".5", "--optimizer-offload-fraction", "5e-1"],
    ],
)
def test_values_are_those_that_megatron_reads(more: list[str]) -> None:
    words = [*MEGATRON_FLAGS, *more]
    args, unread = read_arguments(words)
    theirs = vars(native_flags().values(words))
    assert vars(args) == {dest: theirs[dest] for dest in vars(args)}
    assert "--lr" in unread
    assert "--num-layers" not in unread


@pytest.mark.parametrize("text", ["1", "3", "([0]*3+[1]*5)", "[0]+[1]*7", "([1]*3+[0]*1)*2", "[0,1,1]"])
def test_a_pattern_is_megatrons(text: str) -> None:
    from megatron.training.arguments import moe_freq_type

    assert layer_pattern(text) == moe_freq_type(text)


@pytest.mark.parametrize(
    "text", ["0", "[1]*10**9", "[2]", "x", "([1]", "[1]*99999999", "__import__('os')", ""]
)
def test_another_expression_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--moe-layer-freq"):
        layer_pattern(text)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--num-layers", "many"], "--num-layers: 'many'"),
        (["--optimizer-offload-fraction", "1.5"], "--optimizer-offload-fraction: '1.5'; must be a number"),
        (["--hidden-size"], "--hidden-size: its value is missing"),
        (["--moe-expert-capacity-factor", "nan"], "--moe-expert-capacity-factor: 'nan'; must be a number"),
        (["--moe-expert-capacity-factor", "much"], "--moe-expert-capacity-factor: 'much'; must be a number"),
        *(
            ([flag, "0"], f"{flag}: '0'; must be a whole number above 0")
            for flag in (
                "--tensor-model-parallel-size",
                "--pipeline-model-parallel-size",
                "--context-parallel-size",
                "--num-attention-heads",
                "--make-vocab-size-divisible-by",
                "--num-layers-per-virtual-pipeline-stage",
            )
        ),
        (
            ["--cpu-offloading-num-layers", "2"],
            "--cpu-offloading-num-layers: the cost model does not support",
        ),
        (["--use-torch-fsdp2"], "--use-torch-fsdp2"),
        (["--fp4-format", "e2m1"], "--fp4-format"),
        (["--yaml-cfg", "x.yaml"], "--yaml-cfg: the configuration is not given by flags; omit it"),
        (["--use-checkpoint-args"], "--use-checkpoint-args: the model's flags come from a checkpoint; omit"),
        (["--rampup-batch-size", "2", "2", "9"], "--rampup-batch-size: a plan is for one global batch size"),
        (
            ["--step-batch-size-schedule", "0:4,1K:8"],
            "--step-batch-size-schedule: Megatron refuses --global-batch-size beside it",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_the_flags_name(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_arguments(words)
    assert says in str(error.value)


def test_zero_is_a_number_of_experts_and_of_layers_on_an_end() -> None:
    words = [word for dest in MAY_BE_ZERO for word in (flag_of(dest), "0")]
    args, _ = read_arguments(words)
    assert {getattr(args, dest) for dest in MAY_BE_ZERO} == {0}


def test_a_flag_that_is_switched_off_is_no_refusal() -> None:
    assert read_arguments(["--cpu-offloading-num-layers", "0"])[1] == ("--cpu-offloading-num-layers",)
