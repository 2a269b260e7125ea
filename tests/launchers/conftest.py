"""A real Slurm for the tests of this folder."""

import os
from collections.abc import Iterator

import pytest

from tests.launchers import namespaces
from tests.launchers.slurm_cluster import SlurmCluster, slurm_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Four nodes, for all tests of one process."""
    namespaces.require()
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), num_nodes=4) as running:
        yield running


@pytest.fixture
def outside_of_jobs(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process reaches the cluster and is in none of its jobs."""
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])


@pytest.fixture
def allocation(
    cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch, outside_of_jobs: None
) -> Iterator[str]:
    """This process is in an allocation of all four nodes."""
    cluster.run("salloc", "--no-shell", "--nodes=4", "--job-name=allocation", "--quiet")
    job = cluster.run("squeue", "-h", "-o", "%i", "-n", "allocation")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-4]")
    yield job
    cluster.run("scancel", job)
    cluster.await_up()
