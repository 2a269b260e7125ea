"""The launches of the user's command that a run has still to make, for the time that is left.

What nobody knows yet is counted as if it came: the parity checks of the finalists, and final rounds that
decide late. An estimate that is too long shrinks, one that is too short jumps.
"""

from quartet_plugin.tuner.config import StudyConfig


def launches_left(
    config: StudyConfig, *, num_tried: int, num_parity_runs: int = 0, num_workers: int = 1
) -> int:
    """Launches, one after the other, after `num_tried` trials: trials, drift checks, parity, final rounds."""
    trials = -(-max(0, config.trials - num_tried) // max(1, num_workers))
    # The check that is due with the last trial is left to the final rounds.
    checks = (config.trials - 1) // config.control - num_tried // config.control if config.control else 0
    return trials + max(0, checks) + num_parity_runs + final_launches(config)


def final_launches(config: StudyConfig) -> int:
    """Launches of final rounds that decide late: `study.rounds` for all, as many more for the leader."""
    return config.num_final_launches + 2 * config.rounds
