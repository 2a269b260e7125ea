"""Where a rank leaves how it failed, outside of a trial."""

import os
import time
from pathlib import Path

from quartet_plugin.errors import QuartetError
from quartet_plugin.megatron.failure import describe_failure
from quartet_plugin.megatron.ranks import Place
from quartet_plugin.model.files import write_json_atomic

# As `quartet train` sets it: no launcher passes a rank's exit code on.
ERRORS_VARIABLE = "QUARTET_ERRORS"


def leave_error(error: BaseException, *, place: Place, num_steps: int = 0) -> None:
    """Write rank-K.err.json into the folder that the environment names; nothing where it names none."""
    folder = os.environ.get(ERRORS_VARIABLE)
    if not folder:
        return
    rank = place.launch_rank
    content = describe_failure(error, num_steps=num_steps, peak_bytes=0)
    try:
        write_json_atomic(
            Path(folder, f"rank-{rank}.err.json"), {"launch_rank": rank, "time": time.time(), **content}
        )
    except (QuartetError, OSError):
        return
