"""A rank of the probe, as far as it comes without GPUs."""

import os
import sys
from typing import Any

import pytest


@pytest.mark.parametrize(("device", "switched_off"), [("cuda", "0"), ("cpu", None)])
def test_links_are_measured_without_nvlink_sharp(
    monkeypatch: pytest.MonkeyPatch, device: str, switched_off: str | None
) -> None:
    import torch
    import torch.distributed as dist

    from quartet_plugin.probe.__main__ import main

    seen: list[str | None] = []

    def group(**_: Any) -> None:
        seen.append(os.environ.get("NCCL_NVLS_ENABLE"))
        raise InterruptedError

    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.delenv("NCCL_NVLS_ENABLE")
    monkeypatch.setattr(sys, "argv", ["probe", "findings.json", device, "30"])
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", group)
    with pytest.raises(InterruptedError):
        main()
    assert seen == [switched_off]
