"""Constants of a cluster that is simulated come back from its iterations and parts."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quartet_plugin.calibration.constants_fit import (
    LINKS,
    Calibration,
    calibrate,
    fixed_by_probe,
    read_calibration,
    seconds_of,
    write_calibration,
)
from quartet_plugin.calibration.observations import Direction, Observation, Quantity
from quartet_plugin.cost.constants import ClusterConstants, Constants, fitted
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.errors import ConfigError
from tests.cost import runs
from tests.cost.live import cpu_run, varied_runs

pytestmark = pytest.mark.slow

NOISE = 0.01


def planted() -> ClusterConstants:
    """A cluster unlike the shared constants."""
    shared = {name: getattr(fitted(), name) for name in Constants.__dataclass_fields__}
    changed = {"gemm_rate": 0.62, "elementwise": 2.2, "softmax": 1.9, "optimizer": 1.7, "launch_s": 9e-6}
    return ClusterConstants(**{**shared, **changed}, action_s=6e-4, skew=0.03, optimizer_start=0.7)


def iterations(truth: Constants, *, seed: int = 0) -> list[Observation]:
    rng = np.random.default_rng(seed)
    return [
        Observation(
            run=run,
            seconds=predict(run, truth).iter_time_s * math.exp(rng.normal(0.0, NOISE)),
            spread=NOISE,
        )
        for run in varied_runs()
    ]


def parts(truth: Constants) -> list[Observation]:
    found = []
    for run in varied_runs():
        for quantity in (Quantity.LAYER, Quantity.HEAD):
            for direction in (Direction.FORWARD, Direction.INPUT_GRAD, Direction.WEIGHT_GRAD):
                one = Observation(run=run, seconds=1.0, spread=NOISE, quantity=quantity, direction=direction)
                found.append(replace(one, seconds=seconds_of(one, truth)))
        step = Observation(run=run, seconds=1.0, spread=NOISE, quantity=Quantity.OPTIMIZER)
        found.append(replace(step, seconds=seconds_of(step, truth)))
    return found


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate([*iterations(planted()), *parts(planted())])


def unseen() -> list[TrainingRun]:
    return [
        cpu_run(layers=10, hidden=192, seq=96, vocab=6144, split=(6, 4), num_microbatches=6),
        cpu_run(layers=6, hidden=320, vocab=8192, pp=1, tp=2, num_microbatches=3),
        cpu_run(layers=6, hidden=320, vocab=8192, pp=1, num_microbatches=3, micro_batch=2),
        cpu_run(layers=16, hidden=128, seq=192, split=(4, 4, 4, 4), num_microbatches=6),
    ]


def test_planted_constants_come_back(calibration: Calibration) -> None:
    truth = planted()
    for name in ("gemm_rate", "elementwise", "softmax", "optimizer"):
        term = next(term for term in calibration.terms if term.name == name)
        assert term.low <= getattr(truth, name) <= term.high, name
        # Activations are wide in proportion to the hidden size: the two are told apart by their sum at most.
        assert term.value == pytest.approx(getattr(truth, name), rel=0.3 if name == "elementwise" else 0.1)
        assert term.num_measurements > 5
        assert term.learned > 0.5


def test_unseen_runs_are_predicted_within_their_intervals(calibration: Calibration) -> None:
    truth = planted()
    for run in unseen():
        true_s = predict(run, truth).iter_time_s
        found = calibration.interval(run)
        assert found.seconds == pytest.approx(true_s, rel=0.03)
        assert found.low <= true_s <= found.high
        assert found.high / found.low < 1.3


def test_slow_starts_of_collectives_do_not_slow_gradients() -> None:
    """Small messages between ranks that compute are late, large ones are not: two constants, told apart."""
    truth = replace(planted(), hop_s=3e-3, scale_up=0.35, skew=0.06)
    reduced = [
        replace(one, seconds=seconds_of(one, truth))
        for run in varied_runs()
        if run.copies > 1
        for one in [Observation(run=run, seconds=1.0, spread=0.05, quantity=Quantity.GRADIENTS)]
    ]
    found = calibrate([*iterations(truth), *parts(truth), *reduced])
    assert found.constants.hop_s == pytest.approx(truth.hop_s, rel=0.2)
    assert found.constants.scale_up == pytest.approx(truth.scale_up, rel=0.2)
    for run in unseen():
        assert predict(run, found.constants).iter_time_s == pytest.approx(
            predict(run, truth).iter_time_s, rel=0.04
        )


def test_what_a_step_takes_beside_its_parts_is_measured_apart() -> None:
    truth = replace(planted(), step_s=0.003)
    overheads = [
        replace(one, seconds=seconds_of(one, truth))
        for run in varied_runs()
        for one in [Observation(run=run, seconds=1.0, spread=0.05, quantity=Quantity.OVERHEAD)]
    ]
    found = calibrate([*iterations(truth), *parts(truth), *overheads])
    assert found.constants.step_s == pytest.approx(truth.step_s, rel=0.2)


def test_a_probe_settles_links_but_those_of_processors() -> None:
    on_cpu, elsewhere = (Observation(run=run, seconds=1.0, spread=0.1) for run in (cpu_run(), runs.run()))
    assert fixed_by_probe([elsewhere]) == LINKS
    assert fixed_by_probe([elsewhere, on_cpu]) == ()


def test_more_measurements_make_narrower_intervals(calibration: Calibration) -> None:
    few = calibrate(iterations(planted())[:4])
    many = calibration
    run = unseen()[1]
    assert many.interval(run).high / many.interval(run).low < few.interval(run).high / few.interval(run).low


def test_a_slowdown_that_no_term_explains_becomes_the_residual() -> None:
    truth = replace(planted(), residual=1.08)
    found = calibrate([*iterations(truth), *parts(truth)])
    assert found.constants.residual > 1.03
    prediction = predict(cpu_run(), found.constants)
    assert prediction.terms["residual_s"] > 0
    assert sum(prediction.terms.values()) == pytest.approx(prediction.iter_time_s)


def test_a_known_device_moves_little_by_one_run() -> None:
    run = runs.run()
    predicted = predict(run, fitted()).iter_time_s
    found = calibrate([Observation(run=run, seconds=2 * predicted, spread=0.01)])
    assert {term.name for term in found.terms} >= {"gemm_rate", "step_s", "residual"}
    assert all(0.4 < term.value / term.prior < 2.5 for term in found.terms if term.name == "gemm_rate")


def test_terms_that_nothing_depends_on_are_left_out(calibration: Calibration) -> None:
    names = {term.name for term in calibration.terms}
    assert "flash_rate" not in names
    assert "fp8_rate" not in names
    assert calibration.constants.flash_rate == fitted().flash_rate


def test_stages_say_what_their_layers_take() -> None:
    run, truth = cpu_run(split=(5, 3)), planted()
    first, second = (
        seconds_of(
            Observation(
                run=run,
                seconds=1.0,
                spread=0.1,
                quantity=Quantity.STAGE,
                direction=Direction.BACKWARD,
                index=index,
            ),
            truth,
        )
        for index in (0, 1)
    )
    layer = seconds_of(
        Observation(run=run, seconds=1.0, spread=0.1, quantity=Quantity.LAYER, direction=Direction.BACKWARD),
        truth,
    )
    assert first > 5 * layer
    assert second > 3 * layer


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"seconds": 0.0}, "above 0"),
        ({"seconds": math.nan}, "above 0"),
        ({"spread": -1.0}, "above 0"),
        ({"direction": Direction.FORWARD}, "direction"),
        ({"quantity": Quantity.LAYER}, "direction"),
    ],
)
def test_impossible_measurements_are_refused(change: dict[str, object], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        Observation(**{"run": cpu_run(), "seconds": 1.0, "spread": 0.1, **change})  # type: ignore[arg-type]


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="no measurement"):
        calibrate([])


def test_file_and_back(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(calibration, path=path, source="a test")
    found = read_calibration(path)
    assert found.constants == calibration.constants
    assert found.terms == calibration.terms
    assert found.interval(cpu_run()) == calibration.interval(cpu_run())


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ('"num_parts"', '"surprise": 1, "num_parts"', "surprise"),
        ('"gemm_rate": 0', '"gemm_rate": -0', "gemm_rate"),
        ('"schema_version": 1', '"schema_version": 2', "schema_version"),
        ('"action_s"', '"action"', "unknown constant"),
    ],
)
def test_files_with_faults_are_refused(
    calibration: Calibration, tmp_path: Path, old: str, new: str, rule: str
) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(calibration, path=path, source="a test")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=rule) as caught:
        read_calibration(path)
    assert "\n" not in str(caught.value)
