"""Trials as steps of a real allocation, and as jobs of their own, on a real Slurm of four nodes."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers import slurm, slurm_batch
from quartet_plugin.launchers.engines import engine_named, engine_names
from quartet_plugin.launchers.protocol import Engine
from quartet_plugin.launchers.site import Site
from quartet_plugin.testing.launchers import LauncherConformance
from tests.launchers.slurm_cluster import SlurmCluster, slurm_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A cluster for all tests of this file."""
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), num_nodes=4) as running:
        yield running


@pytest.fixture
def _outside(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process reaches the cluster and is in none of its jobs."""
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])


@pytest.fixture
def allocation(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch, _outside: None) -> Iterator[str]:
    """This process is in an allocation of all four nodes."""
    cluster.run("salloc", "--no-shell", "--nodes=4", "--job-name=allocation", "--quiet")
    job = cluster.run("squeue", "-h", "-o", "%i", "-n", "allocation")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-4]")
    yield job
    cluster.run("scancel", job)
    cluster.await_up()


@pytest.mark.usefixtures("allocation")
class TestSteps(LauncherConformance):
    """Inside of an allocation."""

    def engine(self) -> Engine:
        """The allocation's nodes."""
        return slurm.engine(Site())


@pytest.mark.usefixtures("_outside")
class TestJobs(LauncherConformance):
    """One job for each attempt."""

    def engine(self) -> Engine:
        """The queue."""
        return slurm_batch.engine(Site())


@pytest.mark.usefixtures("allocation")
def test_the_nodes_are_divided_in_order() -> None:
    engine = engine_named("slurm", site=Site())
    assert engine.divide(num_nodes=2, at_once=2) == (("n1", "n2"), ("n3", "n4"))
    with pytest.raises(
        ConfigError, match=r"3 trials at once of 2 nodes need 6, and the allocation has 4; ask"
    ):
        engine.divide(num_nodes=2, at_once=3)


@pytest.mark.usefixtures("_outside")
def test_outside_of_an_allocation_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="salloc, or a script for sbatch"):
        engine_named("slurm", site=Site()).divide(num_nodes=1, at_once=1)


@pytest.mark.usefixtures("allocation")
def test_a_heterogeneous_job_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    with pytest.raises(ConfigError, match="heterogeneous"):
        engine_named("slurm", site=Site()).divide(num_nodes=1, at_once=1)


def test_engines_by_name() -> None:
    assert {"local", "slurm", "slurm-batch"} <= set(engine_names())
    with pytest.raises(ConfigError, match="must be one of local"):
        engine_named("lsf", site=Site())


def test_nothing_is_queued_at_the_end(cluster: SlurmCluster) -> None:
    assert cluster.run("squeue", "-h", "--states=RUNNING,PENDING") == ""


def test_paths_are_not_filename_patterns(tmp_path: Path) -> None:
    launcher = slurm_batch.SlurmBatchLauncher(1, Site())
    words = launcher.words(["x"], attempt_id="0" * 32, cwd=tmp_path, stdout=tmp_path / "%j" / "out")
    assert f"--output={tmp_path}/%%j/out" in words
