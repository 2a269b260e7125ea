"""All ranks of a job make the same program: on another processor type, and with other hash seeds."""

import subprocess
import sys
from collections import Counter
from itertools import chain

import pytest

from tests.megatron.support import REPOSITORY, rank_environment

# Both processor types make every stage: ranks 0 and 1 of the 8 that share a stage by tensor parallelism.
RANKS, SHARED_BY, MADE = 64, 8, (0, 1)
# numba compiles the keys of the family's orders for these: nodes of a cluster may differ as they do.
PROCESSORS = (
    {"PYTHONHASHSEED": "1"},
    {"PYTHONHASHSEED": "2", "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_programs_and_digests_of_all_ranks_agree() -> None:
    ranks_made = [range(shard, RANKS, SHARED_BY) for shard in MADE]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.megatron.runtime.fake_ranks", *map(str, ranks)],
            env=rank_environment() | processor,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        for ranks, processor in zip(ranks_made, PROCESSORS, strict=True)
    ]
    try:
        lines = [line.split() for one in running for line in one.communicate(timeout=380)[0].splitlines()]
    finally:
        for one in running:
            one.kill()
            one.wait()
    assert sorted(int(rank) for rank, *_ in lines) == sorted(chain(*ranks_made))
    assert Counter(device for _, device, *_ in lines) == {str(device): len(MADE) for device in range(8)}
    assert len({tuple(digests) for _, _, *digests in lines}) == 1
    assert len(set(lines[0][2:])) == len(lines[0][2:]) == 4
