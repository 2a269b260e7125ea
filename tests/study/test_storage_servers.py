"""Studies on a real PostgreSQL server and behind a real gRPC proxy."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.errors import StorageError
from quartet_plugin.study.storage import StudyStorage
from quartet_plugin.study.tune_study import TuneStudy
from quartet_plugin.study.view import read_study
from quartet_plugin.tuner.run_folder import TuningRun
from tests.study.servers import PASSWORD, Postgres, Proxy, postgres
from tests.study.test_storage import STUDY, outcomes, undisturbed
from tests.tuner.fakes import FakeMachine, Killed, Watching, begin, resume, tune

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres() as running:
        yield running


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    running = Proxy(storage=f"sqlite:///{tmp_path / 'proxied.sqlite3'}")
    running.start()
    yield running
    running.stop()


@pytest.fixture(params=["postgresql", "grpc"])
def url(request: pytest.FixtureRequest, server: Postgres) -> str:
    if request.param == "postgresql":
        return server.url
    running: Proxy = request.getfixturevalue("proxy")
    return running.url


def begin_at(folder: Path, url: str) -> TuningRun:
    return begin(folder, study={**STUDY, "storage": url})


def with_storage(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Change how every run of the test waits for its server."""
    made = TuningRun.storage.fget  # type: ignore[attr-defined]

    def changed(run: TuningRun) -> StudyStorage:
        storage: StudyStorage = replace(made(run), **changes)
        return storage

    monkeypatch.setattr(TuningRun, "storage", property(changed))


def test_a_server_holds_the_same_study_as_a_file(tmp_path: Path, url: str) -> None:
    watching = Watching()
    run = begin_at(tmp_path / "r", url)
    result = tune(run, FakeMachine(), observer=watching)
    assert outcomes(result) == undisturbed()
    found = read_study(run.storage)
    assert found is not None
    assert {row.number for row in found.rows if row.is_finished} == {
        record.number for record in result.trials
    }
    assert any("optuna-dashboard" in text and run.storage.study_name in text for text in watching.messages)


def test_a_killed_tuner_goes_on_where_it_was(tmp_path: Path, url: str) -> None:
    machine = FakeMachine(dies_at=4, dies_before_result=False)
    with pytest.raises(Killed):
        tune(begin_at(tmp_path / "r", url), machine)
    machine.dies_at = None
    again = resume(tmp_path / "r")
    config = again.config.model_copy(update={"study": again.config.study.model_copy(update={"storage": url})})
    assert outcomes(tune(replace(again, config=config), machine)) == undisturbed()


def test_runs_of_one_name_share_a_server(tmp_path: Path, server: Postgres) -> None:
    first = begin_at(tmp_path / "a" / "r", server.url)
    second = begin_at(tmp_path / "b" / "r", server.url)
    results = [tune(run, FakeMachine()) for run in (first, second)]
    assert outcomes(results[0]) == outcomes(results[1])
    assert first.storage.study_name != second.storage.study_name


def test_the_password_is_nowhere_in_the_run(tmp_path: Path, server: Postgres) -> None:
    from quartet_plugin.cli.report import write_report

    watching = Watching()
    run = begin_at(tmp_path / "r", server.url)
    tune(run, FakeMachine(), observer=watching)
    assert write_report(run.folder.path, storage=run.storage) is None
    secret = server.url.partition("tuner:")[2].partition("@")[0]
    files = [path for path in run.folder.path.rglob("*") if path.is_file()]
    assert {"config.json", "report.html", "study.json"} <= {path.name for path in files}
    texts = [path.read_bytes().decode(errors="replace") for path in files] + watching.messages
    assert not [text for text in texts if PASSWORD in text or secret in text]


def test_the_password_may_come_from_the_environment(
    tmp_path: Path, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"postgresql://tuner@127.0.0.1:{server.port}/postgres"
    with pytest.raises(StorageError, match=r"postgresql://tuner@127.*password") as caught:
        tune(begin_at(tmp_path / "without", address), FakeMachine())
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    assert tune(begin_at(tmp_path / "with", address), FakeMachine()).trials


def test_a_wrong_password_is_not_repeated(tmp_path: Path, server: Postgres) -> None:
    address = f"postgresql://tuner:wrong-guess@127.0.0.1:{server.port}/postgres"
    with pytest.raises(StorageError, match="password authentication failed") as caught:
        tune(begin_at(tmp_path / "r", address), FakeMachine())
    assert "wrong-guess" not in str(caught.value)


def test_a_server_lost_mid_run_ends_it_and_the_next_tuner_tells_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with postgres() as own:
        machine = FakeMachine()
        machine.on_launch = lambda request: own.stop() if len(machine.launched) == 4 else None
        with_storage(monkeypatch, patience_s=0.0)
        with pytest.raises(StorageError, match=r"postgresql://tuner@127.*cannot be read") as caught:
            tune(begin_at(tmp_path / "r", own.url), machine)
        assert "\n" not in str(caught.value)
        assert PASSWORD not in str(caught.value)
        num_launched = len(machine.launched)
        own.start()
        again = resume(tmp_path / "r")
        monkeypatch.setenv("PGPASSWORD", PASSWORD)
        assert outcomes(tune(again, machine)) == undisturbed()
        names = [name for name, _ in machine.launched if "round" not in name]
        assert len(names) == len(set(names))
        assert num_launched == 4


def test_a_server_that_comes_back_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with postgres() as own:
        machine, watching = FakeMachine(), Watching()
        machine.on_launch = lambda request: own.stop() if len(machine.launched) == 4 else None
        slept: list[float] = []

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if own.process is None:
                own.start()

        with_storage(monkeypatch, sleep=sleep)
        result = tune(begin_at(tmp_path / "r", own.url), machine, observer=watching)
        assert outcomes(result) == undisturbed()
        assert slept
        assert any("retrying for" in text for text in watching.messages)


@pytest.mark.parametrize("moment", ["enqueue", pytest.param("has_waiting", marks=pytest.mark.slow)])
def test_a_server_lost_between_two_trials_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Not a trial is under way: the tuner asks what waits, or puts the next plan into the study."""
    lost: list[str] = []
    with postgres() as own:

        def stop_once(study: TuneStudy) -> None:
            if not lost and len(study.trials()) > 2:
                lost.append(moment)
                own.stop()

        before = getattr(TuneStudy, moment)
        function = before.fget if isinstance(before, property) else before
        assert function is not None

        def after_the_loss(study: TuneStudy, *args: Any, **more: Any) -> Any:
            stop_once(study)
            return function(study, *args, **more)

        changed = property(after_the_loss) if isinstance(before, property) else after_the_loss
        monkeypatch.setattr(TuneStudy, moment, changed)

        def sleep(seconds: float) -> None:
            if own.process is None:
                own.start()

        with_storage(monkeypatch, sleep=sleep)
        result = tune(begin_at(tmp_path / "r", own.url), FakeMachine())
        assert lost
        assert outcomes(result) == undisturbed()


def test_a_proxy_that_is_away_is_one_line(
    tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_storage(monkeypatch, patience_s=0.0)
    machine = FakeMachine()
    machine.on_launch = lambda request: proxy.stop() if len(machine.launched) == 4 else None
    run = begin_at(tmp_path / "r", proxy.url)
    with pytest.raises(StorageError, match=r"grpc://127.*cannot be read or written") as caught:
        tune(run, machine)
    assert "\n" not in str(caught.value)
    proxy.start()
    assert outcomes(tune(resume(tmp_path / "r"), machine)) == undisturbed()


def test_nothing_is_pickled(tmp_path: Path, server: Postgres) -> None:
    """What another writer of the database could plant is JSON: no column holds bytes."""
    import psycopg

    tune(begin_at(tmp_path / "r", server.url), FakeMachine())
    with psycopg.connect(server.url) as connection:
        query = "SELECT DISTINCT data_type FROM information_schema.columns WHERE table_schema = 'public'"
        kinds = {str(row[0]) for row in connection.execute(query)}
    assert kinds
    assert "bytea" not in kinds
