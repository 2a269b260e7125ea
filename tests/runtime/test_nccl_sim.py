"""The simulated NCCL fails where NCCL would hang or send other data, so that the tests on it can fail."""

from pathlib import Path

import torch

from tests import warm_ranks
from tests.megatron.support import run_ranks
from tests.runtime import nccl_sim


def test_what_breaks_nccls_rules_fails(tmp_path: Path) -> None:
    program, log = "tests.runtime.strict_rank", tmp_path / "log"
    code, output = run_ranks(2, program, timeout_s=120, log=log, framework=warm_ranks.TORCH)
    assert code != 0
    for line in (
        "barrier: Duplicate GPU detected: a barrier on device 0 of the process of 1",
        "barrier: Duplicate GPU detected: a barrier on device 1 of the process of 0",
        "sent before there is a receive: False",
        "sent behind the wait: True",
        "received behind the wait: [0.0, 1.0, 2.0, 3.0]",
        nccl_sim.CHANGED,
    ):
        assert line in output, output[-3000:]
    assert "exitcode  : 86" in output


def test_a_buffer_holds_nothing_of_use_before_the_wait() -> None:
    for tensor in (torch.ones(3), torch.ones(3, dtype=torch.int64)):
        nccl_sim.spoil(tensor)
        assert not (tensor == 1).any()
