"""A process that runs one trial in a Slurm job, to be killed: FOLDER COMMAND..."""

import sys
from pathlib import Path

from quartet_plugin.launchers.command import parse_command
from quartet_plugin.launchers.nodes_command import on_nodes
from quartet_plugin.trial.request import TrialRequest
from quartet_plugin.trial.runner import run_trial
from tests.launchers.test_slurm_trials import SHORT, in_jobs


def main(folder: Path, words: list[str]) -> None:
    """Run it to its end, if it lives so long."""
    request = TrialRequest(
        folder=folder / "trials" / "000001",
        command=on_nodes(parse_command(words, environment={}), num_nodes=2),
        warmup=1,
        measure=4,
        deadline_s=60.0,
        device="cpu",
        timeouts=SHORT,
        min_free_bytes=0,
    )
    run_trial(request, launcher=in_jobs(), poll_s=0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
