"""The life of trials under a tuner that dies, is replaced and comes back, as a state machine.

The study, the lease, the attempts' folders and their recovery are real; the ranks are this test, and a tuner
that is killed is one whose objects are dropped while its lock names a process that has ended.
"""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quartet_plugin.errors import StorageError
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.schema import dump
from quartet_plugin.model.trial_record import TrialRecord
from quartet_plugin.protocol.rank_files import Iteration, RankFileReader, RankReport
from quartet_plugin.space.config import SearchConfig
from quartet_plugin.space.plan_space import build_space
from quartet_plugin.study.storage import StudyStorage
from quartet_plugin.study.tune_study import Proposal, TuneStudy
from quartet_plugin.trial.attempt import Attempt, create_attempt, open_attempt, write_result
from quartet_plugin.trial.lease import LOCK_NAME, Lease
from quartet_plugin.trial.outcome import AttemptObservations, classify
from quartet_plugin.trial.recover import recover
from quartet_plugin.trial.request import TrialRequest
from quartet_plugin.tuner.sequential_search import num_spent
from quartet_plugin.tuner.trial_backend import LocalBackend
from quartet_plugin.tuner.trial_launcher import record_of
from tests.in_memory import MEMORY
from tests.space.jobs import make_job, make_nodes
from tests.trial.executions import executed

WARMUP, MEASURE = 1, 3
PLACE = MEMORY if os.access(MEMORY, os.W_OK) else None
COMMAND = parse_command(["torchrun", "--nproc-per-node", "2", "train.py"], environment={})
SPACE = build_space(make_job(), nodes=make_nodes(2), search=SearchConfig(), run="r", seed=0)
BASELINE = TrialRecord(verdict="measured", outcome="OK", reason="", attempt_id="0" * 32, value=100.0)


@dataclass
class Tuner:
    """One process's view: its lease, its study, what it asked for and the attempt that it watches."""

    lease: Lease
    study: TuneStudy
    proposal: Proposal | None = None
    attempt: Attempt | None = None


class Life(RuleBasedStateMachine):
    """Ask, launch, measure or fail, judge, tell; die, be replaced, wake up late, at any point between."""

    @initialize()
    def begin(self) -> None:
        """A run whose baseline was measured."""
        self.folder = Path(tempfile.mkdtemp(prefix="quartet-life-", dir=PLACE))
        self.record: dict[int, tuple[str, float | None, str]] = {}
        self.generations: list[int] = []
        self.stale: list[Tuner] = []
        self.late: list[Attempt] = []
        lease = Lease.acquire(self.folder)
        self.storage = StudyStorage(folder=self.folder, run="r")
        study = TuneStudy.create(
            self.storage,
            space=SPACE,
            seed=0,
            objective="tokens_per_s",
            baseline=BASELINE,
            starts=[],
        )
        self.now = Tuner(lease=lease, study=study)
        self.generations.append(lease.generation)

    def teardown(self) -> None:
        """Whatever happened, another process reads the same."""
        if not hasattr(self, "folder"):
            return
        self.killed()
        self.every_trial_is_told_once_and_stays_as_it_was_told()
        self.now.study.close()
        self.now.lease.release()
        shutil.rmtree(self.folder)

    # What the tuner that holds the run does

    @precondition(lambda self: self.now.proposal is None)
    @rule()
    def ask(self) -> None:
        """First the trial that an earlier tuner did not live to tell."""
        self.now.lease.check()
        self.now.proposal = self.now.study.unfinished() or self.now.study.ask()
        assert self.now.proposal.number not in self.record

    @precondition(lambda self: self.now.proposal is not None and self.now.attempt is None)
    @rule()
    def launch(self) -> None:
        """Make an attempt, unless the trial's folder has its result already."""
        proposal = self.now.proposal
        assert proposal is not None
        place = self.place(proposal.number)
        if LocalBackend().recorded(place, plan_key=proposal.plan.key) is not None:
            return
        request = TrialRequest(
            folder=place,
            command=COMMAND,
            plan=proposal.plan,
            warmup=WARMUP,
            measure=MEASURE,
            device="cpu",
            min_free_bytes=0,
        )
        self.now.attempt = create_attempt(request, number=1, port=None).attempt

    @precondition(lambda self: self.now.attempt is not None)
    @rule()
    def judge(self) -> None:
        """The watching ends: the attempt's files become its result."""
        attempt = self.now.attempt
        assert attempt is not None
        write_result(attempt.folder, attempt.spec, classify(observations_of(attempt)), wall_s=1.0)
        self.late.append(attempt)
        self.now.attempt = None

    @precondition(lambda self: self.now.proposal is not None and self.now.attempt is None)
    @rule()
    def tell(self) -> None:
        """What is recorded is told; without it there is nothing to tell yet."""
        proposal = self.now.proposal
        assert proposal is not None
        result = LocalBackend().recorded(self.place(proposal.number), plan_key=proposal.plan.key)
        if result is None:
            return
        self.now.lease.check()
        record = record_of(proposal.plan, result, objective="tokens_per_s")
        self.now.study.tell(proposal, record)
        assert proposal.number not in self.record, "told twice"
        self.record[proposal.number] = (record.attempt_id, record.value, record.verdict)
        self.now.study.tell(proposal, replace(BASELINE, value=1e9))  # changes nothing
        self.now.proposal = None

    # What the ranks do, whoever watches them

    @precondition(lambda self: self.now.attempt is not None)
    @rule(seconds=st.floats(0.1, 9.0))
    def measure(self, seconds: float) -> None:
        """The rank leaves its report."""
        assert self.now.attempt is not None
        report(self.now.attempt, seconds=seconds)

    @precondition(lambda self: self.late)
    @rule(data=st.data(), seconds=st.floats(0.1, 9.0))
    def write_late(self, data: st.DataObject, seconds: float) -> None:
        """A rank of an old attempt that nobody could end still writes: into its own folder."""
        report(data.draw(st.sampled_from(self.late)), seconds=seconds)

    @precondition(lambda self: self.late and self.now.attempt is not None)
    @rule(data=st.data())
    def write_astray(self, data: st.DataObject) -> None:
        """And one that has the new folder's path writes there, under its own attempt's id."""
        old = data.draw(st.sampled_from(self.late))
        assert self.now.attempt is not None
        if not (self.now.attempt.folder / "rank-0.json").exists():
            report(old, seconds=0.01, folder=self.now.attempt.folder)

    # What happens to tuners

    @rule()
    def killed(self) -> None:
        """`kill -9`, and the next one goes on: it finishes what was left and reads the study."""
        self.now.study.close()
        lock = self.folder / LOCK_NAME
        ended = {**json.loads(lock.read_text()), "start_ticks": 5}
        lock.write_text(json.dumps(ended))
        if self.now.attempt is not None:
            self.late.append(self.now.attempt)
        self.resume(Lease.acquire(self.folder))

    @rule()
    def suspended_and_taken_over(self) -> None:
        """SIGSTOP, and another tuner takes the run after the lease ran out."""
        self.stale.append(self.now)
        if self.now.attempt is not None:
            self.late.append(self.now.attempt)
        self.resume(Lease.acquire(self.folder, takeover=True, expiry_s=-1.0))

    @precondition(lambda self: self.stale)
    @rule()
    def woken(self) -> None:
        """A tuner that was replaced finds out before it writes."""
        tuner = self.stale.pop()
        for write in (tuner.lease.check, tuner.lease.renew):
            with pytest.raises(StorageError, match="writes nothing more"):
                write()
        tuner.lease.release()
        tuner.study.close()

    def resume(self, lease: Lease) -> None:
        """As `Coordinator.tune` begins."""
        recover(self.folder / "trials", poll_s=0.01)
        found = TuneStudy.open(self.storage, space=SPACE, seed=0)
        assert found is not None
        self.now = Tuner(lease=lease, study=found)
        self.generations.append(lease.generation)

    # What always holds

    @invariant()
    def every_trial_is_told_once_and_stays_as_it_was_told(self) -> None:
        """By its number: the attempt, the value and the verdict."""
        if hasattr(self, "now"):
            trials = [trial for trial in self.now.study.trials() if trial.number > 0]
            found = {r.number: (r.record.attempt_id, r.record.value, r.record.verdict) for r in trials}
            assert found == self.record
            assert num_spent(self.now.study.trials()) == sum(one[2] != "lost" for one in self.record.values())

    @invariant()
    def one_generation_writes_and_each_is_newer(self) -> None:
        """The lock names the tuner that goes on."""
        if hasattr(self, "now"):
            assert self.generations == sorted(set(self.generations))
            self.now.lease.check()

    def place(self, number: int) -> Path:
        """A trial's folder."""
        return self.folder / "trials" / f"{number:06d}"


def report(attempt: Attempt, *, seconds: float, folder: Path | None = None) -> None:
    """rank-K.json of an attempt, by the ranks that its plan has."""
    rows = tuple(
        Iteration(iteration=at + 1, iteration_s=seconds, loss=2.0, grad_norm=1.0, skipped=False)
        for at in range(WARMUP + MEASURE)
    )
    plan = attempt.read_plan()
    for rank, slot in enumerate(SPACE.baseline.mapping.slots):
        found = RankReport(
            schema_version=1,
            attempt_id=attempt.spec.attempt_id,
            rank=rank,
            launch_rank=rank,
            host=f"node-{slot.node}",
            local_rank=slot.local,
            pid=2**22 + rank,
            plan_key=attempt.spec.plan_key,
            device="cpu",
            phases_s={},
            iterations=rows,
            peak_memory_bytes=1,
            job=None,
            execution=None if plan is None else executed(plan, rank),
        )
        place = (folder or attempt.folder) / f"rank-{rank}.json"
        draft = place.with_name(f".rank-{rank}.json.new")
        draft.write_text(json.dumps(dump(found)))
        draft.replace(place)


def observations_of(attempt: Attempt) -> AttemptObservations:
    """What a watching tuner knows when the one process has ended."""
    again = open_attempt(attempt.folder)
    assert again is not None
    return AttemptObservations(
        spec=again.spec,
        plan=again.read_plan(),
        snapshot=RankFileReader(attempt.folder, attempt_id=again.spec.attempt_id).scan(),
        num_processes=again.command.num_processes,
        stopped_by="exit",
        exit_code=1,
        is_single=True,
    )


Life.TestCase.settings = settings(
    max_examples=6,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestLife = pytest.mark.timeout(240)(Life.TestCase)
