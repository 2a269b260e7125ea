"""What `slurm-batch` gives to sbatch, without a Slurm."""

import os
from pathlib import Path

import pytest

from quartet_plugin.launchers.site import Site
from quartet_plugin.launchers.slurm_batch import SlurmBatchLauncher
from quartet_plugin.protocol.environment import ATTEMPT_ID


def test_sbatch_sees_the_users_variables_and_the_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "sbatch"
    program.write_text(f"#!/bin/sh\nenv > {tmp_path}/seen\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    users = {"SBATCH_ACCOUNT": "team", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_QOS": "low"}
    of_a_job = {"SLURM_JOB_ID": "7", "SRUN_DEBUG": "3", "SBATCH_MEM_BIND": "none"}
    env = {"PATH": os.environ["PATH"], ATTEMPT_ID: "a" * 32, **users, **of_a_job}
    launcher = SlurmBatchLauncher(1, Site(environment={"SBATCH_QOS": "high"}))
    launcher.start(["true"], env=env, cwd=tmp_path, stdout=tmp_path / "stdout.log")
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines())
    assert users | {"SBATCH_QOS": "high"} == {name: seen[name] for name in users}
    assert not of_a_job.keys() & seen.keys()
