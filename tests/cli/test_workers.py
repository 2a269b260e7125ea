"""Real workers of a real tuner, over the fake training: killed, joined and interrupted."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from quartet_plugin.cli import tune_search
from quartet_plugin.cli.main import main
from quartet_plugin.cli.tune_search import TuneOptions, checked_request
from quartet_plugin.cli.tune_search import _begin as begin_search
from quartet_plugin.cli.workers import _refuse_taken as refuse_taken
from quartet_plugin.cli.workers import join, slices_of
from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers import command
from quartet_plugin.launchers.command import Command, parse_command
from quartet_plugin.launchers.device_slices import DeviceSlice
from quartet_plugin.launchers.placement import Placement
from quartet_plugin.launchers.running_process import current_identity
from quartet_plugin.model.files import read_json, write_json_atomic
from quartet_plugin.protocol.work_queue_files import Claim, SliceRecord, WorkerRecord, WorkerRequirement
from quartet_plugin.study.storage import StudyStorage
from quartet_plugin.study.view import read_study
from quartet_plugin.trial.processes import marked_processes
from quartet_plugin.tuner.config import parse_config, read_config
from quartet_plugin.tuner.run_folder import begun_run, create_run
from quartet_plugin.tuner.workers.work_queue import WorkQueue
from tests.cli.tuning import environment, living, prepare, wait_until
from tests.faults.conftest import assert_nothing_left
from tests.study.servers import Postgres, postgres
from tests.tuner.workers.hands import contained_identity, identity_of_other_boot, worker_record

NUM_TRIALS = 4
CONFIG = f"""\
run: fake
search: {{schedule: [no-pipelining, 1f1b, interleaved]}}
trial: {{warmup: 1, measure: 3, deadline_s: 60}}
study: {{trials: {NUM_TRIALS}, top_k: 1, rounds: 3, storage: STORAGE}}
device: cpu
"""
ENTRY = "from quartet_plugin.cli.main import entry; entry()"
FOUR = ("--workers", "4", "--oversubscribe")
TWO = ("--workers", "2", "--oversubscribe")
QUICK = ("--step-s", "0.05", "--nominal")


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres() as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    for tuner in Tuner.started:
        if tuner.process.poll() is None:  # the test has failed
            tuner.process.terminate()
            tuner.process.wait(timeout=60)
    Tuner.started.clear()
    assert living(tmp_path) == []
    children = {child.pid for child in psutil.Process().children(recursive=True)}  # the server's
    assert_nothing_left(tmp_path, known_children=children)


class Tuner:
    """A tuner in a process of its own."""

    started: ClassVar[list["Tuner"]] = []

    def __init__(
        self,
        folder: Path,
        *options: str,
        storage: str = "journal",
        fake: tuple[str, ...] = (),
        num_trials: int = NUM_TRIALS,
    ) -> None:
        config = CONFIG.replace("STORAGE", storage).replace(f"trials: {NUM_TRIALS}", f"trials: {num_trials}")
        words, command = prepare(folder, config=config)
        self.num_trials = num_trials
        self.run = folder / "runs" / "fake"
        self.storage = storage
        self.queue = WorkQueue(folder=self.run)
        self.released = folder / "released"
        self.log = folder / f"tuner-{len(list(folder.glob('tuner-*')))}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    ENTRY,
                    *words,
                    *options,
                    "--",
                    *command,
                    *fake,
                    "--hold",
                    str(self.released),
                ],
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        Tuner.started.append(self)

    def under_way(self, num: int) -> list[Claim]:
        """Wait until so many trials are being measured at once, held by `released`; who has them."""
        found: list[Claim] = []

        def are_measured() -> bool:
            assert self.process.poll() is None, self.words
            found[:] = [
                claim
                for queued in self.queue.queued_trials()
                if (claim := self.queue.claim_of(queued)) and self.has_begun(queued.trial)
            ]
            return len(found) >= num

        wait_until(are_measured, what=f"{num} trials at once", timeout_s=120)
        return found

    def has_begun(self, trial: int) -> bool:
        """Whether a trial's ranks measure, and are far from done."""
        for attempt in (self.run / "trials" / f"{trial:06d}").glob("attempt-*"):
            beats = [json.loads(path.read_text()) for path in attempt.glob("rank-*.beat.json")]
            if not (attempt / "result.json").exists() and len(beats) == 2:
                return all(beat["phase"] in ("warmup", "measure") for beat in beats) and all(
                    beat["iteration"] < 3 for beat in beats
                )
        return False

    def release(self) -> None:
        """Let the trials go on."""
        self.released.touch()

    def ends(self) -> int:
        """The exit code, when the trials may go on."""
        self.release()
        return self.process.wait(timeout=200)

    @property
    def words(self) -> str:
        """What it printed."""
        return self.log.read_text()

    def check_study(self) -> None:
        """Every trial that was asked for is told, once, and every plan was measured once."""
        place = StudyStorage(folder=self.run, run="fake", address=self.storage)
        view = read_study(place)
        assert view is not None
        assert all(row.is_finished for row in view.rows)
        assert [row.number for row in view.rows] == list(range(len(view.rows)))
        own = [row for row in view.rows if row.record["repeats"] is None]
        assert [row.record["verdict"] for row in own] == ["measured"] * (self.num_trials + 1)
        keys = Counter(row.labels["plan_key"] for row in own)
        assert set(keys.values()) == {1}
        for row in own:
            assert row.record["attempt_id"] in self.results(row.number)

    def results(self, trial: int) -> dict[str, str]:
        """Outcomes of a trial's attempts by their ids."""
        found = {}
        for path in (self.run / "trials" / f"{trial:06d}").glob("attempt-*/result.json"):
            sheet = json.loads(path.read_text())
            found[sheet["attempt_id"]] = sheet["outcome"]
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of a kind."""
        lines = (self.run / "events.jsonl").read_text().splitlines()
        return [event for line in lines if (event := json.loads(line))["kind"] == kind]


def attempt_ids(tuner: Tuner, trial: int) -> list[str]:
    """The ids of a trial's attempts."""
    sheets = (tuner.run / "trials" / f"{trial:06d}").glob("attempt-*/trial.json")
    return [json.loads(path.read_text())["attempt_id"] for path in sheets]


@pytest.fixture(
    params=[
        pytest.param("journal", marks=pytest.mark.nightly),
        pytest.param("postgresql", marks=pytest.mark.slow),
    ]
)
def storage(request: pytest.FixtureRequest) -> str:
    if request.param == "journal":
        return "journal"
    running: Postgres = request.getfixturevalue("server")
    return running.url


def test_rows_30_and_31_four_workers_and_one_of_them_killed_in_a_trial(tmp_path: Path, storage: str) -> None:
    """No trial is lost or doubled; what the killed worker had runs again, and nothing of it lives on."""
    tuner = Tuner(tmp_path, *FOUR, storage=storage, fake=QUICK)
    tuner.under_way(3)
    if storage != "journal":
        port = int(storage.rpartition(":")[2].partition("/")[0])
        for worker in tuner.queue.workers():  # nobody but the coordinator knows the study
            connections = psutil.Process(worker.identity.pid).net_connections("tcp")
            assert not [one for one in connections if one.raddr and one.raddr.port == port]
    victim = tuner.under_way(1)[-1]
    ids = attempt_ids(tuner, victim.trial)
    attempt = max((tuner.run / "trials" / f"{victim.trial:06d}").glob("attempt-*"))
    rank = json.loads((attempt / "rank-1.beat.json").read_text())["pid"]
    os.kill(rank, signal.SIGSTOP)  # so that the trial cannot end before anybody looks
    assert not (attempt / "result.json").exists()
    os.kill(victim.identity.pid, signal.SIGKILL)
    wait_until(lambda: (attempt / "STOP").exists(), what="the coordinator to see it")
    os.kill(rank, signal.SIGCONT)
    wait_until(lambda: not any(marked_processes(one) for one in ids), what="the end of what it had started")
    assert tuner.ends() == 0, tuner.words
    tuner.check_study()
    assert [(event["trial"], event["worker"]) for event in tuner.events("worker-lost")] == [
        (victim.trial, victim.worker)
    ]
    outcomes = tuner.results(victim.trial)
    assert [outcomes[one] for one in ids] == ["CANCELLED"]
    assert set(outcomes.values()) - {"UNSTABLE"} == {"CANCELLED", "OK"}
    assert f"trial {victim.trial}: worker {victim.worker}" in tuner.words
    assert living(tmp_path) == []


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("num_workers", [16, 64])
def test_many_workers_on_one_study_whose_database_is_killed(tmp_path: Path, num_workers: int) -> None:
    """More than there are cores; the server is away in the middle, and every trial is told once."""
    with postgres() as own:
        many = ("--workers", str(num_workers), "--oversubscribe")
        tuner = Tuner(tmp_path, *many, storage=own.url, fake=QUICK, num_trials=num_workers // 2 + 8)
        wait_until(
            lambda: len(list(tuner.queue.workers())) == num_workers, what="every worker", timeout_s=900.0
        )
        tuner.under_way(4)
        own.stop()
        tuner.release()
        wait_until(
            lambda: "retrying for" in tuner.words or tuner.process.poll() is not None,
            what="the tuner to miss its database",
            timeout_s=600.0,
        )
        own.start()
        assert tuner.process.wait(timeout=1200) == 0, tuner.words
        tuner.check_study()


@pytest.mark.slow
def test_row_8_a_killed_coordinator_with_several_trials_under_way(tmp_path: Path) -> None:
    """What was under way is seen to its end by the resumed one and told, each once."""
    tuner = Tuner(tmp_path, *TWO, fake=QUICK)
    claims = tuner.under_way(2)
    tuner.process.kill()
    tuner.process.wait(timeout=30)
    resumed = Tuner(tmp_path, "--resume", *TWO, fake=QUICK)
    assert resumed.ends() == 0, resumed.words
    resumed.check_study()
    for claim in claims:
        assert list(resumed.results(claim.trial).values()) in (["OK"], ["UNSTABLE"])
    assert living(tmp_path) == []


@pytest.mark.slow
def test_row_8_workers_whose_coordinator_is_killed_end_after_their_trial(tmp_path: Path) -> None:
    """Also where nobody resumes the run."""
    tuner = Tuner(tmp_path, *TWO, fake=QUICK)
    claims = tuner.under_way(2)
    tuner.process.kill()
    tuner.process.wait(timeout=30)
    tuner.release()
    wait_until(lambda: living(tmp_path) == [], what="the workers' end")
    for claim in claims:
        assert set(tuner.results(claim.trial).values()) & {"OK", "UNSTABLE"}
    # What a process leaves that is killed in the middle of a write; the next tuner removes it.
    for left in ((tuner.run / "lock.json"), *tuner.run.rglob(".*.tmp")):
        left.unlink()


@pytest.mark.slow
def test_row_9_ctrl_c_ends_every_worker_and_the_run_goes_on(tmp_path: Path) -> None:
    tuner = Tuner(tmp_path, *TWO, fake=QUICK)
    tuner.under_way(2)
    tuner.process.send_signal(signal.SIGINT)
    assert tuner.ends() == 130
    assert "--resume continues" in tuner.words
    assert living(tmp_path) == []
    resumed = Tuner(tmp_path, "--resume", fake=QUICK)  # without workers
    assert resumed.ends() == 0, resumed.words
    resumed.check_study()


def test_row_9_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    tuner = Tuner(tmp_path, *TWO, fake=(*QUICK, "--stubborn"))
    tuner.under_way(2)
    tuner.process.send_signal(signal.SIGINT)
    wait_until(lambda: "press again" in tuner.words, what="the first one's answer")
    tuner.process.send_signal(signal.SIGINT)
    assert tuner.ends() == 130


@pytest.mark.slow
def test_row_30_another_process_joins_and_a_second_tuner_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tuner = Tuner(tmp_path, "--workers", "1", "--oversubscribe", fake=QUICK)
    tuner.under_way(1)
    options, command = prepare(tmp_path, config=CONFIG.replace("STORAGE", "journal"))
    command += [*QUICK, "--hold", str(tuner.released)]
    assert main([*options, "--resume", "--workers", "1", "--oversubscribe", "--", *command]) == 6
    refusal = capfd.readouterr().err.strip().splitlines()
    assert len(refusal) == 1
    assert f"another tuner holds this run: process {tuner.process.pid} on" in refusal[0]
    words = [sys.executable, "-c", ENTRY, "tune", "--join", str(tuner.run), "--oversubscribe"]
    with subprocess.Popen(words, env=environment(), cwd="/", stdout=subprocess.PIPE, text=True) as joined:
        tuner.under_way(2)
        tuner.release()
        said, _ = joined.communicate(timeout=200)
    assert joined.returncode == 0
    assert "the search has ended" in said
    assert tuner.ends() == 0, tuner.words
    tuner.check_study()
    taken = Counter(event["worker"] for event in tuner.events("taken"))
    assert len(taken) == 2
    assert sum(taken.values()) == NUM_TRIALS
    assert living(tmp_path) == []


def test_a_run_that_takes_no_workers_is_not_joined(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tuner = Tuner(tmp_path)
    wait_until(lambda: (tuner.run / "config.json").exists(), what="the run")
    assert read_json(tuner.run / "config.json")["cores_per_trial"] == len(os.sched_getaffinity(0))
    assert main(["tune", "--join", str(tuner.run)]) == 6
    assert "start its tuner with --workers" in capfd.readouterr().err
    assert main(["tune", "--join", str(tmp_path / "nowhere")]) == 2
    assert main(["tune", "--join", str(tuner.run), "--resume"]) == 2
    assert tuner.ends() == 0, tuner.words
    tuner.check_study()
    assert not (tuner.run / "workers").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--workers", "0"), "must be from 1 to 64"),
        (("--workers", "999"), "must be from 1 to 64"),
        (("--workers", "40"), "are needed; "),
    ],
)
def test_what_cannot_be_divided_is_refused_before_anything_is_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...], says: str
) -> None:
    words, command = prepare(tmp_path, config=CONFIG.replace("STORAGE", "journal"))
    assert main([*words, *options, "--", *command]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert says in lines[0]
    assert not (tmp_path / "runs").exists()


PLAIN = (sys.executable, "train.py")
TWO_RANKS = parse_command(["torchrun", "--nproc-per-node", "2", "train.py"], environment={})
UNKNOWN = parse_command(["bash", "train.sh"], environment={})


def cut_again(num_cores: int, size: int | None, command: Command = TWO_RANKS, **options: Any) -> list[int]:
    """The cores of each slice on a host of `num_cores`, where the run's trials had `size` before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
        slices = slices_of(
            parse_config({"device": "cpu"}, where="test"),
            placement=Placement(launcher="local"),
            command=command,
            cores_per_trial=size,
            **{"num_workers": None, "oversubscribe": False, **options},
        )
    return [part.num_devices for part in slices]


def test_a_resumed_run_keeps_the_cores_of_a_trial() -> None:
    assert cut_again(8, None, num_workers=2) == [4, 4]
    assert cut_again(8, 2, num_workers=4) == [2, 2, 2, 2]
    assert cut_again(8, 2, num_workers=2) == [2, 2]
    assert cut_again(8, 2) == [2]
    assert cut_again(8, 8) == cut_again(8, None) == cut_again(8, 8, UNKNOWN) == []
    assert cut_again(8, 2, UNKNOWN) == [2]
    assert cut_again(8, 8, num_workers=1) == [8]
    assert cut_again(8, 8, num_workers=3, oversubscribe=True) == [8, 8, 8]


@pytest.mark.parametrize(
    ("num_cores", "size", "options", "says"),
    [
        (8, 4, {"num_workers": 4}, r"--workers 4: 8 cores here, .* run had 4; .*; use at most 2 workers, or"),
        (8, 8, {"num_workers": 2}, r"--workers 2: 8 cores here, .* run had 8; .*; omit --workers, or start"),
        (4, 8, {}, r"--resume: 4 cores here, .*; resume where at least 8 cores are available, or start"),
        (4, 8, {"num_workers": 1}, r"--workers 1: 4 cores here, .*; resume where at least 8 cores"),
        (
            8,
            4,
            {"num_workers": 2, "oversubscribe": True},
            r"--workers 2 --oversubscribe: 8 cores here, .* run had 4; .*; omit --oversubscribe, or start",
        ),
        (8, 4, {"num_workers": 0}, "must be from 1 to 64"),
    ],
)
def test_a_resumed_run_with_other_cores_for_a_trial_is_refused_in_one_line(
    num_cores: int, size: int, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        cut_again(num_cores, size, **options)
    assert "\n" not in str(caught.value)


def test_only_a_run_that_has_launched_something_keeps_the_cores_of_a_trial(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, command = prepare(tmp_path, config=CONFIG.replace("STORAGE", "journal"))
    config = read_config(tmp_path / "q.yaml")
    run = create_run(tmp_path / "runs" / "fake", config=config, command=command, cores_per_trial=2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5, 6})
    again = [*words, "--resume", "--workers", "2"]
    options = TuneOptions(
        config=tmp_path / "q.yaml",
        run_dir=tmp_path / "runs",
        name=None,
        trials=None,
        is_resumed=True,
        is_taken_over=False,
        max_minutes=None,
        earlier_run=None,
        num_workers=2,
        oversubscribe=False,
        launcher=None,
        trial_nodes=None,
        nodes=None,
        site=None,
    )
    request = checked_request(command, options)
    assert [part.num_devices for part in request.slices(config)] == [3, 3]
    assert begin_search(request, run.folder.path).cores_per_trial == 3
    (run.folder.trial(0) / "attempt-1").mkdir(parents=True)
    request = checked_request(command, options)
    assert [part.num_devices for part in request.slices(config)] == [3, 3]
    assert begin_search(request, run.folder.path).cores_per_trial == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    for start in (["--dry-run"], []):
        assert main([*again, *start, "--", *command]) == 2
        (line,) = capfd.readouterr().err.strip().splitlines()
        assert "--workers 2: 4 cores here, and each trial of this run had 3" in line


@pytest.mark.parametrize("value", [0, True, "2", 1.5])
def test_a_number_of_cores_that_is_none_is_refused(tmp_path: Path, value: Any) -> None:
    run = create_run(tmp_path / "r", config=parse_config({}, where="test"), command=PLAIN)
    content = read_json(run.folder.config_file)
    write_json_atomic(run.folder.config_file, {**content, "cores_per_trial": value})
    with pytest.raises(ConfigError, match=r"config\.json: cores_per_trial: must be a number of cores"):
        begun_run(tmp_path / "r", config=None, command=None)


def open_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> WorkQueue:
    """A run that takes workers, as its folder looks on another host."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    config = parse_config({"run": "r"}, where="test")
    run = create_run(tmp_path / "r", config=config, command=words)
    queue = WorkQueue(folder=run.folder.path)
    queue.open(WorkerRequirement(device="cpu", num_devices=1))
    return queue


TAKEN = "are worker there's; name others with taskset"


@pytest.mark.parametrize(
    ("words", "given", "says"),
    [
        (PLAIN, (*PLAIN, "--more"), "the run has another command"),
        (
            (*PLAIN, "--api-key", "abc"),
            None,
            "contains a secret, which is not stored; give the command",
        ),
        ((*PLAIN, "--api-key", "abc"), (*PLAIN, "--api-key", "abc"), TAKEN),
        (PLAIN, None, TAKEN),
    ],
)
def test_a_host_that_cannot_join_is_told_why_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    given: tuple[str, ...] | None,
    says: str,
) -> None:
    queue = open_run(tmp_path, monkeypatch, *words)
    everything = SliceRecord(device="cpu", cores=tuple(os.sched_getaffinity(0)))
    me = current_identity()
    queue.register(
        WorkerRecord(
            name="there", host=socket.gethostname(), identity=me, parent=me, share=everything, is_joined=False
        )
    )
    with pytest.raises(ConfigError, match=says) as caught:
        join(tmp_path / "r", words=given, num_workers=1, oversubscribe=False)
    assert "\n" not in str(caught.value)
    assert "abc" not in str(caught.value)


def test_devices_of_a_worker_in_another_container_are_not_joined_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has this host's name, and no process with its pid is to be seen."""
    queue = open_run(tmp_path, monkeypatch, *PLAIN)
    everything = SliceRecord(device="cpu", cores=tuple(os.sched_getaffinity(0)))
    hidden = replace(
        worker_record("there", pid=1, host=socket.gethostname()),
        identity=contained_identity(),
        share=everything,
    )
    queue.register(hidden)
    with pytest.raises(ConfigError, match=TAKEN):
        join(tmp_path / "r", words=None, num_workers=1, oversubscribe=False)


def test_devices_of_a_worker_before_a_reboot_are_joined_with(tmp_path: Path) -> None:
    queue = WorkQueue(folder=tmp_path)
    queue.open(WorkerRequirement(device="cpu", num_devices=1))
    everything = SliceRecord(device="cpu", cores=(0, 1))
    before = replace(
        worker_record("there", pid=1, host=socket.gethostname()),
        identity=identity_of_other_boot(),
        share=everything,
    )
    queue.register(before)
    refuse_taken((DeviceSlice.of(everything),), queue)
    queue.register(replace(before, identity=current_identity()))
    with pytest.raises(ConfigError, match=TAKEN):
        refuse_taken((DeviceSlice.of(everything),), queue)


def test_a_host_without_the_commands_folder_cannot_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_run(tmp_path, monkeypatch, *PLAIN)
    (tmp_path / "train.py").unlink()
    with pytest.raises(ConfigError, match=r"train\.py: not on this host; mount"):
        join(tmp_path / "r", words=None, num_workers=1, oversubscribe=False)


@pytest.mark.parametrize("is_joined", [True, False])
def test_a_run_reads_its_command_in_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_joined: bool
) -> None:
    """Also where it goes on, or is joined, from another one."""
    open_run(tmp_path, monkeypatch, *PLAIN)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    folders = []

    def parse(words: Sequence[str], *, cwd: Path | None = None) -> Command:
        folders.append(cwd)
        if cwd is not None:
            raise ConfigError("read")
        return parse_command(words)

    for module in (command, tune_search):
        monkeypatch.setattr(module, "parse_command", parse)
    if is_joined:
        with pytest.raises(ConfigError, match="read"):
            join(tmp_path / "r", words=None, num_workers=1, oversubscribe=False)
    else:
        options = ["--resume", "--run-dir", str(tmp_path), "--name", "r"]
        assert main(["tune", *options, "--", *PLAIN]) == 2
    assert folders[-1] == tmp_path


def test_shares_of_another_size_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_run(tmp_path, monkeypatch, *PLAIN).open(WorkerRequirement(device="cpu", num_devices=4096))
    with pytest.raises(ConfigError, match="4096 a worker, as the run's others have"):
        join(tmp_path / "r", words=None, num_workers=1, oversubscribe=False)
