"""The pattern of a hybrid model among the words of a command."""

import shlex

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.megatron_words import read_arguments

PATTERN = "--hybrid-layer-pattern"


@pytest.mark.parametrize(
    ("words", "num_layers"),
    [
        ("", None),
        (f"{PATTERN} M-M*E", 5),
        (f"{PATTERN} M-M*E --num-layers 52", 5),
        (f"{PATTERN}=-M|*- --pipeline-model-parallel-size 2", 4),
        (f"{PATTERN} M|-|M|*/*-/*- --pipeline-model-parallel-size 2", 4),
        ("--hybrid-override-pattern M+ --mtp-hybrid-override-pattern +- --mtp-num-layers 1", 2),
        (f"--is-hybrid-model {PATTERN} M*", 2),
        (f"{PATTERN} M*M* --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1", 4),
    ],
)
def test_the_pattern_says_the_number_of_layers(words: str, num_layers: int | None) -> None:
    args, unread = read_arguments(shlex.split(words))
    assert args.num_layers == num_layers
    assert not {PATTERN, "--hybrid-override-pattern"} & set(unread)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (f"{PATTERN} M* --hybrid-override-pattern M*", "--hybrid-override-pattern: Megatron refuses it"),
        (f"{PATTERN} M*X", "'X' is no layer: layers are M * + - E"),
        (f"{PATTERN} MG", "does not price gated delta nets (G)"),
        ("--hybrid-override-pattern MD", "--hybrid-override-pattern: 'MD'; `quartet plan` does not price"),
        (f"{PATTERN} M*+", "attention (*) beside latent attention (+)"),
        (f"{PATTERN} M*/*-/--", "all depths behind a slash must have the same layers"),
        (f"{PATTERN} M*/", "at least one"),
        (f"{PATTERN} M*/*|-", "'|' is no layer"),
        (f"{PATTERN} |", "must have 1 to"),
        (f"{PATTERN} M|*", "has 2 stages; set --pipeline-model-parallel-size (1)"),
        (f"{PATTERN} M|*|- --pipeline-model-parallel-size 2", "has 3 stages; set"),
        (
            f"{PATTERN} M|* --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1",
            "--decoder-last-pipeline-num-layers: Megatron refuses it",
        ),
        (f"{PATTERN} M* --pipeline-model-parallel-layout Et|tL", "--pipeline-model-parallel-layout: Meg"),
        (f"{PATTERN} M* --account-for-loss-in-pipeline-split", "--account-for-loss-in-pipeline-split: Meg"),
        ("--is-hybrid-model --hybrid-attention-ratio 0.1", "write them with --hybrid-layer-pattern"),
    ],
)
def test_what_megatron_refuses_and_what_has_no_price_is_refused_by_name(words: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_arguments(shlex.split(words))
    assert says in str(error.value)
