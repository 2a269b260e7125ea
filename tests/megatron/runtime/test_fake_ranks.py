"""All ranks of a job make the same program: on another processor type, and with other hash seeds."""

import subprocess
import sys
from collections import Counter

import pytest

from tests.megatron.support import REPOSITORY, rank_environment

# Every other rank has the second type, so that each device is one of both.
RANKS, PER_DEVICE = 16, 2
# numba compiles the keys of the family's orders for these: nodes of a cluster may differ as they do.
PROCESSORS = (
    {"PYTHONHASHSEED": "1"},
    {"PYTHONHASHSEED": "2", "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_programs_and_digests_of_all_ranks_agree() -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.megatron.runtime.fake_ranks", *map(str, range(first, RANKS, 2))],
            env=rank_environment() | processor,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        for first, processor in enumerate(PROCESSORS)
    ]
    try:
        lines = [line.split() for one in running for line in one.communicate(timeout=380)[0].splitlines()]
    finally:
        for one in running:
            one.kill()
            one.wait()
    assert sorted(int(rank) for rank, *_ in lines) == list(range(RANKS))
    assert Counter(device for _, device, *_ in lines) == {str(device): PER_DEVICE for device in range(8)}
    assert len({tuple(digests) for _, _, *digests in lines}) == 1
    assert len(set(lines[0][2:])) == len(lines[0][2:]) == 4
