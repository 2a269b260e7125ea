"""What a run's trials taught, read from its folder and study."""

import json
import shutil
from pathlib import Path

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.study.view import StudyView, read_study
from quartet_plugin.tuner.history import open_run, read_history
from quartet_plugin.tuner.learned_run import learned_run
from quartet_plugin.tuner.run_space import space_of_run
from tests.model.clusters import make_cluster

RUN = Path(__file__).parents[1] / "golden" / "run_0.1.0"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(RUN, tmp_path / "r")
    return tmp_path / "r"


def study_of(run: Path) -> StudyView:
    study = read_study(open_run(run).storage)
    assert study is not None
    return study


def test_every_measured_trial_is_learned(run: Path) -> None:
    study = study_of(run)
    learned = learned_run(run, history=read_history(run, study=study), study=study)
    assert learned is not None
    measured = {row.number for row in study.rows if row.record.get("verdict") == "measured"}
    assert set(learned.predictor.measured) == measured
    record = {row.number: row.record for row in study.rows}
    for number, plan in learned.predictor.measured.items():
        predicted = learned.predictor.predict([plan])[0]
        assert predicted.iteration_s == pytest.approx(record[number]["iteration_s"], rel=0.2)
    assert learned.request.global_batch_size == plan.made_for.global_batch_size
    assert learned.request.shape == plan.made_for.shape


def test_a_trial_whose_plan_is_lost_teaches_nothing(run: Path) -> None:
    study = study_of(run)
    history = read_history(run, study=study)
    (lost, *_) = [row.number for row in history.trials if row.number and row.is_measured]
    for path in (run / "trials" / f"{lost:06d}").rglob("plan.json"):
        path.unlink()
    history = read_history(run, study=study)
    learned = learned_run(run, history=history, study=study)
    assert learned is not None
    assert lost not in learned.predictor.measured


def test_the_space_of_a_run_keeps_the_domains_of_its_cluster_file(run: Path) -> None:
    assert space_of_run(run).rules().joined_devices == 2
    domains = {"scale_up_devices": 1, "node": {"bandwidth_bytes_per_s": 5e10, "latency_s": 5e-6}}
    cluster = make_cluster(num_nodes=1, per_node=2, links=domains)
    open_run(run).folder.machine_file.write_text(json.dumps(cluster), encoding="utf-8")
    assert space_of_run(run).rules().joined_devices == 1


def test_a_run_without_a_baseline_is_refused(run: Path) -> None:
    study = study_of(run)
    history = read_history(run, study=study)
    shutil.rmtree(run / "trials" / "000000")
    with pytest.raises(ConfigError, match="not measured yet"):
        learned_run(run, history=history, study=study)
