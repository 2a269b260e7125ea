"""A rank's profile: read strictly, merged over ranks, turned into a table and into measurements."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.calibration.constants_fit import seconds_of
from quartet_plugin.calibration.observations import Direction, Observation, Quantity
from quartet_plugin.calibration.profile import (
    Profile,
    SimulatedRankRecord,
    costs_of,
    make_profile,
    observations_of,
    typical_parts,
    write_profile,
)
from quartet_plugin.cost.compute import Rates
from quartet_plugin.cost.constants import NEUTRAL
from quartet_plugin.cost.iteration.terms import layer_parts
from quartet_plugin.cost.layer_kinds import priced_layers
from quartet_plugin.cost.run import TrainingRun, with_layers
from quartet_plugin.cost.times import Times
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.job_description import Experts
from quartet_plugin.model.schema import parse, read_record
from quartet_plugin.model.shape import LayerKinds
from quartet_plugin.protocol.rank_files import RankProfile
from quartet_plugin.schedule.files import costs_from_json
from tests.cost.live import cpu_run


def part(name: str, forward: float, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "forward_s": forward,
        "backward_s": 2.1 * forward,
        "input_grad_s": 1.1 * forward,
        "weight_grad_s": 0.9 * forward,
        "num_intervals": 12,
        "activation_bytes": 1000,
        **changes,
    }


def rank(number: int, parts: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "attempt_id": "0" * 32,
        "launch_rank": number,
        "rank": number,
        "pipeline_rank": number,
        "tensor_rank": 0,
        "device": "cpu",
        "peak_memory_bytes": 10**8,
        "parts": parts,
        "steps": {
            "iteration": 0.5,
            "forward_backward": 0.4,
            "finalize": 0.01,
            "optimizer": 0.02 + number / 100,
        },
        "job": {"framework": "megatron-core"},
        **changes,
    }


FIRST = rank(0, [part("embedding", 0.0005), part("layer.0", 0.010), part("layer.1", 0.012)])
LAST = rank(1, [part("layer.2", 0.014), part("layer.3", 0.010), part("head", 0.020), part("other", 0.1)])


def test_layers_are_joined_by_their_median() -> None:
    ranks = [parse(RankProfile, one, where="a test") for one in (FIRST, LAST)]
    typical = typical_parts(ranks)
    assert set(typical) == {"embedding", "layer", "head"}
    assert typical["layer"].forward_s == pytest.approx(0.011)


def test_the_table_has_every_layer_in_its_place() -> None:
    ranks = [parse(RankProfile, one, where="a test") for one in (FIRST, LAST)]
    costs = costs_of(ranks, num_layers=4, num_devices=2, num_microbatches=8)
    assert [layer.name for layer in costs.layers] == [
        "embedding", "layer.0", "layer.1", "layer.2", "layer.3", "head",
    ]  # fmt: skip
    assert costs.layers[3].forward_s == 0.014
    assert costs.layers[3].input_grad_s == pytest.approx(1.1 * 0.014)
    assert costs.backward_fused_s is not None
    assert costs.backward_fused_s[3] == pytest.approx(2.1 * 0.014)
    assert costs.layers[0].input_grad_s == 0.0
    assert costs.layers[0].weight_grad_s == pytest.approx(2.1 * 0.0005)


def test_layers_of_other_stages_take_the_median() -> None:
    costs = costs_of(
        [parse(RankProfile, FIRST, where="a test")], num_layers=6, num_devices=3, num_microbatches=4
    )
    assert [layer.name for layer in costs.layers][-1] == "layer.5"
    assert costs.layers[-1].forward_s == pytest.approx(0.011)
    assert costs.layers[-1].activation_bytes == 1000


def test_a_profile_without_layers_makes_no_table() -> None:
    only = parse(RankProfile, rank(0, [part("embedding", 0.001)]), where="a test")
    with pytest.raises(ConfigError, match="no layer"):
        costs_of([only], num_layers=2, num_devices=2, num_microbatches=2)


def test_measurements_for_the_calibration() -> None:
    ranks = [parse(RankProfile, one, where="a test") for one in (FIRST, LAST)]
    found = {
        (one.quantity, one.direction, one.index): one.seconds for one in observations_of(cpu_run(), ranks)
    }
    assert found[Quantity.LAYER, Direction.FORWARD, 0] == pytest.approx(0.011)
    assert found[Quantity.HEAD, Direction.WEIGHT_GRAD, 0] == pytest.approx(0.018)
    assert found[Quantity.EMBEDDING, Direction.BACKWARD, 0] == pytest.approx(0.00105)
    assert found[Quantity.OPTIMIZER, None, 0] == pytest.approx(0.02)
    assert found[Quantity.OPTIMIZER, None, 1] == pytest.approx(0.03)
    assert found[Quantity.LAYER, Direction.BACKWARD, 0] == pytest.approx(2.1 * 0.011)
    assert found[Quantity.OVERHEAD, None, 0] == pytest.approx(0.5 - 0.4 - 0.02)
    assert found[Quantity.GRADIENTS, None, 0] == pytest.approx(0.01)


def test_gradients_are_measured_where_nothing_hides_them() -> None:
    late, early = rank(0, FIRST["parts"]), rank(1, LAST["parts"])
    late["steps"] |= {"finalize": 0.004}
    ranks = [parse(RankProfile, one, where="a test") for one in (late, early)]

    def gradients(run: TrainingRun) -> list[float]:
        return [one.seconds for one in observations_of(run, ranks) if one.quantity is Quantity.GRADIENTS]

    assert gradients(cpu_run()) == [0.004]
    assert gradients(cpu_run(pp=1)) == [0.004]
    assert gradients(cpu_run(pp=1, tp=2)) == []
    hidden = cpu_run(pp=1)
    assert gradients(replace(hidden, software=replace(hidden.software, has_data_overlap=True))) == []


def test_halves_of_a_backward_count_less_than_the_whole() -> None:
    found = observations_of(cpu_run(), [parse(RankProfile, FIRST, where="a test")])
    spread = {one.direction: one.spread for one in found if one.quantity is Quantity.LAYER}
    assert spread[Direction.INPUT_GRAD] > spread[Direction.BACKWARD]


def test_a_backward_that_was_not_split_is_one_measurement() -> None:
    whole = [part("layer.0", 0.01, input_grad_s=None, weight_grad_s=None)]
    directions = {
        one.direction
        for one in observations_of(cpu_run(), [parse(RankProfile, rank(0, whole), where="a test")])
        if one.quantity is Quantity.LAYER
    }
    assert directions == {Direction.FORWARD, Direction.BACKWARD}


def test_file_and_back(tmp_path: Path) -> None:
    ranks = [parse(RankProfile, one, where="a test") for one in (FIRST, LAST)]
    costs = costs_of(ranks, num_layers=4, num_devices=2, num_microbatches=8)
    simulated = SimulatedRankRecord(stage=1, rank=512, world_size=1024)
    path = tmp_path / "profile.json"
    write_profile(make_profile(ranks, costs=costs, simulated=simulated, iteration_s=[0.5]), path=path)
    found = read_record(Profile, path)
    assert found.played == simulated
    assert found.iteration_s == ()
    assert found.job == {"framework": "megatron-core"}
    assert [one.parts for one in found.ranks] == [one.parts for one in ranks]
    assert costs_from_json(found.costs).layers == costs.layers


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        ({**FIRST, "parts": [part("layers.0", 0.1)]}, "layers.0"),
        ({**FIRST, "parts": [part("layer.0", -0.1)]}, "-0.1"),
        ({**FIRST, "steps": {"naps": 1.0}}, "naps"),
        ({**FIRST, "surprise": 1}, "surprise"),
        ({**FIRST, "attempt_id": "me"}, "attempt_id"),
    ],
)
def test_files_with_faults_are_refused(data: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        parse(RankProfile, data, where="rank-0.profile.json")
    assert "\n" not in str(caught.value)


def test_halves_that_were_not_told_apart_are_equal() -> None:
    """Half a split backward is none: a head with a tied weight defers nothing."""
    parts = [part("layer.0", 0.01), part("head", 0.02, input_grad_s=0.05, weight_grad_s=None)]
    costs = costs_of(
        [parse(RankProfile, rank(0, parts), where="a test")], num_layers=1, num_devices=1, num_microbatches=1
    )
    assert costs.layers[-1].input_grad_s == pytest.approx(0.021)
    assert costs.layers[-1].weight_grad_s == pytest.approx(0.021)


def test_a_rank_that_was_run_alone_says_nothing_of_links() -> None:
    ranks = [parse(RankProfile, FIRST, where="a test")]
    run = cpu_run(pp=1, tp=2)
    together, alone = (
        next(
            one
            for one in observations_of(run, ranks, is_single_rank=is_single_rank)
            if one.quantity is Quantity.LAYER
        )
        for is_single_rank in (False, True)
    )
    slow = replace(NEUTRAL, hop_s=1.0)
    assert seconds_of(together, slow) > seconds_of(together, NEUTRAL) + 0.1
    assert seconds_of(alone, slow) == seconds_of(alone, NEUTRAL) < seconds_of(together, NEUTRAL)
    found = observations_of(cpu_run(), ranks, is_single_rank=True)
    assert Quantity.GRADIENTS not in {one.quantity for one in found}


EXPERTS = Experts(num_experts=8, experts_per_token=2, ffn_hidden_size=1024, num_dense_layers=1)


def seconds_by_part(run: TrainingRun) -> dict[tuple[Quantity, Direction | None], float]:
    """The observations of the two profiled ranks."""
    ranks = [parse(RankProfile, one, where="a test") for one in (FIRST, LAST)]
    return {(one.quantity, one.direction): one.seconds for one in observations_of(run, ranks)}


def test_layers_with_experts_are_measured_apart_from_dense_ones() -> None:
    run = replace(cpu_run(), experts=EXPERTS)
    found = seconds_by_part(run)
    assert found[Quantity.LAYER, Direction.FORWARD] == pytest.approx(0.010)
    assert found[Quantity.EXPERT_LAYER, Direction.FORWARD] == pytest.approx(0.012)
    # Experts that are one product defer no weight gradient.
    halves = {direction for quantity, direction in found if quantity is Quantity.EXPERT_LAYER}
    assert halves == {Direction.FORWARD, Direction.BACKWARD}
    expected = {
        quantity: Times.sum_of(layer_parts(run, NEUTRAL, Rates(run, NEUTRAL), experts=experts).values())
        for quantity, experts in ((Quantity.LAYER, None), (Quantity.EXPERT_LAYER, EXPERTS))
    }
    assert expected[Quantity.EXPERT_LAYER].forward_s > 1.2 * expected[Quantity.LAYER].forward_s
    for quantity, times in expected.items():
        one = Observation(run=run, seconds=1.0, spread=0.1, quantity=quantity, direction=Direction.FORWARD)
        assert seconds_of(one, NEUTRAL) == pytest.approx(times.forward_s)


def test_layers_that_no_rank_holds_take_the_median_of_their_kind() -> None:
    first = parse(RankProfile, FIRST, where="a test")
    costs = costs_of([first], num_layers=4, num_devices=2, num_microbatches=8, num_dense_layers=1)
    assert [layer.forward_s for layer in costs.layers[1:]] == [0.010, 0.012, 0.012, 0.012]
    last = parse(RankProfile, LAST, where="a test")
    costs = costs_of([last], num_layers=4, num_devices=2, num_microbatches=8, num_dense_layers=1)
    # No dense layer was measured: those of the other kind are the nearest.
    assert costs.layers[0].forward_s == pytest.approx(0.012)


def test_a_heads_part_has_the_layers_of_multi_token_prediction() -> None:
    run = cpu_run()
    further = replace(run, mtp_layers=1)
    found = seconds_by_part(further)
    assert {direction for quantity, direction in found if quantity is Quantity.HEAD} == {
        Direction.FORWARD,
        Direction.BACKWARD,
    }

    def forward_s(run: TrainingRun, quantity: Quantity) -> float:
        one = Observation(run=run, seconds=1.0, spread=0.1, quantity=quantity, direction=Direction.FORWARD)
        return seconds_of(one, NEUTRAL)

    least = 2 * forward_s(run, Quantity.HEAD) + forward_s(run, Quantity.LAYER)
    assert forward_s(further, Quantity.HEAD) > least


def hybrid_run(pattern: str) -> TrainingRun:
    """A small hybrid model on one stage."""
    kinds = LayerKinds(
        attention=0,
        mlp=0,
        experts=0,
        state_space=0,
        state_space_heads=8,
        state_space_groups=2,
        projected_size=3 * 512 + 2 * 2 * 128 + 8,
    )
    base = cpu_run(layers=len(pattern), pp=1)
    shape = replace(base.shape, layer_kinds=kinds.with_pattern(pattern))
    routed = replace(EXPERTS, num_dense_layers=0) if "E" in pattern else None
    return with_layers(base, priced_layers(shape, routed, None))


def test_layers_of_a_hybrid_model_are_measured_by_their_kinds() -> None:
    run, ranks = hybrid_run("M*EM"), [parse(RankProfile, each, where="a test") for each in (FIRST, LAST)]
    typical = typical_parts(ranks, pattern="M*EM")
    assert set(typical) == {"embedding", "head", "attention_layer", "expert_layer", "state_space_layer"}
    kinds = zip(run.kinds, run.runs_by_kind, strict=True)
    by_letter = {kind.letter: kind_run for kind, (kind_run, _) in kinds}
    found = {
        next(letter for letter, kind_run in by_letter.items() if kind_run == each.run): each
        for each in observations_of(run, ranks)
        if each.quantity in (Quantity.LAYER, Quantity.EXPERT_LAYER) and each.direction is Direction.FORWARD
    }
    assert {letter: each.seconds for letter, each in found.items()} == pytest.approx(
        {"M": 0.010, "*": 0.012, "E": 0.014}
    )
    assert found["E"].quantity is Quantity.EXPERT_LAYER
    for letter, each in found.items():
        kind_run = by_letter[letter]
        times = layer_parts(kind_run, NEUTRAL, Rates(kind_run, NEUTRAL), experts=kind_run.experts)
        assert seconds_of(each, NEUTRAL) == pytest.approx(Times.sum_of(times.values()).forward_s)
    # The scan is in the state-space layer alone.
    slow = {letter: seconds_of(each, replace(NEUTRAL, scan=2.0)) for letter, each in found.items()}
    assert [letter for letter, each in found.items() if slow[letter] > seconds_of(each, NEUTRAL)] == ["M"]


def test_a_hybrid_models_layers_that_no_rank_holds_take_the_median_of_their_letter() -> None:
    first = parse(RankProfile, FIRST, where="a test")
    costs = costs_of([first], num_layers=4, num_devices=2, num_microbatches=8, pattern="M*-M")
    # No MLP was measured: the others are the nearest.
    assert [layer.forward_s for layer in costs.layers[1:]] == pytest.approx([0.010, 0.012, 0.011, 0.010])


def test_a_profile_with_more_layers_than_its_pattern_is_refused() -> None:
    ranks = [parse(RankProfile, each, where="a test") for each in (FIRST, LAST)]
    with pytest.raises(ConfigError, match=r"layer\.2; must be below layer\.2, the number of layers"):
        typical_parts(ranks, pattern="M*")
