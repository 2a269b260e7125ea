"""The measurements of another run, for a study that begins: trials where they hold here, else starts.

The same job on the same nodes: its measurements become trials with their source, scaled by the ratio of
the two baselines, so that a machine that was slower or faster that day does not count. They cost no budget,
and the final rounds measure again what could win. Another cluster or another model: its best plans, as far as
they exist here, are only the first to be tried.

What the other run was itself begun with is passed on with its first source. The log of the other run has it,
so the runs before it need not be there any more.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from quartet_plugin.errors import QuartetError, StorageError
from quartet_plugin.model.history import RunHistory, TrialRow
from quartet_plugin.model.measurement import Objective
from quartet_plugin.model.plan import Mapping, Plan
from quartet_plugin.model.trial_record import REFUSED_EXCESS, Score, TrialRecord, score_of_median
from quartet_plugin.space.param_sources import FixedParams, Params
from quartet_plugin.space.plan_space import Space
from quartet_plugin.split.layers import even_split
from quartet_plugin.split.shifts import scaled_split
from quartet_plugin.trial.request import Outcome
from quartet_plugin.tuner.memory_limit import above_limit
from quartet_plugin.tuner.run_folder import RunFolder

MAX_TRIALS = 200
MAX_STARTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierMeasurements:
    """Another run's trials that hold here (the choices that lead to each plan, and its record).

    `starts` are its points to try first, `words` one line about it.
    """

    trials: tuple[tuple[Params, TrialRecord], ...] = ()
    starts: tuple[Params, ...] = ()
    words: str = ""


def read_earlier_measurements(
    path: Path, *, space: Space, baseline: Score, objective: Objective, limit_bytes: int | None = None
) -> EarlierMeasurements:
    """The trials and starts of the run in `path` for `space`, whose baseline was just measured.

    Plans whose ranks had a peak above `limit_bytes` do not fit here. Raises ConfigError where there is no
    such run or it measured nothing.
    """
    from quartet_plugin.errors import ConfigError
    from quartet_plugin.study.view import read_study
    from quartet_plugin.tuner.history import open_run, read_history

    try:
        study = read_study(open_run(path).storage)
    except StorageError:
        study = None  # the trials' folders say enough
    other = read_history(path, study=study)
    rows = [row for row in other.trials if row.source is None]
    other = replace(other, trials=(*rows, *_passed_on(path)))
    baseline_row = other.baseline
    if baseline_row is None or baseline_row.plan is None or baseline_row.iteration_s is None:
        raise ConfigError(f"{path}: its baseline was not measured; name another run with --from")
    if baseline_row.plan.key != space.baseline.key:
        starts = tuple(_starts(other, space))
        return EarlierMeasurements(
            starts=starts,
            words=f"from {other.name}: another job or cluster; {len(starts)} of its best plans come first",
        )
    ratio = baseline_row.iteration_s / baseline.iteration_s
    trials = tuple(_trials(other, space, ratio=ratio, objective=objective, limit_bytes=limit_bytes))
    most = f" (no more than the best {MAX_TRIALS} are taken)" if len(trials) == MAX_TRIALS else ""
    sources = [record.source or "" for _, record in trials]
    num_passed_on = sum(source.rpartition(":")[0] != other.name for source in sources)
    earlier = f", {num_passed_on} of them of runs before it" if num_passed_on else ""
    return EarlierMeasurements(
        trials=trials,
        words=(
            f"from {other.name}: {len(trials)} of its measurements hold here{most}{earlier}, "
            f"times divided by {ratio:.2f}: "
            "what the baseline has gained since"
        ),
    )


def _passed_on(path: Path) -> list[TrialRow]:
    """The measurements that the run in `path` was itself begun with, as far as its log has them.

    Their times are as they were scaled for that run's baseline.
    """
    from quartet_plugin.study.study_log import read_log
    from quartet_plugin.tuner.history_rows import read_events
    from quartet_plugin.tuner.run_space import space_of_run

    log = read_log(read_events(RunFolder(path=path).events_file))
    if log is None or not log.earlier_trials:
        return []
    try:
        space = space_of_run(path)
    except QuartetError:
        return []  # a run whose baseline cannot be read is refused by the caller
    rows = []
    for number, (params, record) in enumerate(log.earlier_trials, start=1):
        try:
            plan = space.decode(FixedParams(params), trial=number)
        except (KeyError, ValueError, QuartetError):
            continue  # another version of the plugin chose otherwise
        rows.append(_row_of(number, plan, record))
    return rows


def _row_of(number: int, plan: Plan, record: TrialRecord) -> TrialRow:
    """A trial's row from its record alone."""
    return TrialRow(
        number=number,
        plan=plan,
        outcome=record.outcome,
        verdict=record.verdict,
        reason=record.reason,
        value=record.value,
        iteration_s=record.iteration_s,
        peak_memory_bytes=record.peak_memory_bytes,
        memory_excess_bytes=int(record.excess),
        source=record.source,
        is_cut=record.is_cut,
        drift=record.drift,
    )


def _trials(
    other: RunHistory, space: Space, *, ratio: float, objective: Objective, limit_bytes: int | None
) -> Iterable[tuple[Params, TrialRecord]]:
    seen = {space.baseline.key}
    for row in _best_first(other, other.trials):
        plan = row.plan
        is_first = row.number > 0 and row.repeats is None
        if plan is None or not is_first or plan.key in seen or len(seen) > MAX_TRIALS:
            continue
        source = row.source or f"{other.name}:{row.number}"
        record = _record_here(row, plan, source=source, ratio=ratio, objective=objective)
        if record is not None and limit_bytes is not None:
            record = _within(record, limit_bytes)
        params = None if record is None or space.refusal_of(plan) else space.params_of(plan)
        if record is not None and params is not None:
            seen.add(plan.key)
            yield params, record


def _record_here(
    row: TrialRow, plan: Plan, *, source: str, ratio: float, objective: Objective
) -> TrialRecord | None:
    """The record of another run's trial here; None for one that was unstable, wrong or lost."""
    where = f" (in {source})"
    common = TrialRecord(
        verdict="infeasible",
        outcome=row.outcome,
        reason=f"{row.reason.removesuffix(where)}{where}",
        attempt_id="",
        excess=float(row.memory_excess_bytes) or REFUSED_EXCESS,
        peak_memory_bytes=row.peak_memory_bytes,
        source=source,
        is_cut=row.is_cut,
    )
    if row.verdict == "infeasible":
        return common
    if row.outcome != "OK" or row.iteration_s is None:
        return None
    scored = score_of_median(plan, iteration_s=row.iteration_s * row.drift / ratio)
    return replace(common, verdict="measured", excess=0.0).scored(scored, objective=objective)


def _within(record: TrialRecord, limit_bytes: int) -> TrialRecord:
    """The record, infeasible where a measured plan's peak is above the limit."""
    excess = record.peak_memory_bytes - limit_bytes
    if record.verdict != "measured" or excess <= 0:
        return record
    why = f"out of memory: {above_limit(record.peak_memory_bytes, limit_bytes)} (in {record.source})"
    return replace(
        record,
        verdict="infeasible",
        outcome=Outcome.INFEASIBLE.value,
        reason=why,
        excess=float(excess),
        value=None,
    )


def _starts(other: RunHistory, space: Space) -> Iterable[Params]:
    measured = [row for row in other.trials if row.is_measured and row.number > 0 and row.repeats is None]
    num_starts = 0
    for row in _best_first(other, measured):
        params = None if row.plan is None else _params_here(row.plan, space)
        if params is not None:
            yield params
            num_starts += 1
        if num_starts == MAX_STARTS:
            return


def _best_first(other: RunHistory, rows: Iterable[TrialRow]) -> list[TrialRow]:
    """The rows by their speed; what was not measured comes last."""
    return sorted(rows, key=lambda row: (-(other.versus_baseline(row) or 0.0), row.number))


def _params_here(plan: Plan, space: Space) -> Params | None:
    """The choices that lead to the same plan of this job, its ranks in the launcher's order.

    For a model of another depth the split's boundaries are moved in proportion.
    """
    here = space.baseline
    split, num_layers = plan.split, here.shape.num_layers
    counts = split.transformer_layers_per_stage
    if 0 < sum(counts) != num_layers and len(counts) <= num_layers:
        origin = even_split(num_layers, num_stages=len(counts))
        scaled = scaled_split(counts, num_layers=num_layers, origin=origin)
        split = replace(split, transformer_layers_per_stage=scaled)
    try:
        moved = replace(
            plan,
            made_for=here.made_for,
            shape=here.shape,
            split=split,
            mapping=Mapping(slots=here.mapping.slots),
            prediction=None,
        )
    except QuartetError:
        return None  # it has no such plan: other sizes
    return None if space.refusal_of(moved) else space.params_of(moved)
