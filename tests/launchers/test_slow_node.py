"""Real Megatron on two hosts that ssh reaches, one of which becomes slow in the middle of a study."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tuning import environment, living, wait_until
from tests.launchers import namespaces
from tests.launchers.ssh_hosts import ssh_hosts
from tests.megatron.entry_launch import MEGATRON_FLAGS, SCRIPT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

ENTRY = "from quartet_plugin.cli.main import entry; entry()"
CONFIG = """\
run: slow
device: cpu
launcher: ssh
site: {site}
trial: {{nodes: 2, warmup: 1, measure: 3}}
study: {{trials: 3, top_k: 1, rounds: 3}}
search: {{schedule: stock}}
"""
SITE = """\
ssh: {{hosts: [h1, h2], config: {config}}}
"""
# On h2 every product takes six times the work once the file is there. Megatron's layers do not use this one.
SLOW = """\
import os, socket, torch
if socket.gethostname() == "h2" and os.path.exists({flag!r}):
    product = torch.mm
    def six_times(*args, **options):
        for _ in range(5):
            product(*args, **options)
        return product(*args, **options)
    torch.mm = six_times
"""


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def quartet(*words: str) -> list[str]:
    return [sys.executable, "-c", ENTRY, *words]


def test_a_node_made_slow_in_the_middle_is_found_and_named(tmp_path: Path) -> None:
    namespaces.require()
    flag, script, run = tmp_path / "h2-is-slow", tmp_path / "pretrain.py", tmp_path / "runs" / "slow"
    script.write_text(SLOW.format(flag=str(flag)) + SCRIPT.read_text(encoding="utf-8"))
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    (tmp_path / "hosts").mkdir()
    with ssh_hosts(tmp_path / "hosts", number=2) as hosts:
        assert hosts.site.ssh is not None
        (tmp_path / "site.yaml").write_text(SITE.format(config=hosts.site.ssh.config))
        (tmp_path / "q.yaml").write_text(CONFIG.format(site=tmp_path / "site.yaml"))
        words = quartet("tune", "--config", str(tmp_path / "q.yaml"), "--run-dir", str(tmp_path / "runs"))
        command = [torchrun, "--nproc-per-node", "1", str(script), *MEGATRON_FLAGS]
        with (tmp_path / "out.txt").open("w") as out:
            tuner = subprocess.Popen(
                [*words, "--", *command], stdout=out, stderr=out, cwd=tmp_path, env=environment()
            )
        try:
            wait_until(
                lambda: bool(events(run, "outcome")) or tuner.poll() is not None,
                what="trial 0",
                timeout_s=150.0,
            )
            flag.touch()
            wait_until(
                lambda: (
                    any(event["node"] == "h2" for event in events(run, "node-speed"))
                    or tuner.poll() is not None
                ),
                what="a second look",
                timeout_s=200.0,
            )
        finally:
            tuner.send_signal(signal.SIGINT)
            tuner.wait(timeout=60)
    printed = (tmp_path / "out.txt").read_text(encoding="utf-8")
    assert "node h2 is slow: its computations take" in printed, printed
    shown = subprocess.run(quartet("status", str(run)), capture_output=True, text=True, check=True)
    assert "node h2: computations take" in shown.stdout
    assert not living(run)
