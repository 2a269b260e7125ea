"""How a run's study opens: an earlier process's, one remade from the run's log, or a new one."""

from dataclasses import asdict, dataclass
from pathlib import Path

from quartet_plugin.model.trial_record import FinishedTrial
from quartet_plugin.space.plan_space import Space
from quartet_plugin.study.storage import StudyStorage
from quartet_plugin.study.study_log import StudyLog
from quartet_plugin.study.tune_study import TuneStudy
from quartet_plugin.trial.request import TrialResult
from quartet_plugin.tuner.context import TuningContext
from quartet_plugin.tuner.earlier_run import EarlierMeasurements, read_earlier_measurements
from quartet_plugin.tuner.finalists import BASELINE
from quartet_plugin.tuner.proposer import kept_machine
from quartet_plugin.tuner.study_remake import with_folders, with_remake
from quartet_plugin.tuner.trial_launcher import BaselineScore, TrialLauncher, record_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOpener:
    """Opens the study of a run whose baseline is measured.

    `earlier_run` is the folder of another run, whose measurements a new study is given. Where
    `is_self_contained`, trials of the run's log alone make the same study again.
    """

    context: TuningContext
    storage: StudyStorage
    space: Space
    baseline: BaselineScore
    launcher: TrialLauncher
    earlier_run: Path | None
    is_self_contained: bool

    def open(self, result: TrialResult) -> TuneStudy:
        """The run's study: an earlier process's, or a new one with the baseline, `result`, as trial 0."""
        config = self.context.run.config.study
        folder, say = self.context.run.folder, self.context.observer.message
        storage, log = with_remake(self.storage, folder, is_self_contained=self.is_self_contained)
        study = TuneStudy.open(storage, space=self.space, seed=config.seed, sampler=config.sampler)
        if study is not None and log is not None and study.lacks(log):
            study.close()
            storage.put_aside("is missing finished trials")
            study = None
        if study is not None:
            say(storage.tool_line)
            self._show_finished(study.trials())
            return study
        if log is not None:
            log = with_folders(log, folder, space=self.space)
        earlier = self._earlier_measurements(log)
        study = TuneStudy.create(
            storage,
            space=self.space,
            seed=config.seed,
            objective=self.baseline.objective,
            baseline=record_of(
                self.space.baseline,
                result,
                objective=self.baseline.objective,
                node_slowdowns=self.launcher.node_monitor.slowdowns_in(result),
            ),
            starts=earlier.starts,
            earlier_trials=earlier.trials,
            sampler=config.sampler,
            log=log,
        )
        if num_unknown := study.num_unknown:
            say(f"{num_unknown} trials are skipped: their plan is in neither events.jsonl nor their folder")
        say(storage.tool_line)
        if log is not None:
            self._show_finished([trial for trial in study.trials() if trial.number in log.trials])
        return study

    def _show_finished(self, trials: list[FinishedTrial]) -> None:
        """Show the trials that an earlier tuner had launched, and count their seconds."""
        for trial in trials:
            if trial.record.repeats is None and trial.record.source is None:
                self.context.budget.add(trial.record.wall_s)
                if trial.number != BASELINE:
                    self.launcher.show_finished(trial)

    def _earlier_measurements(self, log: StudyLog | None) -> EarlierMeasurements:
        """The measurements that the study begins with: those that it began with before, or another run's."""
        if log is not None and log.earlier_trials is not None:
            return EarlierMeasurements(trials=log.earlier_trials, starts=log.starts)
        if self.earlier_run is None:
            return EarlierMeasurements()
        baseline = self.baseline
        earlier = read_earlier_measurements(
            self.earlier_run,
            space=self.space,
            baseline=baseline.score,
            objective=baseline.objective,
            limit_bytes=kept_machine(self.context.run.folder).memory_limit_bytes,
        )
        trials = [{"params": params, "record": asdict(record)} for params, record in earlier.trials]
        self.context.events.add("from", run=str(self.earlier_run), trials=trials, starts=earlier.starts)
        self.context.observer.message(earlier.words)
        return earlier
