"""Documents in packed sequences: what ranks counted as means of a sequence."""

from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.model.job_description import LatentAttention, model_flops_per_sequence
from quartet_plugin.model.packed_lengths import PackedLengths, PackedTokens, packed_lengths_of
from quartet_plugin.model.plan import read_plan, write_plan
from quartet_plugin.model.schema import dump
from quartet_plugin.model.trial_record import score_of_median
from tests.model.plans import PLAN, SHAPE

# Of a sequence of `SHAPE`: 3/4 are tokens, in two equal documents.
LENGTH = SHAPE.seq_length
HALVES = PackedLengths(tokens_per_sequence=0.75 * LENGTH, squares_per_sequence=2 * (0.375 * LENGTH) ** 2)


def test_counts_of_copies_are_a_mean_of_their_sequences() -> None:
    """Two tensor-parallel ranks of each of two copies; a copy's microbatches have two sequences each."""
    first = PackedTokens(num_microbatches=3, num_tokens=60.0, squared_lengths=900.0)
    second = PackedTokens(num_microbatches=3, num_tokens=48.0, squared_lengths=600.0)
    lengths = packed_lengths_of([first, first, second, second], micro_batch_size=2)
    assert lengths == PackedLengths(tokens_per_sequence=9.0, squares_per_sequence=125.0)
    assert lengths.attended_length == pytest.approx(125 / 9)
    assert packed_lengths_of([], micro_batch_size=2) is None
    nothing = PackedTokens(num_microbatches=1, num_tokens=0.0, squared_lengths=0.0)
    assert packed_lengths_of([nothing], micro_batch_size=2) is None


def test_padding_computes_nothing_and_attention_follows_the_squares() -> None:
    whole = model_flops_per_sequence(SHAPE)
    core = 3 * SHAPE.num_layers * 2 * LENGTH**2 * SHAPE.attention_size
    packed = model_flops_per_sequence(SHAPE, packed=HALVES)
    assert packed == pytest.approx(0.75 * (whole - core) + 2 * 0.375**2 * core, rel=1e-12)
    alone = PackedLengths(tokens_per_sequence=float(LENGTH), squares_per_sequence=float(LENGTH) ** 2)
    latent = LatentAttention()
    for each in (None, latent):
        usual = model_flops_per_sequence(SHAPE, latent_attention=each)
        assert model_flops_per_sequence(SHAPE, latent_attention=each, packed=alone) == usual


def test_a_plans_rates_count_the_tokens_of_its_documents(tmp_path: Path) -> None:
    plan = replace(PLAN, made_for=replace(PLAN.made_for, packed=HALVES))
    usual, score = score_of_median(PLAN, iteration_s=2.0), score_of_median(plan, iteration_s=2.0)
    assert score.tokens_per_s == pytest.approx(0.75 * usual.tokens_per_s)
    assert score.model_flops_per_s_per_device < 0.75 * usual.model_flops_per_s_per_device
    # The same plan of a run that counted other data.
    assert plan.key == PLAN.key
    write_plan(plan, path=tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    assert "packed" not in dump(PLAN)["made_for"]
