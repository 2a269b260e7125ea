"""Runs of hybrid models, and of experts with a padded capacity, correct constants: planted ones come back.

Times are the model's own under planted constants. Most fits leave all but a few constants as they are, which
keeps them short.
"""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.calibration.constants_fit import (
    ASSUMED,
    Calibration,
    calibrate,
    read_calibration,
    seconds_of,
    write_calibration,
)
from quartet_plugin.calibration.observations import Direction, Observation, Quantity
from quartet_plugin.cost.constants import ClusterConstants, fitted
from quartet_plugin.cost.layer_kinds import priced_layers
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import TrainingRun, with_layers
from quartet_plugin.model.job_description import ExpertCapacity, Experts
from quartet_plugin.model.shape import LayerKinds
from quartet_plugin.planner.job import parse_job
from tests.cost.live import cpu_run
from tests.model.plans import LAYOUT

NOISE = 0.01
FITTED = ("gemm_rate", "elementwise", "softmax", "launch_s", "optimizer", "scan", "residual")


def hybrid_run(pattern: str, *, hidden: int = 256, seq: int = 256, **changes: Any) -> TrainingRun:
    """A small hybrid model in fp32 on two cores."""
    heads, state = 2 * hidden // 64, 64
    kinds = LayerKinds(
        attention=0,
        mlp=0,
        experts=0,
        state_space=0,
        state_space_heads=heads,
        state_space_groups=2,
        projected_size=3 * heads * 64 + 2 * 2 * state + heads,
        state_size=state,
    )
    base = cpu_run(layers=len(pattern), hidden=hidden, seq=seq, pp=1, num_microbatches=4, **changes)
    shape = replace(base.shape, layer_kinds=kinds.with_pattern(pattern))
    return with_layers(base, priced_layers(shape, None, None))


def accelerator_run(pattern: str | None) -> TrainingRun:
    """A model of eight layers on eight H100, dense or with a pattern."""
    model: dict[str, Any] = {
        "hidden_size": 4096,
        "ffn_hidden_size": 16_384,
        "num_attention_heads": 32,
        "seq_length": 4096,
        "vocab_size": 32_768,
    }
    model |= {"num_layers": 8} if pattern is None else {"hybrid_layer_pattern": pattern}
    cluster = {"device": "H100-SXM-80GB", "num_nodes": 1, "devices_per_node": 8}
    data = {"model": model, "cluster": cluster, "batch": {"global_batch_size": 64}}
    job = parse_job(data, where="job")
    layout = replace(LAYOUT, pipeline_parallel=1, data_parallel=8, micro_batch_size=1)
    return job.run(job.shape, layout, (8,))


DENSE = (
    cpu_run(pp=1, num_microbatches=4),
    cpu_run(layers=6, hidden=384, vocab=8192, pp=1, num_microbatches=2),
    cpu_run(hidden=128, seq=512, pp=1, num_microbatches=4),
    cpu_run(layers=12, hidden=64, seq=64, vocab=2048, pp=1, num_microbatches=4),
)
HYBRID = (
    hybrid_run("M-M*M-M*"),
    hybrid_run("MMMMMM", seq=512),
    hybrid_run("M-*-*-M-", hidden=384, seq=128),
)


def planted(**changes: float) -> ClusterConstants:
    """What a calibration begins with, but for `changes`."""
    return replace(ClusterConstants.of(fitted()), **{**ASSUMED, **changes})


def observed(observation: Observation, truth: ClusterConstants) -> Observation:
    return replace(observation, seconds=seconds_of(observation, truth))


def iteration(run: TrainingRun, truth: ClusterConstants) -> Observation:
    return observed(Observation(run=run, seconds=1.0, spread=NOISE), truth)


def parts(run: TrainingRun, truth: ClusterConstants) -> list[Observation]:
    """A layer of each kind and the optimizer's step, as a profile has them."""
    layers = [
        Observation(run=kind_run, seconds=1.0, spread=NOISE, quantity=quantity, direction=direction)
        for kind_run, experts in run.runs_by_kind
        for quantity in [Quantity.LAYER if experts is None else Quantity.EXPERT_LAYER]
        for direction in (Direction.FORWARD, Direction.BACKWARD)
    ]
    step = Observation(run=run, seconds=1.0, spread=NOISE, quantity=Quantity.OPTIMIZER)
    return [observed(each, truth) for each in (*layers, step)]


def fit(observations: Sequence[Observation], *, free: Sequence[str] = FITTED) -> Calibration:
    """The calibration by these observations, in which only the constants of `free` may move."""
    held = [constant.name for constant in fields(ClusterConstants) if constant.name not in free]
    return calibrate(observations, fixed=held, prior=fitted())


def values(calibration: Calibration) -> dict[str, float]:
    return {term.name: term.value for term in calibration.terms}


def test_planted_constants_come_back_from_hybrid_runs_alone() -> None:
    truth = planted(gemm_rate=0.62, elementwise=2.0, softmax=1.6, optimizer=1.8, scan=1.7)
    found = fit([each for run in HYBRID for each in (iteration(run, truth), *parts(run, truth))])
    for name, within in {"gemm_rate": 0.05, "elementwise": 0.3, "optimizer": 0.05, "scan": 0.05}.items():
        term = next(term for term in found.terms if term.name == name)
        assert term.low <= getattr(truth, name) <= term.high, name
        assert term.value == pytest.approx(getattr(truth, name), rel=within), name
        assert term.learned > 0.5, name
    run = hybrid_run("M*-M*-M*", hidden=320)
    assert predict(run, found.constants).iter_time_s == pytest.approx(
        predict(run, truth).iter_time_s, rel=0.03
    )


def test_hybrid_runs_do_not_move_the_constants_of_dense_runs() -> None:
    """Iterations whose scan is three times as slow as predicted move only `scan`."""
    truth, slow = planted(gemm_rate=0.7, elementwise=1.6), planted(gemm_rate=0.7, elementwise=1.6, scan=3.0)
    dense = [iteration(run, truth) for run in DENSE]
    dense += [each for run in DENSE for each in parts(run, truth)]
    alone, beside = fit(dense), fit([*dense, *(iteration(run, slow) for run in HYBRID)])
    assert "scan" not in values(alone)
    assert values(beside)["scan"] == pytest.approx(3.0, rel=0.1)
    assert values(beside)["gemm_rate"] == pytest.approx(values(alone)["gemm_rate"], rel=0.03)
    for run in DENSE:
        seconds = predict(run, alone.constants).iter_time_s
        assert predict(run, beside.constants).iter_time_s == pytest.approx(seconds, rel=0.02)


def test_a_single_hybrid_iteration_moves_its_scan_and_hardly_another_constant() -> None:
    """What one run does not tell apart goes to the constant that is known least."""
    run, dense = accelerator_run("MMM*MMM-"), accelerator_run(None)
    measured = iteration(run, planted(scan=2.0))
    assert measured.seconds > 1.1 * predict(run, planted()).iter_time_s
    found, held = calibrate([measured]), calibrate([measured], fixed=("scan",))
    scan = next(term for term in found.terms if term.name == "scan")
    assert scan.low < 2.0 < scan.high
    before = predict(dense, planted()).iter_time_s
    moved, without = (abs(predict(dense, each.constants).iter_time_s / before - 1) for each in (found, held))
    assert moved < 0.05
    assert moved < without / 2
    assert predict(run, found.constants).iter_time_s == pytest.approx(measured.seconds, rel=0.05)


def test_dense_runs_are_calibrated_without_a_scan() -> None:
    found = fit([iteration(run, planted(gemm_rate=0.7)) for run in DENSE])
    assert "scan" not in {term.name for term in found.terms}
    assert found.constants.scan == 1.0


def test_a_calibration_of_an_older_release_has_the_predicted_scan(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(fit([iteration(DENSE[0], planted())]), path=path, source="a test")
    content = json.loads(path.read_text())
    del content["constants"]["scan"]
    path.write_text(json.dumps(content))
    assert read_calibration(path).constants.scan == 1.0


def test_experts_that_are_padded_to_a_capacity_calibrate() -> None:
    experts = Experts(
        num_experts=8,
        experts_per_token=2,
        ffn_hidden_size=512,
        capacity=ExpertCapacity(factor=1.5, is_padded=True),
    )
    runs = [replace(run, experts=experts) for run in DENSE[:3]]
    truth = planted(gemm_rate=0.62, elementwise=2.0)
    found = fit([each for run in runs for each in (iteration(run, truth), *parts(run, truth))])
    assert values(found)["gemm_rate"] == pytest.approx(truth.gemm_rate, rel=0.05)
    for run in runs:
        seconds = predict(run, truth).iter_time_s
        assert predict(run, found.constants).iter_time_s == pytest.approx(seconds, rel=0.02)
