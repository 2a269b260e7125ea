"""A coordinator that can be killed: runs one trial of the fake training."""

import sys
from pathlib import Path

from quartet_plugin.trial.runner import run_trial
from tests.faults.conftest import BareLauncher, trial_request

if __name__ == "__main__":
    torchrun, folder, *fake = sys.argv[1:]
    run_trial(trial_request(torchrun, Path(folder), *fake), launcher=BareLauncher(), poll_s=0.02)
