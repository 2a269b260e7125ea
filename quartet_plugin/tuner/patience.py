"""Ends a search that no longer improves: `study.patience` trials in a row without a better objective."""

from collections.abc import Sequence

from quartet_plugin.calibration.observations import launch_noise
from quartet_plugin.model.trial_record import FinishedTrial


def num_without_gain(trials: Sequence[FinishedTrial]) -> int:
    """The number of spent trials since the best objective last rose by more than the noise of launches.

    The best begins with the baseline and what another run measured. It stays where it is while trials exceed
    it by no more than noise, so that small gains add up to one. Repeated plans are no trials.
    """
    trials = [trial for trial in trials if trial.record.repeats is None]
    noise = launch_noise(trial.record for trial in trials)
    best, count = 0.0, 0
    for trial in trials:
        record = trial.record
        value = record.value if record.verdict == "measured" and not record.is_depth_proxy else None
        is_gain = value is not None and value > best * (1.0 + noise)
        if value is not None and (is_gain or not trial.is_spent):
            best = max(best, value)
        if trial.is_spent:
            count = 0 if is_gain else count + 1
    return count


def patience_words(trials: Sequence[FinishedTrial], *, patience: int) -> str | None:
    """Why the search ends here; None if it continues, and always with a `patience` of 0."""
    if not patience or num_without_gain(trials) < patience:
        return None
    noise = launch_noise(trial.record for trial in trials if trial.record.repeats is None)
    return f"the last {patience} gained no more than the noise ({100 * noise:.0f} %) over the best before"
